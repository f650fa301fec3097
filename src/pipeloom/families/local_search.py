"""Local search over the orders of ranks: moves one action at a time and keeps what takes no longer.

It gains most where ranks have less memory than the families and the list scheduler were made for.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from operator import itemgetter
from random import Random
from typing import NamedTuple

import numpy as np

from pipeloom.errors import ScheduleError
from pipeloom.families.weight_gradients import (
    StageProfile,
    TimedRows,
    insert_weight_gradients,
    without_weight_gradients,
)
from pipeloom.schedule import Placement, Row

_FARTHEST = 3
"""Most slots by which one change moves an action."""


class SearchProblem(NamedTuple):
    """What a local search minimizes, and under which limits.

    Attributes:
        placement: stage -> rank.
        room: for each rank its memory limit, in the unit of the clocks' sizes.
        clocks: costs with which weight gradients are inserted; the best result counts.
        objective: value to minimize. Moves between equal values are allowed.
    """

    placement: Placement
    room: Sequence[float]
    clocks: Sequence[StageProfile]
    objective: Callable[[TimedRows], float]


def local_search(problem: SearchProblem, start: TimedRows, tries: int, seed: int) -> TimedRows:
    """Best rows found from a start; deterministic for equal arguments.

    Args:
        problem: objective and limits.
        start: rows to begin with.
        tries: number of changes to try.
        seed: of the random choice of changes.
    """
    chance, best = Random(seed), start
    orders, here = list(map(without_weight_gradients, start.rows)), problem.objective(start)
    least = here
    for _ in range(tries):
        rank = chance.randrange(len(orders))
        row = _changed(orders[rank], chance)
        if row is None:
            continue
        following = [*orders[:rank], row, *orders[rank + 1 :]]
        judged = ((problem.objective(timed), timed) for timed in _timed(problem, following))
        there, found = min(judged, key=itemgetter(0), default=(inf, start))
        # Equal values are accepted, too: most single moves change nothing, several of them together may.
        if there > here:
            continue
        orders, here = following, there
        if here < least:
            best, least = found, here
    return best


def _changed(row: Row, chance: Random) -> Row | None:
    """A row with one action moved; ``None`` if a backward would pass the forward of its own micro-batch."""
    source = chance.randrange(len(row))
    return moved(row, source, source + chance.choice([-1, 1]) * chance.randint(1, _FARTHEST))


def moved(row: Row, source: int, target: int) -> Row | None:
    """A row with the action of one slot in another slot.

    Returns:
        The row; ``None`` if there is no such slot, or if the action would pass one of its own stage and micro-batch.
    """
    if not 0 <= target < len(row):
        return None
    passed = slice(min(source, target), max(source, target) + 1)
    same = (row.stage[passed] == row.stage[source]) & (row.microbatch[passed] == row.microbatch[source])
    # A gradient cannot precede its forward; the clock refuses every other order that is impossible.
    if same.sum() > 1:
        return None
    places = [place for place in range(len(row)) if place != source]
    places.insert(target, source)
    return row.take(np.array(places))


def _timed(problem: SearchProblem, orders: Sequence[Row]) -> Iterator[TimedRows]:
    """The orders with weight gradients, for each clock for which they neither deadlock nor exceed memory."""
    for clock in problem.clocks:
        # An order that deadlocks is a change that is rejected.
        try:
            yield insert_weight_gradients(orders, problem.placement, problem.room, clock)
        except ScheduleError:
            continue
