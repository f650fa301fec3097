"""Candidates: leaves with the settings that follow from memory.

More gathered stages, more gradient buffers and fewer recomputed layers are never slower, so a candidate has as many, or
as few, as fit on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from pipeloom.cost.memory import kept_bytes
from pipeloom.cost.placed import OfPlaced, Placed
from pipeloom.cost.stages import stage_layers
from pipeloom.families import Choice
from pipeloom.passes.lower_sharding import num_exchanges
from pipeloom.planner.bounds import Sharded
from pipeloom.planner.buffers import buffers_of, recomputing_buffers_of
from pipeloom.planner.space import Leaf
from pipeloom.planner.work import Floats
from pipeloom.predict.memory import Room, activation_room, bytes_with_room, memory_by_rank
from pipeloom.predict.step import (
    Prediction,
    SimulatedStep,
    compute_schedule,
    graph_without_messages,
    lowered,
    placed_in,
    simulate_step,
)
from pipeloom.recipe import Knobs
from pipeloom.schedule.peaks import Peaks
from pipeloom.workload.launchers import with_first_layers
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.run import Run

TRIES = 4
"""Most rounds of recomputing more layers on ranks that lack memory; what a layer saves is an estimate."""


@dataclass(frozen=True)
class Candidate(OfPlaced):
    """A complete layout.

    Attributes:
        placed: the run, its cluster and its program.
        knobs: settings of its schedule.
        leaf: the leaf that it completes.
        num_bounds: how many closer bounds its bound in the frontier contains.
    """

    knobs: Knobs
    leaf: Leaf
    num_bounds: int = 0
    count = 1

    def of(self, run: Run) -> "Candidate":
        """Another run on the same cluster with the same knobs."""
        return replace(self, placed=self.placed.of(run))

    def simulate(self) -> SimulatedStep:
        """Simulate its step. The last few steps with moved activations are cached, since placing moves takes long."""
        return (_simulate_moves if self.knobs.moves.is_any else simulate_step)(self.placed, self.knobs)

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time in seconds, including recomputed layers."""
        return self._bounds.step_s

    @property
    def bound_of_row_s(self) -> float:
        """Lower bound of the step time in seconds, from the row of one rank with its gathers and reductions."""
        rank = self._bounds.bounds.busiest_rank
        graph = graph_without_messages(self.run, self.software, self.knobs, rank)
        return self._bounds.row_alone_s(graph, rank)

    @property
    def bound_without_messages_s(self) -> float:
        """Lower bound of the step time in seconds, from its schedule with gathers and reductions, without messages."""
        return self._bounds.without_messages_s(graph_without_messages(self.run, self.software, self.knobs))

    @property
    def closer_bound_s(self) -> float | None:
        """The next lower bound of the step time in seconds, which takes longer to compute; ``None`` after the last."""
        if self.num_bounds == 0:
            return self.bound_of_row_s
        # On one rank its row is the whole schedule.
        return self.bound_without_messages_s if self.num_bounds == 1 and self.run.pp > 1 else None

    @property
    def _bounds(self) -> Sharded:
        run, cut = self.run, self.leaf.cut
        time = cut.time if run.recompute_layers is None else cut.bounds(run)
        return time.sharded(run.shard, run.replicate)

    @property
    def free_bytes(self) -> list[float]:
        """For each rank the free bytes of a device besides the headroom, before activations move; negative if bytes are
        missing.
        """
        knobs, choice, loops = self.knobs, self.knobs.choice, self.run.loops
        # A run without lengths of its slices has those of the schedule.
        run = placed_in(self.placed, choice).run if choice.num_slices > 1 else self.run
        capacity_bytes = self.leaf.cut.memory.capacity_bytes
        if run.updates_stages:
            # How long a gradient stays depends on the place of its reduction and of its update.
            memory = memory_by_rank(run, self.software, lowered(run, self.software, knobs), knobs.receive_buffers)
            return (capacity_bytes - [one.total_bytes for one in memory]).tolist()
        rows = compute_schedule(choice) if choice.keep is not None or choice.num_slices > 1 else peaks_of(choice)
        room = Room(
            receive_buffers=0 if self.software.is_blocking else knobs.receive_buffers,
            gathered=min(knobs.residency, loops),
            # Without a lane, gradients are reduced after the pipeline: until then every stage has its own whole.
            unreduced=knobs.gradient_buffers if self.software.has_reduction_lane else None,
        )
        held = bytes_with_room(run, self.software, rows, room)
        return (capacity_bytes - held).tolist()

    @property
    def activation_room(self) -> tuple[float, ...]:
        """For each rank the bytes for activations, those of the schedule included, which may be moved or replaced."""
        return activation_room(self.run, self.software, compute_schedule(self.knobs.choice), self.free_bytes)

    @property
    def fits(self) -> bool:
        """Whether it fits every device, before activations move."""
        return min(self.free_bytes) >= 0

    def has_room_for(self, prediction: Prediction) -> bool:
        """Whether a predicted step of it fits every device and leaves the headroom free."""
        held = np.array([memory.total_bytes for memory in prediction.memory_by_rank])
        return self.leaf.cut.memory.missing_bytes(held) <= 0


