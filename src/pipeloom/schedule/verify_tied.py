"""Rules of a matrix that the first and the last stage share; ``verify.RULES`` says when they are checked.

A schedule has the messages about it or has not; whether its model has such a matrix it does not know.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeloom.schedule.action import Action
from pipeloom.schedule.depend import tied_action
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, TIED_KINDS, Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.violation import Violation, Violations

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule

_OF_GRADIENT = (Kind.SEND_TIED_GRAD, Kind.RECV_TIED_GRAD)


def tied_messages_complete(schedule: "Schedule") -> Violations:
    """If a tied matrix is sent at all, its weights go from the first stage to the last and its gradient back, each
    once; the gradient only if the first stage trains, and neither if both stages are on one rank.
    """
    found = _tied_actions(schedule)
    seen: set[Action] = set()
    for rank, slot, action in found:
        wanted = tied_action(action.kind, schedule.num_stages)
        if schedule.placement.rank_by_stage[0] == schedule.placement.rank_by_stage[-1]:
            yield Violation(f"{action} moves a matrix that does not change rank", rank, slot)
        elif action != wanted:
            yield Violation(f"{action} must name stage {wanted.stage}", rank, slot)
        elif action in seen:
            yield Violation(f"{action} appears a second time", rank, slot)
        elif action.kind in _OF_GRADIENT and schedule.first_backward_stage > 0:
            yield Violation(f"{action} is superfluous: stage 0 runs no backward", rank, slot)
        seen.add(action)
    for kind in sorted(TIED_KINDS) if found else ():
        wanted = tied_action(kind, schedule.num_stages)
        if wanted not in seen and not (kind in _OF_GRADIENT and schedule.first_backward_stage > 0):
            yield Violation(f"{wanted} is missing", schedule.placement.rank_by_stage[wanted.stage])


def tied_weights_in_time(schedule: "Schedule") -> Violations:
    """A tied matrix is sent while its stage is gathered, and received before the head's first forward."""
    for rank, slot, action in _tied_actions(schedule):
        row = schedule.rows[rank]
        if action.kind is Kind.SEND_TIED and not _is_gathered(row, slot, action.stage):
            yield Violation(f"{action} sends weights of stage {action.stage} while they are sharded", rank, slot)
        elif action.kind is Kind.RECV_TIED:
            first = min(_slots(row, action.stage, Kind.FORWARD), default=len(row))
            if first < slot:
                yield Violation(f"{action} stands behind {row[first]}, which uses it", rank, slot)


def tied_gradient_in_time(schedule: "Schedule") -> Violations:
    """A head's gradient is sent when it is complete, and received before the last reduction of the first stage's."""
    for rank, slot, action in _tied_actions(schedule):
        row = schedule.rows[rank]
        if action.kind is Kind.SEND_TIED_GRAD:
            last = max(_slots(row, action.stage, *ADDS_TO_GRADIENT), default=-1)
            if last > slot:
                yield Violation(f"{action} stands before {row[last]}, which adds to it", rank, slot)
        elif action.kind is Kind.RECV_TIED_GRAD:
            last = max(_slots(row, action.stage, Kind.REDUCE_GRAD), default=len(row))
            if last < slot:
                yield Violation(f"{action} stands behind the last {row[last]}, which has to reduce it", rank, slot)


TIED_RULES = (tied_messages_complete, tied_weights_in_time, tied_gradient_in_time)


def _tied_actions(schedule: "Schedule") -> list[tuple[int, int, Action]]:
    """Rank, slot and action of each message about a tied matrix."""
    return [
        (rank, int(slot), row[int(slot)])
        for rank, row in enumerate(schedule.rows)
        for slot in np.flatnonzero(row.is_kind(*TIED_KINDS))
    ]


def _slots(row: Row, stage: int, *kinds: Kind) -> Sequence[int]:
    """Where a row has a stage's actions of some kinds."""
    return np.flatnonzero(row.is_kind(*kinds) & (row.stage == stage)).tolist()


def _is_gathered(row: Row, slot: int, stage: int) -> bool:
    """Whether a stage's weights are whole at a slot: gathered, or never sharded."""
    if not _slots(row, stage, Kind.UNSHARD):
        return True
    before = [other for other in _slots(row, stage, Kind.UNSHARD, Kind.RESHARD) if other < slot]
    return bool(before) and row[before[-1]].kind is Kind.UNSHARD
