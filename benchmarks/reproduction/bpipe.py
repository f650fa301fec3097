"""BPipe's case (Kim et al., ICML 2023; Huang et al., arXiv 2401.02088): 1F1B whose pairs of ranks share their memory.

Every step is simulated with costs that were fixed on other runs; nothing here was fitted to either paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from pipeloom.catalog import load_cluster, load_software
from pipeloom.cost.analytic import drain_s, stage_costs, step_terms
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.flops import shape_model_flops
from pipeloom.cost.memory import layer_activation_bytes
from pipeloom.cost.shape import Attention, Mlp, ModelShape, Run
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.generate import make_schedule
from pipeloom.layout import Recompute
from pipeloom.predict.memory import held_bytes, recomputed_bytes
from pipeloom.report.memory import HeldBytes, MemoryCurve, memory_over_time
from pipeloom.schedule import Kind, Schedule, balance, lower
from pipeloom.schedule.recompute import recompute_beyond
from pipeloom.simulate import simulate
from pipeloom.trace import Trace
from reproduction.machine import MEGATRON, Row, with_efficiency

CLUSTER = load_cluster("dgx-a100")
SCALING = load_software("scaling-2023a")
MICROBATCHES = (1, 2, 4)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ATTENTION: tuple[Attention, ...] = ("fused-softmax", "flash2")
SEQ = 2048
NEAR = True
"""Partners are on one node, and swap over NVLink; otherwise over InfiniBand."""


def gpt(layers: int, hidden: int, heads: int) -> ModelShape:
    """A GPT-3 of these sizes."""
    return _shape(layers, hidden, heads, mlp="gelu", ffn=4 * hidden, vocab=51200)


def _shape(layers: int, hidden: int, heads: int, *, mlp: Mlp, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        mlp=mlp,
        vocab=vocab,
        tied=mlp == "gelu",
    )


LLAMA = _shape(80, 8192, 64, mlp="swiglu", ffn=22016, vocab=32000)


@dataclass(frozen=True)
class Case:
    """A model in a layout that one of the papers used, or may have used.

    Attributes:
        model: its name there.
        shape: its sizes.
        tp, pp: tensor and pipeline axis.
        batch: sequences of a step.
    """

    model: str
    shape: ModelShape
    tp: int
    pp: int
    batch: int = 128

    @property
    def name(self) -> str:
        """For tables."""
        shape = self.shape
        sizes = f"{shape.layers} x {shape.hidden}, {shape.heads} heads"
        return f"{self.model}: {sizes}, tp {self.tp}, pp {self.pp}, batch {self.batch}"

    @property
    def is_near(self) -> bool:
        """Whether a node has room for a pair of ranks."""
        return 2 * self.tp <= CLUSTER.devices_per_node


GPT_96B = Case("96B", gpt(80, 9984, 104), 4, 8)
LLAMA_65B = Case("LLaMA 65B", LLAMA, 4, 8)
CASES = (
    GPT_96B,
    replace(GPT_96B, batch=32),
    replace(GPT_96B, batch=64),
    replace(GPT_96B, batch=512),
    replace(GPT_96B, pp=12),
    replace(GPT_96B, tp=8, pp=6),
    Case("134B", gpt(96, 10752, 84), 4, 12),
    Case("134B", gpt(96, 10752, 96), 4, 12),
    Case("134B", gpt(96, 10752, 112), 4, 12),
    Case("134B", gpt(96, 10752, 112), 8, 6),
    Case("134B", gpt(88, 11264, 88), 4, 12),
    Case("134B", gpt(88, 11264, 88), 8, 6),
    LLAMA_65B,
)
"""The first one is what the re-evaluation is remembered to have run. The 48 GPUs of BPipe's paper are 12 x 4 or 6 x 8
here; which layout and which 134B it had is not known."""

COUNTED_SOFTMAX_BYTES = (2 * (6 + 8 + 8 + 8 + 6) + (6 + 12 + 8 + 8 + 6)) / 3.5
"""Bytes that Megatron-LM's unfused softmax moves for each score, counted in its source (``fused_softmax.py``): cast to
single precision, scale, mask, softmax, cast back; forward twice (selective recomputation) and backward once, for which
the cost model takes 1.5 forwards."""

FUSED_SOFTMAX_BYTES = 4.0
"""Bytes of the fused one (``pipeloom.cost.layers``)."""


def _with_kernels(software: Software, softmax_bytes: float) -> Software:
    """A program with the kernels that its own calibration had no rows for, from calibrations that had."""
    flash2 = load_software("scaling-2023b").efficiency.flash2
    return with_efficiency(software, softmax_bytes=softmax_bytes, flash2=flash2)


PROGRAMS = {
    "megatron-2021": _with_kernels(MEGATRON, SCALING.efficiency.softmax_bytes),
    "softmax counted": _with_kernels(MEGATRON, COUNTED_SOFTMAX_BYTES),
    "softmax as if fused": _with_kernels(MEGATRON, FUSED_SOFTMAX_BYTES),
    "16 bytes a parameter": replace(_with_kernels(MEGATRON, SCALING.efficiency.softmax_bytes), weight_state_bytes=4.0),
    "scaling-2023a": _with_kernels(SCALING, SCALING.efficiency.softmax_bytes),
}
"""Unfused softmax and flash attention come from the two programs that were calibrated on runs with them (llama-13b).
As if fused: what is left of a gain if the unfused kernel were as fast. 16 bytes of state for each parameter: gradients
in half precision; otherwise 18."""
PROGRAM, COUNTED, FUSED, SMALL, OTHER = PROGRAMS


@dataclass(frozen=True)
class Setting:
    """What one configuration of a case chooses.

    Attributes:
        attention: the kernel that is asked for.
        recompute: of all layers.
        micro_batch: sequences.
    """

    attention: Attention
    recompute: Recompute
    micro_batch: int


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        run: as it is described.
        seconds: of the whole step.
        slot_s: of the slowest stage's forward and backward.
        rank_bytes: for each rank the most that a device of it holds.
        num_moved: evictions and loads of all ranks.
        num_again: forwards that run again because a rank is short of memory.
    """

    run: Run
    seconds: float
    slot_s: float
    rank_bytes: tuple[float, ...]
    num_moved: int
    num_again: int

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, a fraction."""
        return self._mfu(self.run.global_batch, self.seconds)

    @property
    def stage_mfu(self) -> float:
        """That of the slowest stage alone while it never waits."""
        return self._mfu(self.run.micro_batch, self.run.pp * self.slot_s) * self.run.pp

    def _mfu(self, sequences: int, seconds: float) -> float:
        run = self.run
        flops = sequences * run.seq * shape_model_flops(run.shape, run.seq)
        return flops / (seconds * CLUSTER.peak_flops_per_s(run.num_devices, run.precision))

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return max(self.rank_bytes) <= CLUSTER.device.memory_bytes


def run_of(case: Case, setting: Setting) -> Run:
    """A configuration, as the cost model wants it: sequence parallelism, half precision, one replica."""
    return Run(
        shape=case.shape,
        seq=SEQ,
        tp=case.tp,
        pp=case.pp,
        micro_batch=setting.micro_batch,
        global_batch=case.batch,
        recompute=setting.recompute,
        attention=setting.attention,
        sequence_parallel=True,
        precision="fp16",
        schedule="1f1b",
    )


def program_of(case: Case, name: str) -> Software:
    """A program; LLaMA trains without dropout."""
    return replace(PROGRAMS[name], dropout=case.shape.mlp == "gelu")


def costs_of(run: Run, software: Software, *, is_near: bool) -> StageCosts:
    """Seconds of all actions, with those of moving what a micro-batch keeps to the partner or back."""
    use, kept = software.efficiency, kept_bytes(run, software)
    sharing = 1 if is_near else CLUSTER.sharing(run.tp)
    swap_s = tuple(CLUSTER.p2p_s(size, is_inside=is_near, sharing=sharing, efficiency=use.p2p) for size in kept)
    return replace(stage_costs(run, CLUSTER, software), swap_s=swap_s)


def kept_bytes(run: Run, software: Software) -> tuple[float, ...]:
    """For each stage what a micro-batch keeps from forward to backward; all of it moves."""
    return held_bytes(run, software, plain(run)).input_bytes


def plain(run: Run) -> Schedule:
    """1F1B."""
    return lower(make_schedule("1f1b", pp=run.pp, loops=1, num_microbatches=run.num_microbatches))


def balanced(run: Run, costs: StageCosts) -> Schedule:
    """1F1B as BPipe changes it: stage s with stage P - 1 - s; micro-batches are counted, whatever a stage keeps."""
    return balance(plain(run), seconds_of=costs.seconds, partners=tuple(range(run.pp - 1, -1, -1)))


def recomputed(run: Run, software: Software, costs: StageCosts) -> Schedule:
    """1F1B with as many micro-batches recomputed as it takes to fit, on the ranks that are short of memory.

    Raises:
        UserError: some rank has too little room with all of them recomputed.
    """
    room, kept = input_room(run, software, costs), kept_bytes(run, software)
    return recompute_beyond(plain(run), room, kept, recomputed_bytes(run))


def input_room(run: Run, software: Software, costs: StageCosts) -> tuple[float, ...]:
    """For each rank the bytes that are left for what micro-batches keep."""
    schedule = plain(run)
    held, curves = held_curves(run, software, schedule, simulate(schedule, costs))
    return tuple(
        max(0.0, (CLUSTER.device.memory_bytes - always) / (1 + software.fragmentation) - beside)
        for always, beside in zip(
            held.always_bytes,
            (curve.peak_bytes - curve.peak_parts["always"] - curve.peak_parts["stage inputs"] for curve in curves),
            strict=True,
        )
    )


def held_curves(
    run: Run, software: Software, schedule: Schedule, trace: Trace
) -> tuple[HeldBytes, tuple[MemoryCurve, ...]]:
    """How large things are, and what each rank holds over time."""
    held = held_bytes(run, software, schedule)
    held = replace(held, working_bytes=tuple(size + core_bytes(run, software) for size in held.working_bytes))
    return held, memory_over_time(schedule, trace, held)


def stepped(run: Run, software: Software, schedule: Schedule, costs: StageCosts) -> Step:
    """The step of a schedule."""
    trace = simulate(schedule, costs)
    held, curves = held_curves(run, software, schedule, trace)
    most = tuple(
        curve.peak_bytes + software.fragmentation * (curve.peak_bytes - always)
        for curve, always in zip(curves, held.always_bytes, strict=True)
    )
    slots = [forward_s + backward_s for forward_s, backward_s in zip(costs.forward_s, costs.backward_s, strict=True)]
    terms = step_terms(run, CLUSTER, software, max(costs.backward_s))
    seconds = trace.end_s + drain_s(run, software, costs) + terms.total_s
    moved, again = num_of(schedule, Kind.EVICT, Kind.LOAD), num_of(schedule, Kind.RECOMPUTE)
    return Step(run, seconds, max(slots), most, moved, again)


def num_of(schedule: Schedule, *kinds: Kind) -> int:
    """Actions of some kinds."""
    return sum(int(row.is_kind(*kinds).sum()) for row in schedule.rows)


def core_bytes(run: Run, software: Software) -> float:
    """What the core of one layer's attention takes while it is done again."""
    if run.recompute != "selective":
        return 0.0
    sizes = [layer_activation_bytes(replace(run, recompute=kind), dropout=software.dropout) for kind in RECOMPUTE[:2]]
    return sizes[0] - sizes[1]


