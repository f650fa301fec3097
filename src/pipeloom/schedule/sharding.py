"""Which stages of a row are gathered, and which gradients are not reduced, at each of its actions.

Used by the passes (``lower_sharding``), the dependency relation (``facts``) and the ledger.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, KINDS, Kind
from pipeloom.schedule.row import Row


class Stay(NamedTuple):
    """An interval in which a stage is in a rank's memory, in numbers of the rank's uses of stages.

    Attributes:
        first: index of the use for which it is brought.
        last: index of the last use before it is removed.
    """

    first: int
    last: int


def fewest_stays(
    stages: Sequence[int], places: int, sizes: Sequence[int] | None = None, *, hides: bool = False
) -> list[Stay]:
    """Intervals of stages in a memory of limited size, with the fewest arrivals.

    When a place is needed, the stage whose next use is furthest ahead is removed, right after its latest use. That is
    optimal where every stage takes one place (Belady, IBM Systems Journal 5 (2), 1966).

    Args:
        stages: the stage of each use, in order.
        places: size of the memory; at least that of the largest stage.
        sizes: for each stage its size; ``None`` for 1 each.
        hides: whether the stage of the use before leaves only if no other can, so that a stage arrives during that use.
            Uses in turn, over and over, then take more arrivals than the fewest.

    Returns:
        The intervals, in the order of their begins. Those that contain any one use take at most ``places`` together.
    """
    last_of = {stage: use for use, stage in enumerate(stages)}
    if sizes is None and len(last_of) <= places:  # nothing has to leave
        first_of = {stage: use for use, stage in reversed(list(enumerate(stages)))}
        return [Stay(first_of[stage], last) for stage, last in last_of.items()]
    size_of = _size_of(sizes)
    next_use = [len(stages)] * len(stages)
    seen: dict[int, int] = {}
    for use in range(len(stages) - 1, -1, -1):
        next_use[use] = seen.get(stages[use], len(stages))
        seen[stages[use]] = use
    firsts, lasts = list[int](), list[int]()
    present: dict[int, int] = {}  # stage -> number of its stay
    taken = 0
    for use, stage in enumerate(stages):
        if stage in present:
            lasts[present[stage]] = use
            continue
        size = size_of(stage)
        while taken + size > places:
            # Belady's rule; `present` has one entry for each place, so a linear search is enough.
            others = [other for other in present if not hides or other != stages[use - 1]] or present
            furthest = max(others, key=lambda other: next_use[lasts[present[other]]])
            taken -= size_of(furthest)
            del present[furthest]
        taken += size
        present[stage] = len(firsts)
        firsts.append(use)
        lasts.append(use)
    return list(map(Stay, firsts, lasts))


def arrivals(
    stays: Sequence[Stay], stages: Sequence[int], places: int, ahead: int, sizes: Sequence[int] | None = None
) -> list[int]:
    """The use before which each stay's stage is brought: as early as its places are free, and not too early.

    Args:
        stays: from ``fewest_stays``.
        stages: the stage of each use, as there.
        places: as there.
        ahead: how many uses before its own a stage may be brought; with 0 when the use before its own has ended.
        sizes: as there.
    """
    size_of = _size_of(sizes)
    before: list[int] = []
    present: list[tuple[int, int]] = []  # (last use, size) of stays that still take their places
    taken = free_at = 0
    for stay in stays:
        size = size_of(stages[stay.first])
        while taken + size > places:
            last, given = heappop(present)
            taken, free_at = taken - given, last + 1
        before.append(max(free_at, stay.first - ahead))
        heappush(present, (stay.last, size))
        taken += size
    return before


def _size_of(sizes: Sequence[int] | None) -> Callable[[int], int]:
    return (lambda _: 1) if sizes is None else sizes.__getitem__


def unreduced_counts(row: Row) -> Iterator[tuple[int, int]]:
    """(slot, number of stages with an unreduced gradient from there on) for each action that begins one."""
    unreduced: set[int] = set()
    for slot, kind, stage in _find(row, *ADDS_TO_GRADIENT, Kind.REDUCE_GRAD):
        if kind is Kind.REDUCE_GRAD:
            unreduced.discard(stage)
        elif stage not in unreduced:
            unreduced.add(stage)
            yield slot, len(unreduced)


def gradient_waits(row: Row, buffers: int) -> Iterator[tuple[int, int]]:
    """(slot of a backward that begins a gradient, slot of the reduction that has to end first).

    A gradient takes a buffer when its first contribution is computed and gives it back when its reduction has ended.
    Reductions end in the order of the row, so the gradient that begins as number ``k`` finds a buffer when reduction
    number ``k - buffers`` has ended.

    Args:
        row: a rank's actions.
        buffers: gradients of whole stages for which the rank has room.
    """
    reductions = [slot for slot, _, _ in _find(row, Kind.REDUCE_GRAD)]
    for number, (slot, _) in enumerate(unreduced_counts(row)):
        # The first gradients find a free buffer; the last ones may have no reduction to wait for in this step.
        if buffers <= number < buffers + len(reductions):
            yield slot, reductions[number - buffers]


def _find(row: Row, *kinds: Kind) -> Iterator[tuple[int, Kind, int]]:
    """(slot, kind, stage) of the actions of some kinds."""
    slots = np.flatnonzero(row.is_kind(*kinds))
    found = map(KINDS.__getitem__, row.kind[slots].tolist())
    return zip(slots.tolist(), found, row.stage[slots].tolist(), strict=True)
