"""What is compared: sizes of the model, layouts, and the programs that train each of them."""

from dataclasses import dataclass
from typing import Any

from side_by_side.case import Link


@dataclass(frozen=True, kw_only=True)
class Size:
    """A llama and its batch, the same for all programs and layouts.

    Attributes:
        name: for ``--size``.
        num_layers: of the model.
        hidden_size: of the model.
        num_heads: of the model, with as many heads of keys.
        seq_len: tokens of a sequence.
        num_microbatches: of a step, over all replicas.
        microbatch_size: sequences.
        warmup: steps of a program before those that count.
        turns: how often a program runs in a round, while the others of its row are paused.
        timed: steps of a turn that count; the first one of a turn, in which it was paused, is not among them.
        path: folder of the text that is read; ``None`` for the default of pipeloom.
    """

    name: str
    num_layers: int = 8
    hidden_size: int = 192
    num_heads: int = 6
    seq_len: int = 128
    num_microbatches: int = 8
    microbatch_size: int = 2
    warmup: int = 2
    turns: int = 3
    timed: int = 3
    path: str | None = None

    @property
    def steps(self) -> int:
        """Of a run. The last one does not count: it is under way when a program is ended, or memory is read in it."""
        return self.warmup + self.turns * (1 + self.timed) + 1

    @property
    def batch_size(self) -> int:
        """Sequences of a step."""
        return self.num_microbatches * self.microbatch_size

    def run(self) -> dict[str, dict[str, Any]]:
        """Settings of pipeloom's run, except its layout: no prediction, evaluation or checkpoint."""
        data = {"seq_len": self.seq_len} | ({} if self.path is None else {"path": self.path})
        return {
            "model": {
                "family": "llama",
                "num_layers": self.num_layers,
                "hidden_size": self.hidden_size,
                "num_heads": self.num_heads,
            },
            "data": data,
            "optimizer": {"name": "adamw"},
            "training": {
                "steps": self.steps,
                "predict": False,
                "validation_batches": 0,
                "sample_tokens": 0,
                # A program is paused while the others take their turns.
                "stall_timeout_s": 600.0,
            },
            "checkpoint": {"final": "none"},
        }


SIZES = (Size(name="small"), Size(name="large", hidden_size=512, num_heads=8, warmup=1, turns=2, timed=1))


@dataclass(frozen=True)
class Program:
    """A program that trains.

    Attributes:
        name: for people.
        kind: of ``peers.programs.PROGRAMS``; ``pipeloom`` for its command.
        loops: stages on each rank.
        words: of pipeloom's command, in addition to those of the layout.
        schedule: of PyTorch's pipelining.
        needs: a package that may be missing.
    """

    name: str
    kind: str
    loops: int = 1
    words: tuple[str, ...] = ()
    schedule: str = ""
    needs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout with the programs that train it.

    Attributes:
        name: for ``--rows`` and people.
        programs: pipeloom's first.
        limit: what the ratio of pipeloom's fastest program to the best peer is to be at most.
        threads: of each process.
        pp: pipeline ranks.
        dp: replicas.
        shard: of pipeloom's layout.
        link: between the ranks, each on a host of its own; ``None`` for the loopback of this host.
    """

    name: str
    programs: tuple[Program, ...]
    limit: float
    threads: int = 1
    pp: int = 1
    dp: int = 1
    shard: str = "none"
    link: Link | None = None

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.pp * self.dp

    def words(self, program: Program, size: Size) -> list[str]:
        """The layout as words of pipeloom's command."""
        found = ["--layout.pp", self.pp, "--layout.dp", self.dp, "--layout.loops", program.loops]
        found += ["--layout.num-microbatches", size.num_microbatches // self.dp]
        found += ["--layout.microbatch-size", size.microbatch_size, "--layout.shard", self.shard]
        found += ["--training.threads", self.threads]
        return [*map(str, found), *program.words]


OURS = Program("pipeloom", "pipeloom")
ONE_LOOP = Program("pipeloom, 1 loop", "pipeloom")
ZERO_BUBBLE = Program("pipeloom, zb-h2", "pipeloom", words=("--schedule.family", "zb-h2"))
TWO_LOOPS = Program("pipeloom, 2 loops", "pipeloom", loops=2)
PLAIN = Program("plain loop", "plain")
TRANSFORMERS = Program("transformers", "transformers", needs="transformers")
DDP = Program("DDP", "ddp")
FSDP2 = Program("FSDP2", "fsdp")
ONE_F_ONE_B = Program("PyTorch 1F1B", "pipelining", schedule="1F1B")
INTERLEAVED = Program("PyTorch Interleaved1F1B", "pipelining", loops=2, schedule="Interleaved1F1B")
LOOPED_BFS = Program("PyTorch LoopedBFS", "pipelining", loops=2, schedule="LoopedBFS")
INTERLEAVED_ZB = Program("PyTorch InterleavedZeroBubble", "pipelining", loops=2, schedule="InterleavedZeroBubble")
ZBV = Program("PyTorch ZBVZeroBubble", "pipelining", loops=2, schedule="ZBVZeroBubble")
LOOPED_FSDP2 = Program("PyTorch LoopedBFS + FSDP2", "pipelining", loops=2, schedule="LoopedBFS")
PIPELINING = (ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS, INTERLEAVED_ZB, ZBV)

ROWS = (
    Row(name="1 process, 1 thread", programs=(OURS, PLAIN, TRANSFORMERS), limit=1.0),
    Row(name="1 process, 2 threads", programs=(OURS, PLAIN, TRANSFORMERS), limit=1.0, threads=2),
    Row(name="dp 2", programs=(OURS, DDP), limit=1.0, dp=2),
    Row(name="dp 2, fully sharded", programs=(OURS, FSDP2), limit=1.0, dp=2, shard="full"),
    Row(name="pp 2", programs=(ONE_LOOP, ZERO_BUBBLE, TWO_LOOPS, *PIPELINING), limit=0.97, pp=2),
    Row(name="pp 4", programs=(ONE_LOOP, ZERO_BUBBLE, TWO_LOOPS, *PIPELINING), limit=0.97, pp=4),
    Row(
        name="pp 2 x dp 2, fully sharded",
        programs=(ONE_LOOP, TWO_LOOPS, LOOPED_FSDP2),
        limit=0.85,
        pp=2,
        dp=2,
        shard="full",
    ),
    Row(
        name="pp 2, network",
        programs=(ONE_LOOP, ZERO_BUBBLE, TWO_LOOPS, *PIPELINING),
        limit=0.70,
        pp=2,
        link=Link(200, 5),
    ),
)