def steps(case: Case, program: str, setting: Setting) -> dict[str, Step | None]:
    """A configuration in every order; ``None`` where recomputing everything would not make it fit."""
    run, software = run_of(case, setting), program_of(case, program)
    costs = costs_of(run, software, is_near=case.is_near)
    found: dict[str, Step | None] = {
        "1f1b": stepped(run, software, plain(run), costs),
        "bpipe": stepped(run, software, balanced(run, costs), costs),
    }
    try:
        found["short"] = stepped(run, software, recomputed(run, software, costs), costs)
    except UserError:
        found["short"] = None
    return found


def settings() -> Iterator[Setting]:
    """Every configuration of a case."""
    for attention, recompute, micro_batch in product(ATTENTION, RECOMPUTE, MICROBATCHES):
        yield Setting(attention, recompute, micro_batch)


def points() -> list[tuple[Case, str, Setting]]:
    """Every configuration of every case, with the programs that are asked about it."""
    asked = {case: tuple(PROGRAMS) if case in (GPT_96B, LLAMA_65B) else (PROGRAM, COUNTED) for case in CASES}
    return [(case, program, setting) for case in CASES for program in asked[case] for setting in settings()]


def described(case: Case, program: str, setting: Setting) -> Row:
    """A configuration in every order, as the columns of a data file."""
    found = steps(case, program, setting)
    one, other, again = (found[order] for order in ("1f1b", "bpipe", "short"))
    assert one is not None
    assert other is not None
    return {
        "case": case.name,
        "program": program,
        "attention": setting.attention,
        "recompute": setting.recompute,
        "micro_batch": str(setting.micro_batch),
        "kernel": one.run.effective_attention,
        "stage_mfu": f"{one.stage_mfu:.4f}",
        **{f"{order}_{key}": value for order, kind in found.items() for key, value in _columns(kind).items()},
        "moved": str(other.num_moved),
        "again": "" if again is None else str(again.num_again),
    }


