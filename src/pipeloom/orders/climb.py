"""Changes an order of compute actions one action at a time, with the simulated step as the objective.

Late acceptance (Burke and Bykov, The late acceptance hill-climbing heuristic, EJOR 258, 2017): a change is kept if the
result is no worse than the present order, or than the present order of some changes ago.
"""

from random import Random

from pipeloom.families.local_search import moved
from pipeloom.orders.work import ROUNDING, Judged, Work
from pipeloom.schedule import Row
from pipeloom.schedule.kinds import COMPUTE_KINDS, USES_WEIGHTS

_MEMORY = 40
"""Number of changes after which an order is forgotten."""
_NEAR, _FAR = 4, 16
"""Most slots by which a change moves an action."""
_ON_PATH = 0.7
"""Share of changes at an action that determines the step."""


def climb(work: Work, start: Judged, tries: int, *, least_s: float, seed: int = 0) -> Judged:
    """The best order found from a start; deterministic for equal arguments.

    Args:
        work: of which it is an order.
        start: an order to begin with.
        tries: number of changes to try.
        least_s: seconds that no order goes below; the search ends there.
        seed: of the random choice of changes.
    """
    chance, here, best = Random(seed), start, start
    known = [start.merit] * _MEMORY
    for number in range(tries):
        if best.step_s <= least_s * ROUNDING:
            break
        there = _neighbor(work, here, chance)
        if there is not None and there.merit <= max(here.merit, known[number % _MEMORY]):
            here = there
        known[number % _MEMORY] = here.merit
        if here.merit < best.merit and here.step_s <= best.step_s * ROUNDING:
            best = here
    return best


def _neighbor(work: Work, here: Judged, chance: Random) -> Judged | None:
    """An order with one action moved; ``None`` if that is impossible."""
    rows = here.schedule.rows
    if chance.random() < _ON_PATH:
        rank, slot = chance.choice(here.critical)
        row = _around(rows[rank], slot, chance)
    else:
        rank = chance.randrange(len(rows))
        source = chance.randrange(len(rows[rank]))
        row = moved(rows[rank], source, source + chance.choice([-1, 1]) * chance.randint(1, _NEAR))
    return None if row is None else work.judged([*rows[:rank], row, *rows[rank + 1 :]], here.origin)


def _around(row: Row, slot: int, chance: Random) -> Row | None:
    """A row in which an action comes earlier: it is moved, or another one before it is moved behind it."""
    far = chance.randint(1, chance.choice([1, _NEAR, _FAR]))
    if chance.random() < 0.5:
        return moved(row, slot, slot - far)
    if slot < far:
        return None
    later = slot
    if row[slot - far].kind in COMPUTE_KINDS - USES_WEIGHTS:  # no other compute action waits for it
        later = chance.randint(slot, len(row) - 1)
    return moved(row, slot - far, later)
