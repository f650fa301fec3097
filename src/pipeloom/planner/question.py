"""What somebody asks of the planner: a model, a cluster, a batch, and what may be chosen."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from pipeloom.cost.flops import shape_model_flops
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software
from pipeloom.errors import ConfigError
from pipeloom.families import FAMILIES
from pipeloom.planner.bounds import Bounds
from pipeloom.predict.describe import dtype_problem
from pipeloom.terminal.words import count, did_you_mean
from pipeloom.workload.dtypes import Precision, dtype_of
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Attention, Run


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a layout may be. ``None``: anything that model, batch and program allow.

    Attributes:
        tp, pp, dp: sizes of the tensor, pipeline and data axis.
        loops: stages of each pipeline rank.
        micro_batch: sequences of a micro-batch.
        families: schedules.
        shards: what data parallelism shares out.
        recompute: what the backward computes again; ``full`` also allows some of the layers.
        sequence_parallel: whether what tensor parallelism leaves whole may or must be split.
        ways: in which room is made for activations or stages, or sequences are cut; ``none`` is a layout without, which
            is also the answer where the others lead to no layout.
    """

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    loops: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    families: tuple[str, ...] | None = None
    shards: tuple[Shard, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    ways: tuple[str, ...] | None = None

    def allows(self, **values: Any) -> bool:
        """Whether each value is one that may be chosen."""
        return all((among := getattr(self, name)) is None or value in among for name, value in values.items())

    @cached_property
    def names(self) -> list[str]:
        """Those that limit anything."""
        return [item.name for item in fields(self) if getattr(self, item.name) is not None]


@dataclass(frozen=True, kw_only=True, repr=False)
class Question:
    """What is to be trained, where, and on how many devices. ``make_question`` takes names of the catalog.

    Examples:
        >>> from pipeloom import make_question
        >>> question = make_question("gpt-6.6b", "dgx-a100", num_devices=16, global_batch=64, seq=1024)
        >>> question.limited(pp=(4, 8))
        Question(gpt-6.6b on 16 devices of dgx-a100, 64 sequences of 1,024 tokens in bfloat16, limits: pp)

    Attributes:
        shape: the model.
        cluster: where.
        software: with what.
        num_devices: of the run; a layout uses all of them.
        global_batch: sequences of a step.
        seq: tokens of a sequence.
        precision: of weights and activations in products.
        attention: the kernel.
        fused_norm: whether a norm is one kernel.
        limits: what may be chosen.
        has_default_dtype: whether the precision is the devices' default, since nobody chose one.
    """

    shape: ModelShape
    cluster: Cluster
    software: Software
    num_devices: int
    global_batch: int
    seq: int
    precision: Precision = "bf16"
    attention: Attention = "flash2"
    fused_norm: bool = True
    limits: Limits = field(default_factory=Limits)
    has_default_dtype: bool = False

    def __repr__(self) -> str:
        """Model, cluster and sizes."""
        batch = f"{count(self.global_batch, 'sequence')} of {count(self.seq, 'token')} in {dtype_of(self.precision)}"
        limits = f", limits: {', '.join(self.limits.names)}" if self.limits.names else ""
        where = f"{count(self.num_devices, 'device')} of {self.cluster.name}"
        return f"Question({self.shape.name or 'a model'} on {where}, {batch}{limits})"

    @cached_property
    def bounds(self) -> dict[tuple[Run, Cluster, bool], Bounds]:
        """What is known of the steps of its layouts (``planner.bounds``), by run, cluster and kind of backward."""
        return {}

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: everything that is wrong.
        """
        problems = self._problems()
        if problems:
            raise ConfigError(problems, "the question")

    def _problems(self) -> list[str]:
        sizes = {"devices": self.num_devices, "the global batch": self.global_batch, "seq": self.seq}
        found = [f"{name} must be at least 1, found {value}" for name, value in sizes.items() if value < 1]
        found += [f"{name} must be at most {MOST:,}, found {value}" for name, value in sizes.items() if value > MOST]
        lack = self.cluster.lack(self.num_devices)
        if lack is not None:
            found.append(lack)
        elif not self.clusters:
            device = self.cluster.device
            found.append(f"the dtype {dtype_problem(dtype_of(self.precision), device.name, device.peak_flops_per_s)}")
        offered = self._offered
        for what, wanted, has in (
            ("family", self.limits.families, offered),
            ("sharding level", self.limits.shards, self.software.shards or LEVELS),
            ("way", self.limits.ways, ("none", *self.software.ways)),
        ):
            found += [
                f"{self.software.name} has no {what} '{name}'; {_hint(name, has)}it has {', '.join(has)}"
                for name in wanted or ()
                if name not in has
            ]
        return found

    @cached_property
    def _offered(self) -> tuple[str, ...]:
        trained = tuple(name for name, known in FAMILIES.items() if known.has_backward)
        return self.software.families or trained

    @cached_property
    def families(self) -> tuple[str, ...]:
        """Schedules that may be chosen; those that are searched for one by one take long, and have to be named."""
        return self.limits.families or tuple(name for name in self._offered if not FAMILIES[name].is_found)

    @cached_property
    def families_by_split(self) -> dict[bool, tuple[str, ...]]:
        """Those with whole backwards, and those that run the two halves apart."""
        return {
            splits: tuple(name for name in self.families if FAMILIES[name].splits_backward == splits)
            for splits in (False, True)
        }

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Sharding levels that may be chosen, the least first."""
        among = self.limits.shards or self.software.shards or LEVELS
        return tuple(level for level in LEVELS if level in among)

    @cached_property
    def ways(self) -> tuple[str, ...]:
        """In which room may be made for activations or stages, or sequences be cut."""
        return tuple(way for way in self.software.ways if self.limits.allows(ways=way))

    @cached_property
    def recompute(self) -> tuple[Recompute, ...]:
        """What may be recomputed: attention alone only where its kernel keeps the scores."""
        keeps_scores = self.attention in ("plain", "fused-softmax")
        usual: tuple[Recompute, ...] = ("none", "selective", "full") if keeps_scores else ("none", "full")
        return self.limits.recompute or usual

    @cached_property
    def clusters(self) -> tuple[Cluster, ...]:
        """The cluster in every order of its kinds of nodes that gives the run other devices, all of its precision."""
        found: dict[tuple[str, ...], Cluster] = {}
        for order in self.cluster.orders():
            cluster = self.cluster.reordered(order)
            kinds = [kind for kind, _ in cluster.kinds(max(1, self.num_devices))]
            if all(self.precision in kind.device.peak_flops_per_s for kind in kinds):
                found.setdefault(tuple(kind.name for kind in kinds), cluster)
        return tuple(found.values())

    def limited(self, **limits: Any) -> "Question":
        """The question with some of its limits changed."""
        return replace(self, limits=replace(self.limits, **limits))

    @cached_property
    def least_s(self) -> float:
        """Seconds of the step at least, whatever the layout: no prediction uses more than the peak of its devices."""
        flops = self.global_batch * self.seq * shape_model_flops(self.shape, self.seq)
        return flops / max(one.peak_flops_per_s(self.num_devices, self.precision) for one in self.clusters)

    @property
    def run(self) -> Run:
        """What every layout has in common, on one device."""
        return Run(
            shape=self.shape,
            seq=self.seq,
            global_batch=self.global_batch,
            attention=self.attention,
            fused_norm=self.fused_norm,
            precision=self.precision,
        )


MOST = 10**9
"""Devices, sequences of a batch and tokens of a sequence of a question."""
LEVELS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "full")
"""Every sharding level, the least first."""


def layout_limits(run: Run, family: str) -> dict[str, Any]:
    """The limits that leave one layout, but for what is sharded and recomputed."""
    names = ("tp", "pp", "dp", "loops", "micro_batch", "sequence_parallel")
    return {name: (getattr(run, name),) for name in names} | {"families": (family,)}


def divisors(number: int) -> list[int]:
    """Everything that divides a number, ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]


def axes(num_devices: int, tps: Iterable[int]) -> list[tuple[int, int, int]]:
    """(tp, pp, dp) whose product is the number of devices.

    Args:
        num_devices: of the whole run.
        tps: sizes of the tensor axis that may be; those that do not divide the devices are left out.
    """
    return [
        (tp, pp, num_devices // tp // pp) for tp in tps if num_devices % tp == 0 for pp in divisors(num_devices // tp)
    ]


def _hint(name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
    return f"{hint} " if hint else ""