def _columns(found: Step | None) -> dict[str, str]:
    if found is None:
        return {"mfu": "", "fullest_gb": "", "emptiest_gb": "", "fits": "no"}
    return {
        "mfu": f"{found.mfu:.4f}",
        "fullest_gb": f"{max(found.rank_bytes) / 1e9:.1f}",
        "emptiest_gb": f"{min(found.rank_bytes) / 1e9:.1f}",
        "fits": "yes" if found.fits else "no",
    }


def estimated(batch: int, pp: int, before: tuple[int, float], after: tuple[int, float]) -> float:
    """MFU after by MFU before: the re-evaluation's estimate, from micro-batches and the MFU of a stage alone.

    A step takes (B / b + P - 1) slots, so that MFU(b) = B / (B + b (P - 1)) MFU_stage(b) (arXiv 2401.02088).

    Args:
        batch: B, sequences of a pipeline's step.
        pp: P.
        before: micro-batch size and MFU of a stage.
        after: the same.
    """
    (x, mfu_x), (y, mfu_y) = before, after
    return (batch + x * (pp - 1)) / (batch + y * (pp - 1)) * mfu_y / mfu_x


def message_s(run: Run, software: Software) -> float:
    """Seconds of one message between stages of two nodes; a blocking program has them in its compute."""
    return stage_costs(run, CLUSTER, replace(software, is_blocking=False)).transfer_s


