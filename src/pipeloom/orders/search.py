"""Searches an order of a step's work: list scheduling and the orders of families, then changes of the best of them.

Every candidate is simulated with the costs of the run, messages, gathers and reductions included, and is a verified
schedule, so the order that is found can be written to a file and executed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from pipeloom.errors import ConfigError, UserError
from pipeloom.families import FAMILIES
from pipeloom.families.greedy import Task, candidates, choice_on
from pipeloom.families.weight_gradients import with_whole_backwards
from pipeloom.orders.bound import ChainSeconds
from pipeloom.orders.climb import climb
from pipeloom.orders.work import Judged, Work
from pipeloom.passes import join_backward, split_backward
from pipeloom.schedule import Row, Schedule

STARTS = 3
"""Candidates that are changed, the best ones."""
Rows = Sequence[Row]


@dataclass(frozen=True)
class FoundOrder:
    """Result of a search.

    Attributes:
        schedule: compute actions, with ``max_stage_inputs``.
        step_s: simulated seconds.
        least_s: no order of the same work takes less (``orders/bound.py``).
        family_s: simulated seconds of the fastest family that fits; infinite if none does.
        candidate_s: the same of the best candidate before changes.
        origin: how the order was made.
    """

    schedule: Schedule
    step_s: float
    least_s: float
    family_s: float
    candidate_s: float
    origin: str


def search_order(work: Work, tries: int) -> FoundOrder:
    """The fastest order found; deterministic, no slower than any family that fits, and not always the best.

    Args:
        work: of which an order is searched.
        tries: changes to try, over all candidates; 0 for the best candidate.

    Raises:
        UserError: no candidate fits the memory of all ranks.
    """
    families = _judged(work, _of_families(work))
    starts = sorted([*families, *_judged(work, _listed(work))], key=lambda one: one.merit)
    if not starts:
        raise UserError("no order of the micro-batches was found within the memory of all ranks")
    least_s, first = work.least_s(starts[0].whole), starts[0]
    # Half of the changes for the best candidate, which the others rarely overtake.
    shares = [tries - tries // 2] + [tries // 2 // (STARTS - 1)] * (STARTS - 1)
    changed = [
        climb(work, _split(work, start), share, least_s=least_s)
        for start, share in zip(_distinct(starts), shares, strict=False)
        if share
    ]
    best = _joined(work, min([first, *changed], key=lambda one: one.step_s))
    return FoundOrder(
        schedule=best.schedule.promising_its_peak(),
        step_s=best.step_s,
        least_s=least_s,
        family_s=min((one.step_s for one in families), default=inf),
        candidate_s=first.step_s,
        origin=f"{best.origin}, changed" if best.step_s < first.step_s else best.origin,
    )


def _judged(work: Work, orders: Iterable[tuple[str, Rows]]) -> list[Judged]:
    """The orders that are possible, each once."""
    different: dict[Rows, str] = {}
    for origin, rows in orders:
        different.setdefault(tuple(rows), origin)
    found = (work.judged(rows, origin) for rows, origin in different.items())
    return [one for one in found if one is not None]


def _distinct(starts: Iterable[Judged]) -> list[Judged]:
    """Those with different rows, the first of equal ones."""
    found: dict[Rows, Judged] = {}
    for one in starts:
        found.setdefault(one.schedule.rows, one)
    return list(found.values())


def _of_families(work: Work) -> Iterator[tuple[str, Rows]]:
    """The orders of families as they are."""
    for name, known in FAMILIES.items():
        if known.has_backward and (work.splits or not known.splits_backward):
            choice = choice_on(name, work.start.placement, work.start.num_microbatches)
            if choice is not None:
                yield name, choice.make().rows


def _listed(work: Work) -> Iterator[tuple[str, Rows]]:
    """What the greedy generator makes of the seconds of stages and messages."""
    try:
        task = _task(work)
    except ConfigError:  # a rank lacks room for an input of each of its stages, which families may not need at once
        return
    for way, timed in candidates(task):
        yield str(way), timed.rows if work.splits else [with_whole_backwards(row) for row in timed.rows]


def _task(work: Work) -> Task:
    chain = ChainSeconds.of(work.costs, work.start.num_stages, splits=work.splits)
    return Task(
        placement=work.start.placement,
        num_microbatches=work.start.num_microbatches,
        forward_s=chain.forward_s,
        input_s=chain.input_s,
        weight_s=chain.weight_s,
        boundary_s=chain.over_s,
        kept=work.kept.by_stage(work.start.num_stages),
        pending=[float(each) for each in np.ravel(work.kept.pending)],
        budgets=work.room,
    )


def _split(work: Work, start: Judged) -> Judged:
    """The order with split backwards, whose halves can move by themselves."""
    return (work.judged(split_backward(start.schedule, 0).rows, start.origin) if work.splits else None) or start


def _joined(work: Work, best: Judged) -> Judged:
    """The order with halves joined that follow each other, where the step takes no longer: a half costs an action."""
    for rank, row in enumerate(best.schedule.rows):
        rows = [*best.schedule.rows[:rank], join_backward(row), *best.schedule.rows[rank + 1 :]]
        joined = work.judged(rows, best.origin)
        best = joined if joined is not None and joined.step_s <= best.step_s else best
    return best