@lru_cache(maxsize=32)
def _simulate_moves(placed: Placed, knobs: Knobs) -> SimulatedStep:
    return simulate_step(placed, knobs)


def complete(leaf: Leaf) -> Candidate | None:
    """The fastest candidate of a leaf that fits; ``None`` if none fits, or if fewer recomputed layers also fit."""
    if leaf.cut.arrangement.recomputed == "some":
        return _with_some_layers(leaf)
    # The least sharding first, since it communicates least; for each the largest buffers first, since they wait least.
    for shard in leaf.sharding.levels:
        placed = leaf.placed(shard)
        for knobs in knobs_of(leaf.choice, placed.run):
            if not _is_too_large(leaf, shard, knobs):
                candidate = Candidate(placed, knobs, leaf)
                if candidate.fits:
                    return candidate
    return None


def exchanging_bound_s(leaf: Leaf) -> float:
    """Lower bound of the step time of a leaf in seconds, from how often its order gathers and reduces.

    Before the leaf is completed: with the most buffers that layouts have, whether they fit or not.
    """
    return min(_exchanging_bound_s(leaf, shard) for shard in leaf.sharding.levels)


def _exchanging_bound_s(leaf: Leaf, shard: Shard) -> float:
    time, choice = leaf.cut.time, leaf.choice
    sharded = time.sharded(shard, leaf.sharding.replicate)
    if choice.loops == 1 or shard not in ("gradients", "full") or time.has_frozen_stages:
        return sharded.step_s
    has_some = leaf.cut.arrangement.recomputed == "some"
    gathered, unreduced = _recomputing_buffers_of(sharded.run) if has_some else _buffers_of(sharded.run)[0]
    return sharded.exchanging_s(*_num_exchanges(choice, gathered if shard == "full" else None, unreduced))


@lru_cache(maxsize=4096)
def _num_exchanges(choice: Choice, gathered: int | None, unreduced: int | None) -> tuple[Floats, Floats]:
    """For each stage of the first rank how often it is gathered, and how often its gradient is reduced."""
    schedule = compute_schedule(choice)
    gathers, reductions = num_exchanges(schedule.rows[0], gathered, unreduced)
    stages = schedule.placement.stages_of(0)
    return np.array([gathers[one] for one in stages], float), np.array([reductions[one] for one in stages], float)


def _is_too_large(leaf: Leaf, shard: Shard, knobs: Knobs) -> bool:
    """Whether a lower bound of its memory exceeds a device; then its schedule need not be made."""
    memory = leaf.cut.memory.sharded(shard, leaf.sharding.replicate)
    held = memory.held_bytes(leaf.stage_inputs, memory.room_of(knobs.residency, knobs.gradient_buffers))
    return leaf.cut.memory.missing_bytes(held) > 0


def knobs_of(choice: Choice, run: Run) -> list[Knobs]:
    """Residency and gradient buffers to try, the most first; gathers start as early as memory allows."""
    return [_knobs(choice, *sizes) for sizes in _buffers_of(run)]


def _buffers_of(run: Run) -> list[tuple[int, int | None]]:
    return buffers_of(run.shard, run.loops, updates_stages=run.updates_stages)


def _recomputing_buffers_of(run: Run) -> tuple[int, int | None]:
    return recomputing_buffers_of(run.shard, run.loops, updates_stages=run.updates_stages)


def _knobs(choice: Choice, gathered: int, unreduced: int | None) -> Knobs:
    return Knobs(choice=choice, residency=gathered, prefetch=max(1, gathered - 1), gradient_buffers=unreduced)


# Leaves that differ in tensor parallelism, sharding or recomputation have the same schedule.
@lru_cache(maxsize=4096)
def peaks_of(choice: Choice) -> Peaks:
    """What each rank of a schedule holds at its peak."""
    schedule = compute_schedule(choice)
    return Peaks.of(schedule.rows, schedule.placement)