LINK_POINTS = (
    (GPT_96B, Setting("fused-softmax", "selective", 2)),
    (GPT_96B, Setting("flash2", "none", 2)),
    (LLAMA_65B, Setting("fused-softmax", "selective", 4)),
    (LLAMA_65B, Setting("flash2", "none", 4)),
)
"""Configurations that need BPipe."""


def link_rows() -> list[Row]:
    """BPipe with partners on one node, on two, and on two though it was made for one; and no more than it takes."""
    return [row for case, setting in LINK_POINTS for row in _links_of(case, setting)]


def _links_of(case: Case, setting: Setting) -> Iterator[Row]:
    run, software = run_of(case, setting), program_of(case, PROGRAM)
    near, far = (costs_of(run, software, is_near=is_near) for is_near in (True, False))
    whole = stepped(run, software, plain(run), near)
    made: dict[str, tuple[Schedule | None, StageCosts]] = {
        "NVLink": (balanced(run, near), near),
        "InfiniBand": (balanced(run, far), far),
        "InfiniBand, made for NVLink": (balanced(run, near), far),
        "InfiniBand, what the memory takes": (within(run, software, far), far),
    }
    for link, (schedule, real) in made.items():
        found = None if schedule is None else stepped(run, software, schedule, real)
        yield {
            "case": case.name,
            "attention": setting.attention,
            "recompute": setting.recompute,
            "micro_batch": str(setting.micro_batch),
            "link": link,
            "kept_gb": f"{kept_bytes(run, software)[1] / 1e9:.2f}",
            "swap_ms": f"{real.swap_s[1] * 1e3:.1f}",
            "message_ms": f"{message_s(run, software) * 1e3:.2f}",
            "forward_ms": f"{real.forward_s[1] * 1e3:.1f}",
            "slower": "" if found is None else f"{found.seconds / whole.seconds - 1:.4f}",
            "moved": "" if found is None else str(found.num_moved),
            "plain_gb": f"{max(whole.rank_bytes) / 1e9:.1f}",
            "fullest_gb": "" if found is None else f"{max(found.rank_bytes) / 1e9:.1f}",
        }


def within(run: Run, software: Software, costs: StageCosts) -> Schedule | None:
    """1F1B that evicts only as much as it takes to fit; ``None`` where that is not possible in time."""
    room, kept = input_room(run, software, costs), kept_bytes(run, software)
    partners = tuple(range(run.pp - 1, -1, -1))
    try:
        return balance(plain(run), seconds_of=costs.seconds, input_bytes=kept, budget_bytes=room, partners=partners)
    except UserError:
        return None
