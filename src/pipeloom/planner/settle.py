"""What is left of a leaf: how many stages are gathered, how many gradients wait, which layers are recomputed.

More of the first two is never slower, and fewer layers are; only memory speaks against it. So the most, or the fewest,
that fits is taken, which makes the leaf a candidate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from pipeloom.cost.memory import kept_bytes
from pipeloom.cost.placed import OfPlaced, Placed
from pipeloom.cost.stages import stage_layers
from pipeloom.families import Choice
from pipeloom.planner.bounds import Sharded
from pipeloom.planner.space import Leaf
from pipeloom.predict.memory import Room, memory_with_room
from pipeloom.predict.step import SimulatedStep, compute_schedule, simulate_step, unsent
from pipeloom.recipe import Knobs
from pipeloom.schedule.peaks import Peaks
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.run import Run

TRIES = 4
"""Times that more layers of each rank that is too full are recomputed: the first only estimates what each saves."""


@dataclass(frozen=True)
class Candidate(OfPlaced):
    """A leaf with everything decided.

    Attributes:
        placed: what is trained, how it is laid out, where and with what.
        knobs: in which schedule.
        leaf: what is decided.
        is_close: whether the search has its bound from its schedule without messages.
    """

    knobs: Knobs
    leaf: Leaf
    is_close: bool = False
    count = 1

    def of(self, run: Run) -> "Candidate":
        """Another run in the same place with the same knobs."""
        return replace(self, placed=self.placed.of(run))

    def simulate(self) -> SimulatedStep:
        """Its step; the last few whose activations move are kept, since their moves take long to place."""
        return (_moved if self.knobs.moves.is_any else simulate_step)(self.placed, self.knobs)

    @property
    def bound_s(self) -> float:
        """Seconds of the step at least, with the layers that are recomputed."""
        return self._bounds.step_s

    @property
    def unsent_s(self) -> float:
        """Seconds of the step at least: those of its schedule with gathers and reductions, but without messages."""
        return self._bounds.unsent_s(unsent(self.run, self.software, self.knobs))

    @property
    def _bounds(self) -> Sharded:
        run, cut = self.run, self.leaf.cut
        time = cut.time if run.recompute_layers is None else cut.bounds(run)
        return time.sharded(run.shard, run.replicate)

    @property
    def free_bytes(self) -> list[float]:
        """For each rank the bytes that are left on a device of it; below 0 what is missing."""
        knobs, choice, loops = self.knobs, self.knobs.choice, self.run.loops
        rows = compute_schedule(choice) if choice.keep is not None or choice.num_slices > 1 else peaks_of(choice)
        room = Room(
            receive_buffers=0 if self.software.is_blocking else knobs.receive_buffers,
            gathered=min(knobs.residency, loops),
            unreduced=knobs.gradient_buffers,
        )
        held = memory_with_room(self.run, self.software, rows, room)
        rooms = self.leaf.cut.memory.rooms.tolist()
        return [capacity - memory.total_bytes for capacity, memory in zip(rooms, held, strict=True)]

    @property
    def fits(self) -> bool:
        """Whether every device has room for it, before anything moves."""
        return min(self.free_bytes) >= 0


@lru_cache(maxsize=32)
def _moved(placed: Placed, knobs: Knobs) -> SimulatedStep:
    return simulate_step(placed, knobs)


def settle(leaf: Leaf) -> Candidate | None:
    """The leaf with everything decided; ``None`` if it does not fit, or if it fits with fewer layers recomputed."""
    if leaf.cut.arrangement.kept == "some":
        return _with_some_layers(leaf)
    # The least sharding first, since it exchanges least; with each the most room, since that waits least.
    for shard in leaf.sharding.levels:
        for knobs in knobs_of(leaf.choice, shard):
            if _is_hopeless(leaf, shard, knobs):
                continue
            chosen = Candidate(leaf.placed(shard), knobs, leaf)
            if chosen.fits:
                return chosen
    return None


def _is_hopeless(leaf: Leaf, shard: Shard, knobs: Knobs) -> bool:
    """Whether a bound says that it does not fit, so that no schedule has to be made to see it."""
    memory = leaf.cut.memory.sharded(shard, leaf.sharding.replicate)
    held = memory.held_bytes(leaf.stage_inputs, knobs.residency)
    return leaf.cut.memory.missing_bytes(held) > 0


def knobs_of(choice: Choice, shard: Shard) -> list[Knobs]:
    """A schedule with what a rank may have room for, the most first; gathers start as early as there is room.

    With every gradient whole all the time, ``gradients`` would hold as much as ``optimizer`` does, and with every stage
    gathered ``full`` would hold as much as ``gradients``, and both have more to exchange.
    """
    loops = choice.loops
    two, half = min(2, loops), max(1, loops // 2)
    sizes: list[tuple[int, int | None]] = [(loops, None)]
    if shard == "gradients":
        sizes = [(loops, two), (loops, 1)]
    elif shard == "full":
        sizes = [(half, two), (two, two), (two, 1), (1, 1)]
    return [
        Knobs(choice=choice, residency=gathered, prefetch=max(1, gathered - 1), gradient_buffers=unreduced)
        for gathered, unreduced in dict.fromkeys(sizes)
    ]


# Leaves that differ in tensor parallelism, sharding or recomputation have the same schedule.
@lru_cache(maxsize=4096)
def peaks_of(choice: Choice) -> Peaks:
    """What the ranks of a schedule hold at their peaks."""
    return Peaks.of(compute_schedule(choice))


def _with_some_layers(leaf: Leaf) -> Candidate | None:
    """With as few layers recomputed on each rank as it takes; ``None`` if that is none or not enough."""
    (shard,) = leaf.sharding.levels
    tried = knobs_of(leaf.choice, shard)
    # One gradient is reduced while the next one is made; more would take room for which layers are computed again.
    knobs = next((knobs for knobs in tried if knobs.gradient_buffers == 2), tried[-1])
    if _is_hopeless(leaf, shard, knobs):
        return None
    plain = Candidate(leaf.placed(shard), knobs, leaf)
    free = plain.free_bytes
    # What fits with nothing recomputed is a leaf of its own, and faster.
    return None if min(free) >= 0 else _recomputing(plain, free)


def _recomputing(plain: Candidate, free: Sequence[float]) -> Candidate | None:
    """The candidate with layers recomputed where bytes are missing; ``None`` if all layers would not be enough."""
    counts, _ = stage_layers(plain.run, plain.software)
    saved, owner = _saved_bytes(plain), plain.placed.placement.rank_by_stage
    layers = [0] * plain.run.pp
    for rank, number in zip(owner, counts, strict=True):
        layers[rank] += number
    again = [0] * plain.run.pp
    # The estimate leaves out the workspace of the layer that is computed again.
    for _ in range(TRIES):
        again = [
            number + (int(-left // each) + 1 if left < 0 else 0)
            for number, left, each in zip(again, free, saved, strict=True)
        ]
        if any(number > most for number, most in zip(again, layers, strict=True)):
            return None
        chosen = plain.of(replace(plain.run, recompute_layers=_spread(owner, counts, again)))
        free = chosen.free_bytes
        if min(free) >= 0:
            return chosen
    return None


def cut_again(chosen: Candidate) -> Candidate | None:
    """The candidate cut into stages by what its layers recompute; ``None`` if that is no other one, or does not fit.

    For a few candidates: uneven layers take longer to cut than everything else together.
    """
    if chosen.run.recompute_layers is None or chosen.run.layers_by_stage is None or chosen.run.num_stages == 1:
        return None
    again = chosen.of(chosen.placed.with_fastest_layers().run)
    return again if again.run.layers_by_stage != chosen.run.layers_by_stage and again.fits else None


def _saved_bytes(chosen: Candidate) -> list[float]:
    """For each rank about what one recomputed layer saves."""
    run, software = chosen.run, chosen.software
    each = kept_bytes(run, software) - kept_bytes(replace(run, recompute="full"), software)
    peaks = peaks_of(chosen.knobs.choice).stage_inputs
    # A layer is in one of the rank's stages, which has its share of the inputs that the rank holds at its peak.
    return [each * (1 + software.fragmentation) * peak / run.loops for peak in peaks]


def _spread(owner: Sequence[int], counts: Sequence[int], again: Sequence[int]) -> tuple[Recompute, ...]:
    """For each layer what is recomputed: of each rank so many, evenly over its stages, the first ones of each."""
    kinds: list[Recompute] = ["none"] * sum(counts)
    first = [0, *accumulate(counts)]
    left = list(again)
    # One layer of every stage before a second one of any, so that a rank's stages stay about equally long.
    for depth in range(max(counts)):
        for stage, rank in enumerate(owner):
            if left[rank] and depth < counts[stage]:
                kinds[first[stage] + depth] = "full"
                left[rank] -= 1
    return tuple(kinds)