def _with_some_layers(leaf: Leaf) -> Candidate | None:
    """The candidate with the fewest recomputed layers on each rank; ``None`` if none or more than all are needed."""
    (shard,) = leaf.sharding.levels
    placed = leaf.placed(shard)
    knobs = _knobs(leaf.choice, *_recomputing_buffers_of(placed.run))
    if _is_too_large(leaf, shard, knobs):
        return None
    plain = Candidate(placed, knobs, leaf)
    free = plain.free_bytes
    # A layout that fits with nothing recomputed is another leaf, and faster.
    return None if min(free) >= 0 else _recomputing(plain, free)


def _recomputing(plain: Candidate, free: Sequence[float]) -> Candidate | None:
    """The candidate with layers recomputed on ranks that lack bytes; ``None`` if all are needed, or not enough."""
    question = plain.leaf.cut.arrangement.question
    counts, _ = stage_layers(plain.run, plain.software)
    saved, owner = _saved_bytes(plain), plain.placed.placement.rank_by_stage
    layers = [0] * plain.run.pp
    for rank, number in zip(owner, counts, strict=True):
        layers[rank] += number
    recomputed = [0] * plain.run.pp
    # The estimate excludes the workspace of the recomputed layer.
    for _ in range(TRIES):
        recomputed = [
            number + (int(-left // each) + 1 if left < 0 else 0)
            for number, left, each in zip(recomputed, free, saved, strict=True)
        ]
        if any(number > most for number, most in zip(recomputed, layers, strict=True)):
            return None
        kinds = _spread(owner, counts, recomputed)
        if not question.launcher.is_own:
            kinds = _first_of_every_stage(kinds, counts)
        if "none" not in kinds and "full" in question.recompute:
            return None  # another leaf, which would appear twice
        candidate = plain.of(replace(plain.run, recompute_layers=kinds))
        free = candidate.free_bytes
        if min(free) >= 0:
            return candidate
    return None


def _first_of_every_stage(kinds: Sequence[Recompute], counts: Sequence[int]) -> tuple[Recompute, ...]:
    """At least these layers, as the same number of first layers of every stage, which other programs can recompute."""
    ends = list(accumulate(counts))
    stages = with_first_layers([kinds[end - size : end] for end, size in zip(ends, counts, strict=True)])
    return tuple(kind for stage in stages for kind in stage)


def repartitioned(candidate: Candidate) -> Candidate | None:
    """The candidate partitioned by the seconds of each of its layers; ``None`` if equal, or if it does not fit.

    Used for a few candidates only, since partitioning uneven layers takes longer than everything else together.
    """
    run = candidate.run
    if run.has_equal_layers or run.layers_by_stage is None or run.num_stages == 1:
        return None
    again = candidate.of(candidate.placed.with_fastest_layers().run)
    if again.run.layers_by_stage == run.layers_by_stage:
        return None
    if run.recompute_layers is not None and not candidate.leaf.cut.arrangement.question.launcher.is_own:
        kinds = _first_of_every_stage(run.recompute_layers, again.placed.layers)
        if "none" not in kinds:  # another leaf
            return None
        again = again.of(replace(again.run, recompute_layers=kinds))
    return again if again.fits else None


def _saved_bytes(candidate: Candidate) -> list[float]:
    """For each rank an estimate of the bytes that one recomputed layer saves."""
    run, software = candidate.run, candidate.software
    each = kept_bytes(run, software) - kept_bytes(replace(run, recompute="full"), software)
    peaks = peaks_of(candidate.knobs.choice).stage_inputs
    # A layer is in one of the rank's stages, which holds its share of the inputs at the rank's peak.
    return [each * (1 + software.fragmentation) * peak / run.loops for peak in peaks]


def _spread(owner: Sequence[int], counts: Sequence[int], recomputed: Sequence[int]) -> tuple[Recompute, ...]:
    """For each layer its recomputation: so many layers of each rank, evenly over its stages, the first ones first."""
    kinds: list[Recompute] = ["none"] * sum(counts)
    first = [0, *accumulate(counts)]
    left = list(recomputed)
    # One layer of every stage before a second one of any, so that a rank's stages take about equally long.
    for depth in range(max(counts)):
        for stage, rank in enumerate(owner):
            if left[rank] and depth < counts[stage]:
                kinds[first[stage] + depth] = "full"
                left[rank] -= 1
    return tuple(kinds)
