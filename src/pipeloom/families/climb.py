"""Orders changed by one action at a time, as long as that makes nothing longer: a local search from several starts.

What the families' orders and lists of priorities leave is mostly where ranks have less memory than either was made for.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from operator import itemgetter
from random import Random
from typing import NamedTuple

import numpy as np

from pipeloom.errors import ScheduleError
from pipeloom.families.weave import Clock, Woven, of_inputs, weave
from pipeloom.schedule import Placement, Row

_FARTHEST = 3
"""Places by which an action moves at most."""


class Ground(NamedTuple):
    """Where to climb.

    Attributes:
        placement: stage -> rank.
        room: for each rank the most that it keeps.
        clocks: with which gradients of weights are woven in; the best counts.
        merit: what is to be small; equal merits may follow each other.
    """

    placement: Placement
    room: Sequence[float]
    clocks: Sequence[Clock]
    merit: Callable[[Woven], float]


def climb(ground: Ground, start: Woven, tries: int, seed: int) -> Woven:
    """The best rows that are met on the way from a start; the same arguments always give the same.

    Args:
        ground: what counts.
        start: rows to begin with.
        tries: changes that are tried.
        seed: chooses them.
    """
    chance, best = Random(seed), start
    orders, here = list(map(of_inputs, start.rows)), ground.merit(start)
    least = here
    for _ in range(tries):
        rank = chance.randrange(len(orders))
        row = _changed(orders[rank], chance)
        if row is None:
            continue
        following = [*orders[:rank], row, *orders[rank + 1 :]]
        judged = ((ground.merit(woven), woven) for woven in _woven(ground, following))
        there, found = min(judged, key=itemgetter(0), default=(inf, start))
        # Equally good orders are taken too: most single moves change nothing, and several of them may.
        if there > here:
            continue
        orders, here = following, there
        if here < least:
            best, least = found, here
    return best


def _changed(row: Row, chance: Random) -> Row | None:
    """A row with one action somewhere else; ``None`` if it would pass the other half of its own micro-batch."""
    source = chance.randrange(len(row))
    target = source + chance.choice([-1, 1]) * chance.randint(1, _FARTHEST)
    if not 0 <= target < len(row):
        return None
    passed = slice(min(source, target), max(source, target) + 1)
    same = (row.stage[passed] == row.stage[source]) & (row.microbatch[passed] == row.microbatch[source])
    # A gradient cannot come before its forward; every other order is left to the clock to refuse.
    if same.sum() > 1:
        return None
    places = [place for place in range(len(row)) if place != source]
    places.insert(target, source)
    return row.take(np.array(places))


def _woven(ground: Ground, orders: Sequence[Row]) -> Iterator[Woven]:
    """With each clock, where the orders wait for nothing that never comes and have room."""
    for clock in ground.clocks:
        # An order that waits for itself is a change that is not taken.
        try:
            yield weave(orders, ground.placement, ground.room, clock)
        except ScheduleError:
            continue
