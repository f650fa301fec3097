"""The pass for tied embeddings: sends the matrix from the first stage to the last one, and its gradient back."""

import numpy as np

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, COMPUTE_KINDS, TIED_KINDS, Kind
from pipeloom.schedule.lanes import Lane, tied_action
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule


@checked
def add_tied(schedule: Schedule, *, returns_gradient: bool = True) -> Schedule:
    """Add the messages of a matrix that embedding and head share; it belongs to the first stage.

    The weights are sent before the first forward, before all other messages of their edge, and their receive is the
    first action of the last stage's rank. The gradient is sent right after the last backward that adds to it, behind
    the input gradient of that backward, for which the whole pipeline waits. Its receive follows the last action of the
    first stage's rank that precedes that backward in the dependency graph, so that it is posted in time and holds its
    buffer no longer than needed; the order of the edge takes precedence.

    Run it before ``add_unshard`` and ``add_reduce_grad``, or behind them.

    Args:
        schedule: with its sends and receives. It is returned as it is where the first and the last stage are on one
            rank: the executor then passes the matrix within the rank.
        returns_gradient: whether the matrix is trained; a frozen one has no gradient to send back.

    Raises:
        UserError: the schedule is compute-only, or has these messages already.
    """
    if schedule.level is Level.COMPUTE:
        raise UserError("the messages about a tied matrix come behind the others; call pipeloom.passes.lower first")
    if schedule.facts.has(*TIED_KINDS):
        raise UserError("the schedule sends a tied matrix already; start from one without SEND_TIED")
    owner = schedule.placement.rank_by_stage
    if owner[0] == owner[-1]:
        return schedule
    lender, borrower = schedule.rows[owner[0]], schedule.rows[owner[-1]]
    first_compute = int(lender.is_kind(*COMPUTE_KINDS).argmax())
    # Before the first forward: later it would delay the activations on its edge (decision 13).
    stages = schedule.num_stages
    lent = [(first_compute - 1, 0, tied_action(Kind.SEND_TIED, stages))]
    borrowed = [(-1, 0, tied_action(Kind.RECV_TIED, stages))]
    if returns_gradient and schedule.first_backward_stage == 0:
        slot, microbatch = _end_of_gradient(borrower, stages - 1)
        borrowed.append((slot, 0, tied_action(Kind.SEND_TIED_GRAD, stages)))
        lent.append((_place_of_receive(schedule, slot, microbatch), 0, tied_action(Kind.RECV_TIED_GRAD, stages)))
    rows = list(schedule.rows)
    rows[owner[0]], rows[owner[-1]] = lender.with_actions(lent), borrower.with_actions(borrowed)
    return schedule.with_rows(rows, Level.COMMUNICATION)


def _end_of_gradient(row: Row, stage: int) -> tuple[int, int]:
    """The slot behind which the gradient of a stage's weights is complete, and the micro-batch that completes it.

    If the gradient of that micro-batch's input is sent, it goes first.
    """
    last = int(np.flatnonzero(row.is_kind(*ADDS_TO_GRADIENT) & (row.stage == stage))[-1])
    microbatch = int(row.microbatch[last])
    sends = row.is_kind(Kind.SEND_B) & (row.stage == stage) & (row.microbatch == microbatch)
    return max([last, *np.flatnonzero(sends).tolist()]), microbatch


def _place_of_receive(schedule: Schedule, sent_behind: int, microbatch: int) -> int:
    """The slot of the first stage's row behind which the gradient is received that a micro-batch completes.

    It is sent behind the slot ``sent_behind`` of the last stage's row.
    """
    owner = schedule.placement.rank_by_stage
    row = schedule.rows[owner[0]]
    forwards = row.is_kind(Kind.FORWARD) & (row.microbatch == microbatch)
    slot = int(np.flatnonzero(forwards)[-1])
    num_before = sum(other <= sent_behind for other in _slots_on(schedule, owner[-1], Lane("send", owner[0])))
    receives = _slots_on(schedule, owner[0], Lane("recv", owner[-1]))
    if num_before:
        slot = max(slot, receives[num_before - 1])
    if num_before < len(receives):
        slot = min(slot, receives[num_before] - 1)
    return slot


def _slots_on(schedule: Schedule, rank: int, lane: Lane) -> list[int]:
    """The slots of a rank's actions on one of its lanes."""
    facts = schedule.facts
    if (rank, lane) not in facts.lanes:
        return []
    first, following = facts.columns.first[rank : rank + 2]
    return np.flatnonzero(facts.lane[first:following] == facts.lanes.index((rank, lane))).tolist()
