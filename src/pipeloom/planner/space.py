"""The search space of a question, a tree of four levels.

- An ``Arrangement`` divides devices and batch: axes, micro-batch, recomputation.
- A ``Cut`` adds the loops and the partition, which layers are in which stage, by the seconds of the pieces.
- A ``Twig`` adds the sharding.
- A ``Leaf`` adds the schedule. Memory decides the rest (``planner/candidate.py``).

Each has a lower bound of the step time and the number of leaves below it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import gcd
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.memory import frozen_bytes, kept_bytes, lasting_bytes, working_bytes
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.pieces import PieceSeconds
from pipeloom.cost.placed import OfPlaced, Placed
from pipeloom.cost.stages import layers_of_pieces, placement_of, stage_layers
from pipeloom.families import FAMILIES, Choice
from pipeloom.planner.bounds import AnyStages, Bounds, Floats, Sharded
from pipeloom.planner.question import LEVELS, Question, why_not
from pipeloom.planner.schedules import in_flight_of, inputs_of, schedules_of
from pipeloom.planner.stages import Stages
from pipeloom.planner.work import InFlight
from pipeloom.schedule import Placement
from pipeloom.workload.axes import Axes, axes, divisors
from pipeloom.workload.layout import Shard
from pipeloom.workload.run import Run

RecomputeChoice = Literal["none", "selective", "some", "full"]
"""What backwards recompute: nothing, attention, as few layers as memory requires, all layers."""

MOST_ON_A_STEP = 500_000
"""Micro-batches times pipeline ranks; larger schedules take too long to make."""
FEW_LOOPS = 4
"""Every number of loops up to this one is searched; above, those that divide the layers or all pieces evenly."""


@dataclass(frozen=True)
class Arrangement(OfPlaced):
    """A division of devices and batch, with what backwards recompute.

    Attributes:
        placed: axes, micro-batch, sequence parallelism, with nothing recomputed where ``recomputed`` is ``some``; on
            the question's cluster, in one of the orders of its kinds of nodes.
        question: that it answers.
        recomputed: what backwards recompute.
        splits: whether its schedules split backwards.
    """

    question: Question
    recomputed: RecomputeChoice
    splits: bool = False

    @property
    def time(self) -> AnyStages:
        """Lower bounds of the step time."""
        return AnyStages(self.placed, self.splits)

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time in seconds."""
        return self.time.step_s

    @property
    def missing_bytes(self) -> float:
        """Lower bound of the bytes that the fullest device lacks, with the highest sharding level."""
        run, software = self.run, self.software
        leanest = replace(run, recompute="full") if self.recomputed == "some" else run
        shape, layers = run.shape, run.shape.layers / run.pp
        of_experts = layers * shape.expert_parameters / run.tp if run.ep > 1 else 0.0
        held = (layers * shape.layer_matrix_parameters + shape.embedding_parameters / run.pp) / run.tp - of_experts
        kept = layers * kept_bytes(leanest, software) + working_bytes(leanest, software)
        shard = self.question.shards[-1] if run.data_ranks > 1 else "none"
        # On the fullest rank there are at least the mean of the layers.
        trained = held if run.adapter is None else layers * sum(run.adapter.layer_parameters(shape, 1)) / run.tp
        frozen = 0.0 if run.adapter is None else frozen_bytes(replace(run, shard=shard), held)
        state = lasting_bytes(run, trained, software, shard)
        if of_experts:
            shared, own = run.changed(segment="experts", shard=shard), of_experts / run.ep
            trains = run.adapter is None
            state += lasting_bytes(shared, own, software, shard) if trains else frozen_bytes(shared, own)
        least = state + frozen + kept + software.reserve_bytes
        # The largest device: a bound holds for every partition.
        return least - max(self.placed.device_bytes) * (1 - self.question.headroom)

    @cached_property
    def count(self) -> int:
        """Leaves below it."""
        shards = len(self.shardings())
        return sum(shards * len(self.choices(loops, placement)) for loops, placement in self._loops)

    @cached_property
    def _loops(self) -> list[tuple[int, str]]:
        """(loops, placement) of the cuts."""
        is_balanced = self.software.partition == "balanced"
        allowed = _numbers_of_loops(
            self.run.shape.layers, self.run.pp, self.question.limits.loops, is_balanced=is_balanced
        )
        allowed = allowed if is_balanced else tuple(loops for loops in allowed if self._divides(loops))
        launcher, microbatches = self.question.launcher, self.run.num_microbatches
        allowed = tuple(loops for loops in allowed if launcher.has_order(self.run.pp, loops, microbatches))
        found = [(loops, "looped") for loops in allowed]
        # Families in V placement have two stages on each rank.
        has_v = self.run.pp > 1 and is_balanced and launcher.has_placement("v")
        return found + ([(2, "v")] if 2 in allowed and has_v else [])

    def _divides(self, loops: int) -> bool:
        """Whether the program's own rule assigns every layer to a stage."""
        return sum(stage_layers(replace(self.run, loops=loops), self.software)[0]) == self.run.shape.layers

    @cached_property
    def cuts(self) -> tuple["Cut", ...]:
        """Its children, one for each number of loops and placement."""
        return tuple(
            self._cut(self.run.changed(loops=loops, placement=placement))
            for loops, placement in self._loops
            if self.choices(loops, placement)
        )

    def _cut(self, run: Run) -> "Cut":
        if self.software.partition == "balanced":
            pieces, slowness = self.placed.fastest_pieces, self.placed.slowness
            layers = _layers_by_stage(pieces, run.shape.layers, placement_of(run), slowness)
            run = run.changed(layers_by_stage=layers)
        return Cut(self.placed.of(run), self)

    @cached_property
    def _families(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The families of schedules with one stage on each rank, and with several."""
        every = self.question.families_of_parts if self.run.divides_microbatches else self.question.families
        names = [name for name in every if FAMILIES[name].splits_backward == self.splits]
        has_family, ranks = self.question.launcher.has_family, self.run.pp
        one, several = (tuple(name for name in names if has_family(name, ranks, stages)) for stages in (1, 2))
        return one, several

    def choices(self, loops: int, placement: str) -> tuple[Choice, ...]:
        """Schedules of such stages."""
        return schedules_of(self._families[loops > 1], self.run.pp, loops, placement, self.run.num_microbatches)

    def shardings(self) -> list["Sharding"]:
        """Shardings over all data-parallel ranks, or over those of a node."""
        ranks, shards = self.run.data_ranks, self.question.shards
        if ranks == 1:
            return [Sharding(("none",), 1)]
        found = [Sharding(("none",), 1)] if "none" in shards else []
        levels = tuple(shard for shard in LEVELS if shard in shards and shard != "none")
        # The largest number of whole replicas that share a node and divide the data axis.
        inside = gcd(self.cluster.devices_per_node // self.run.tp // self.run.cp, self.run.dp) * self.run.cp
        # The ranks that share experts do not divide into copies of the state.
        among = dict.fromkeys(size for size in (ranks, inside if self.run.ep == 1 else ranks) if size > 1)
        parts = [levels] if self.recomputed != "some" else [(level,) for level in levels]
        return found + [Sharding(part, ranks // size) for part in parts for size in among if part]


class Sharding(NamedTuple):
    """Sharding of data parallelism.

    Attributes:
        levels: allowed levels, the least first; the first that fits is used, since it communicates least. Where a
            higher level leaves fewer layers to recompute, each level is a leaf of its own.
        replicate: copies of the sharded state.
    """

    levels: tuple[Shard, ...]
    replicate: int


@lru_cache(maxsize=4096)
def _numbers_of_loops(layers: int, pp: int, wanted: tuple[int, ...] | None, *, is_balanced: bool) -> tuple[int, ...]:
    """Numbers of loops to search: those of the limits, else small or even ones."""
    pieces = layers + 2
    return tuple(
        loops
        for loops in range(1, (pieces if is_balanced else layers) // pp + 1)
        if (
            loops in wanted
            if wanted is not None
            else (loops <= FEW_LOOPS and pp > 1) or layers % (pp * loops) == 0 or pieces % (pp * loops) == 0
        )
    )


@lru_cache(maxsize=4096)
def _layers_by_stage(
    pieces: PieceSeconds, layers: int, placement: Placement, slowness: tuple[float, ...]
) -> tuple[int, ...]:
    return layers_of_pieces(fastest_partition(pieces.both_s(layers), placement, slowness))


@dataclass(frozen=True)
class Cut(OfPlaced):
    """An arrangement cut into stages.

    Attributes:
        placed: with loops, placement and the layers of each stage.
        arrangement: its parent.
    """

    arrangement: Arrangement

    @cached_property
    def time(self) -> Bounds:
        """Bounds of the step time; with nothing recomputed if memory decides that."""
        return self.bounds(self.run)

    @cached_property
    def memory(self) -> Bounds:
        """Bounds of the memory; with everything recomputed if memory decides that."""
        has_some = self.arrangement.recomputed == "some"
        return self.bounds(self.run.changed(recompute="full")) if has_some else self.time

    def bounds(self, run: Run) -> Bounds:
        """Bounds of a run with these stages, cached by the question."""
        splits, question = self.arrangement.splits, self.arrangement.question
        known, key = question.bounds, (run, self.cluster, splits)
        if key not in known:
            placed, alike = self.placed.of(run), self.placed.of(run.of_stages)
            stages = question.stages.setdefault(alike, Stages(alike))
            known[key] = Bounds(placed, stages, splits, question.headroom)
        return known[key]

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Schedules of its leaves."""
        return self.arrangement.choices(self.run.loops, self.run.placement)

    @cached_property
    def shardings(self) -> list[Sharding]:
        """Shardings of its leaves."""
        return self.arrangement.shardings()

    @property
    def missing_bytes(self) -> float:
        """Lower bound of the bytes that the fullest device lacks, with any sharding."""
        return min(self._missing_bytes())

    @property
    def may_fit(self) -> bool:
        """Whether ``missing_bytes`` is at most 0."""
        return any(missing <= 0 for missing in self._missing_bytes())

    def _missing_bytes(self) -> Iterator[float]:
        levels = list(dict.fromkeys(level for sharding in self.shardings for level in sharding.levels))
        for level in self._leanest(levels):
            yield self.memory.missing_bytes(self.memory.sharded(level).held_bytes())

    def has_room(self, sharding: Sharding) -> bool:
        """Whether the devices may have room for one stage input on each rank, less than any strategy needs."""
        each = (self.memory.sharded(level, sharding.replicate) for level in self._leanest(sharding.levels))
        return any(self.memory.missing_bytes(one.least_bytes) <= 0 for one in each)

    def _leanest(self, levels: Sequence[Shard]) -> Sequence[Shard]:
        """The sharding levels of which one holds least, first the highest one, which mostly does."""
        # With tied embeddings a rank may borrow the matrix of its own shards and hold more. Frozen weights have no
        # state to shard: gathered, they may take more than whole.
        return levels[::-1] if self.run.shape.tied or self.run.adapter is not None else levels[-1:]

    @property
    def twigs(self) -> "Iterator[Twig]":
        """Its children, one for each of its shardings."""
        return (Twig(self, sharding) for sharding in self.shardings)

    def leaves(self) -> "Iterator[Leaf]":
        """The leaves below it, whether they fit or not."""
        return (leaf for twig in self.twigs for leaf in twig.leaves)

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of the step time in seconds for any sharding."""
        return self.time.least_step_s

    @property
    def count(self) -> int:
        """Leaves below it."""
        return len(self.choices) * len(self.shardings)


@dataclass(frozen=True)
class Twig:
    """A cut with its sharding. Its leaves have the same stages, so that they are bounded together.

    Attributes:
        cut: the stages.
        sharding: allowed levels, and copies.
    """

    cut: Cut
    sharding: Sharding

    @property
    def count(self) -> int:
        """Leaves below it."""
        return len(self.cut.choices)

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time in seconds for any schedule."""
        return self._time.step_s

    @property
    def _time(self) -> Sharded:
        """Bounds with its first level, which takes the least time."""
        return self.cut.time.sharded(self.sharding.levels[0], self.sharding.replicate)

    @property
    def leaves(self) -> "list[Leaf]":
        """Its children, one for each schedule."""
        return [Leaf(self.cut, self.sharding, choice) for choice in self.cut.choices]

    def bounded(self, leaves: "Sequence[Leaf]") -> "tuple[list[tuple[float, Leaf]], list[Leaf]]":
        """The leaves that may fit, without the sharding levels that cannot, with their bounds; and the other leaves."""
        in_flight = in_flight_of(tuple(leaf.choice for leaf in leaves))
        levels, found = self._first_levels(in_flight), list[tuple[float, Leaf]]()
        for number in range(len(self.sharding.levels)):
            fits = levels == number
            if not fits.any():
                continue
            levels_left = self.sharding._replace(levels=self.sharding.levels[number:])
            trimmed = self if number == 0 else replace(self, sharding=levels_left)
            bounds_s = trimmed.bounds_of(in_flight.take(fits))
            fitting = [leaves[one] for one in np.flatnonzero(fits).tolist()]
            own = fitting if number == 0 else [replace(leaf, sharding=trimmed.sharding) for leaf in fitting]
            found += zip(bounds_s, own, strict=True)
        return found, [leaves[one] for one in np.flatnonzero(levels == len(self.sharding.levels)).tolist()]

    def _first_levels(self, in_flight: InFlight) -> NDArray[np.intp]:
        """For each schedule the number of the first sharding level that may fit; that of all levels if none can."""
        memory, levels = self.cut.memory, self.sharding.levels
        first = np.full(len(in_flight.inputs), len(levels))
        for number, shard in reversed([*enumerate(levels)]):
            sharded = memory.sharded(shard, self.sharding.replicate)
            room = sharded.recomputing_room if self.cut.arrangement.recomputed == "some" else sharded.least_room
            held = sharded.held_bytes(in_flight.inputs, room)
            first[(held - memory.capacity_bytes).max(axis=1) <= 0] = number
        return first

    def bounds_of(self, in_flight: InFlight) -> list[float]:
        """For each schedule the lower bound of the step time in seconds, with the layers that it must recompute."""
        time, arrangement, closed = self._time, self.cut.arrangement, in_flight.is_closed
        bounds_s = np.full(len(closed), self.bound_s)
        if not closed.any() or not (arrangement.splits or arrangement.recomputed == "some"):
            return bounds_s.tolist()
        held = in_flight.take(closed)
        if arrangement.splits:
            bounds_s[closed] = np.maximum(bounds_s[closed], time.in_flight_bound_s(held.inputs))
        if arrangement.recomputed == "some":
            again_s = self.cut.time.recomputing_s(time.layers_to_recompute(held)) + time.after_s
            bounds_s[closed] = np.maximum(bounds_s[closed], again_s)
        return bounds_s.tolist()


@dataclass(frozen=True)
class Leaf:
    """A twig with its schedule.

    Attributes:
        cut: the stages.
        sharding: allowed levels, and copies.
        choice: the schedule.
        strategy: name of its strategy; ``none`` for a plain layout.
        has_exchanges: whether its bound in the frontier counts the collectives of its order.
    """

    cut: Cut
    sharding: Sharding
    choice: Choice
    strategy: str = "none"
    has_exchanges: bool = field(default=False, compare=False)

    @property
    def count(self) -> int:
        """One leaf."""
        return 1

    @property
    def twig(self) -> Twig:
        """Its parent."""
        return Twig(self.cut, self.sharding)

    def placed(self, shard: Shard) -> Placed:
        """Its placed run with a sharding level."""
        run = self.cut.run.changed(shard=shard, replicate=self.sharding.replicate)
        return self.cut.placed.with_sharding_of(run)

    @property
    def stage_inputs(self) -> Floats | None:
        """[rank, number of its stage] stage inputs at a rank's peak; ``None`` without a closed form."""
        return inputs_of(self.choice)

    @property
    def bounded(self) -> "tuple[float, Leaf] | None":
        """Lower bound of its step time in seconds, and itself without the sharding levels that cannot fit.

        ``None`` if none can.
        """
        fitting, _ = self.twig.bounded([self])
        return fitting[0] if fitting else None


def arrangements(question: Question) -> tuple[list[Arrangement], Counter[str]]:
    """All arrangements of a question, and the excluded axes and micro-batches by cause."""
    excluded = Counter[str]()
    return list(each_arrangement(question, excluded)), excluded


def each_arrangement(question: Question, excluded: Counter[str]) -> Iterator[Arrangement]:
    """Generate the arrangements of a question, possibly many thousands.

    A cluster with several kinds of nodes has all arrangements in every order of the groups of nodes.

    Args:
        question: to answer.
        excluded: receives the number of excluded axes and micro-batches by cause.
    """
    limits = question.limits
    for sizes in axes(question.num_devices, divisors(question.num_devices), question.context_sizes):
        if not limits.allows(**sizes._asdict()):
            continue
        cause, (_, _, dp, pp) = why_not(question, sizes), sizes
        if pp * dp == 1 and (reasons := question.left_out.why("one group")):
            cause = reasons[0]
        if cause is not None:
            excluded[cause] += 1
            continue
        for micro_batch in divisors(question.global_batch // dp):
            if question.global_batch // dp // micro_batch * pp > MOST_ON_A_STEP:
                excluded[f"a step would have more than {MOST_ON_A_STEP:,} micro-batches on its ranks"] += 1
            elif limits.allows(micro_batch=micro_batch) and not _has_better_axes(question, sizes, micro_batch):
                run = replace(question.run, **sizes._asdict(), micro_batch=micro_batch)
                for cluster, one in product(question.clusters, question.expert_runs(run)):
                    for own in _arrangements_of(question, cluster, one):
                        yield from (replace(own, splits=splits) for splits in question.splits(pp))


def has_arrangement(question: Question) -> bool:
    """Whether a question has any arrangement."""
    return next(each_arrangement(question, Counter()), None) is not None


def _arrangements_of(question: Question, cluster: Cluster, run: Run) -> Iterator[Arrangement]:
    """Arrangements of these axes with and without sequence parallelism, for each kind of recomputation."""
    for is_split in (False, True) if run.tp > 1 else (False,):
        split = replace(run, sequence_parallel=is_split)
        if not question.limits.allows(sequence_parallel=is_split) or question.axis_problems(split):
            continue
        placed = Placed(split, cluster, question.software)
        for kind in question.recompute:
            yield Arrangement(placed.of(replace(split, recompute=kind)), question, kind)
        if {"none", "full"} <= set(question.recompute) and question.launcher.recomputes_some:
            yield Arrangement(placed, question, "some")


def _has_better_axes(question: Question, sizes: Axes, micro_batch: int) -> bool:
    """Whether a smaller context axis with as much more data axis is searched, which needs no exchange.

    A rank has as many tokens, of fewer sequences, and shares its state with as many ranks.
    """
    both = gcd(sizes.cp, micro_batch)
    if both == 1:
        return False
    part = divisors(both)[1]
    smaller = sizes._replace(cp=sizes.cp // part, dp=sizes.dp * part)
    is_searched = smaller.cp in question.context_sizes
    return is_searched and question.limits.allows(**smaller._asdict(), micro_batch=micro_batch // part)
