"""Matching of the spans of a trace, simulated or measured, with the actions of a schedule."""

from collections import Counter

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule import Row, Schedule
from pipeloom.schedule.lanes import HOST_LANE
from pipeloom.schedule.row import Ints
from pipeloom.trace import Trace
from pipeloom.trace.spans import Spans


def match_spans(schedule: Schedule, trace: Trace) -> Spans:
    """The span of each action, in row order; of repeated actions, in the order of time.

    Raises:
        UserError: the trace does not belong to the schedule.
    """
    facts, found = schedule.facts, trace.spans.take(~trace.spans.on(HOST_LANE.name))
    row, ranks = facts.row, facts.ranks
    if trace.num_ranks != schedule.num_ranks:
        what = f"{trace.num_ranks} ranks"
        raise UserError(f"the trace does not belong to this schedule: the trace has {what}, the schedule does not")
    # A simulated trace is in row order already; sorting millions of spans takes seconds.
    if _is_same(row, ranks, found.row, found.rank):
        return found
    # The last key of lexsort is the primary one.
    wanted = np.lexsort((*row.arrays, ranks))
    present = np.lexsort((found.start_s, *found.row.arrays, found.rank))
    if not _is_same(row.take(wanted), ranks[wanted], found.row.take(present), found.rank[present]):
        _refuse(schedule, found)
    order = np.empty_like(wanted)
    order[wanted] = present
    return found.take(order)


def _is_same(row: Row, ranks: Ints, other_row: Row, other_ranks: Ints) -> bool:
    return np.array_equal(ranks, other_ranks) and row == other_row


def _refuse(schedule: Schedule, found: Spans) -> None:
    """Raise an error with the first action that one has and the other lacks.

    Raises:
        UserError: always.
    """
    wanted = [(action, rank) for rank, _, action in schedule.actions()]
    present = [(span.action, span.rank) for span in found]
    for action, rank in Counter(wanted) - Counter(present):
        raise UserError(f"the trace does not belong to this schedule: it lacks {action} on rank {rank}")
    for action, rank in Counter(present) - Counter(wanted):
        what = f"{action} on rank {rank}"
        raise UserError(f"the trace does not belong to this schedule: the trace has {what}, the schedule does not")
