"""What is left of a leaf: how many stages are gathered, how many gradients wait, which layers are recomputed.

More of the first two is never slower, and fewer layers are; only memory speaks against it. So the most, or the fewest,
that fits is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeloom.cost.analytic import stage_layers
from pipeloom.cost.memory import kept_bytes
from pipeloom.cost.shape import Run
from pipeloom.layout import Recompute, Shard
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.space import Leaf
from pipeloom.predict.memory import memory_by_rank
from pipeloom.predict.step import Order

TRIES = 4
"""Times that more layers of each rank that is too full are recomputed: the first only estimates what each saves."""


@dataclass(frozen=True)
class Room:
    """Stages whose weights, and stages whose unreduced gradients, a rank has room for; ``None`` for all gradients."""

    residency: int
    gradient_buffers: int | None


def settle(leaf: Leaf) -> Candidate | None:
    """The leaf with everything decided; ``None`` if it does not fit, or if it fits with fewer layers recomputed."""
    if leaf.cut.arrangement.kept == "some":
        return _with_some_layers(leaf)
    for shard in leaf.sharding.levels:
        for room in _rooms(shard, leaf.cut.run.loops):
            if _is_hopeless(leaf, shard, room):
                continue
            chosen = _candidate(leaf, leaf.run(shard), room)
            if min(_free_bytes(chosen, leaf)) >= 0:
                return chosen
    return None


def _is_hopeless(leaf: Leaf, shard: Shard, room: Room) -> bool:
    """Whether a bound says that it does not fit, so that no schedule has to be made to see it."""
    held = leaf.cut.memory.held_bytes(shard, leaf.sharding.replicate, leaf.stage_inputs, room.residency)
    return max(held) > leaf.cut.arrangement.question.cluster.device.memory_bytes


def _rooms(shard: Shard, loops: int) -> list[Room]:
    """What a rank may have room for, the most first.

    With every gradient whole all the time, ``gradients`` would hold as much as ``optimizer`` does, and with every stage
    gathered ``full`` would hold as much as ``gradients``, and both have more to exchange.
    """
    two, half = min(2, loops), max(1, loops // 2)
    sizes: list[tuple[int, int | None]] = [(loops, None)]
    if shard == "gradients":
        sizes = [(loops, two), (loops, 1)]
    elif shard == "full":
        sizes = [(half, two), (two, two), (two, 1), (1, 1)]
    return [Room(*size) for size in dict.fromkeys(sizes)]


def _candidate(leaf: Leaf, run: Run, room: Room) -> Candidate:
    """The leaf's schedule with room for that much; gathers start as early as there is room."""
    order = Order(
        choice=leaf.choice,
        residency=room.residency,
        prefetch=max(1, room.residency - 1),
        gradient_buffers=room.gradient_buffers,
    )
    return Candidate(run, leaf.cut.arrangement.question.software, order)


def _free_bytes(chosen: Candidate, leaf: Leaf) -> list[float]:
    """For each rank the bytes that are left on a device of it; below 0 what is missing."""
    capacity = leaf.cut.arrangement.question.cluster.device.memory_bytes
    held = memory_by_rank(chosen.run, chosen.software, chosen.schedule, chosen.order.receive_buffers)
    return [capacity - memory.total_bytes for memory in held]


def _with_some_layers(leaf: Leaf) -> Candidate | None:
    """With as few layers recomputed on each rank as it takes; ``None`` if that is none or not enough.

    Less is shared out rather than less recomputed, if both would fit: an exchange costs less than a layer.
    """
    for shard in leaf.sharding.levels:
        sizes = _rooms(shard, leaf.cut.run.loops)
        room = next((room for room in sizes if room.gradient_buffers == 2), sizes[-1])
        if _is_hopeless(leaf, shard, room):
            continue
        plain = _candidate(leaf, leaf.run(shard), room)
        free = _free_bytes(plain, leaf)
        if min(free) >= 0:
            return None
        chosen = _recomputing(leaf, plain, free)
        if chosen is not None:
            return chosen
    return None


def _recomputing(leaf: Leaf, plain: Candidate, free: Sequence[float]) -> Candidate | None:
    """The candidate with layers recomputed where bytes are missing; ``None`` if all layers would not be enough."""
    counts, _ = stage_layers(plain.run, plain.software)
    saved, owner = _saved_bytes(plain), leaf.cut.placement.rank_by_stage
    layers = [0] * plain.run.pp
    for rank, number in zip(owner, counts, strict=True):
        layers[rank] += number
    again = [0] * plain.run.pp
    for _ in range(TRIES):
        again = [
            number + (int(-left // each) + 1 if left < 0 else 0)
            for number, left, each in zip(again, free, saved, strict=True)
        ]
        if any(number > most for number, most in zip(again, layers, strict=True)):
            return None
        chosen = replace(plain, run=replace(plain.run, recompute_layers=_spread(owner, counts, again)))
        free = _free_bytes(chosen, leaf)
        if min(free) >= 0:
            return chosen
    return None


def _saved_bytes(chosen: Candidate) -> list[float]:
    """For each rank about what one recomputed layer saves."""
    run, software = chosen.run, chosen.software
    each = kept_bytes(run, software) - kept_bytes(replace(run, recompute="full"), software)
    peaks = chosen.schedule.peak_stage_inputs
    return [each * (1 + software.fragmentation) * peak / run.loops for peak in peaks]


def _spread(owner: Sequence[int], counts: Sequence[int], again: Sequence[int]) -> tuple[Recompute, ...]:
    """For each layer what is recomputed: of each rank so many, evenly over its stages, the first ones of each."""
    kinds: list[Recompute] = ["none"] * sum(counts)
    first = [0, *accumulate(counts)]
    left = list(again)
    for depth in range(max(counts)):
        for stage, rank in enumerate(owner):
            if left[rank] and depth < counts[stage]:
                kinds[first[stage] + depth] = "full"
                left[rank] -= 1
    return tuple(kinds)
