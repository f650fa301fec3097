"""Lowering: adds sends and receives to a compute-only schedule."""

import numpy as np

from pipeloom.calls import checked
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.kernels import messages as kernels
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.workload.limits import Count


@checked
def lower(schedule: Schedule, receive_buffers: Count = 2) -> Schedule:
    r"""Add a send and a receive for every tensor that changes rank.

    A send follows the compute action whose result it sends. A receive is posted as soon as its rank has a free buffer
    for the directed edge, in the order of the sends. It takes a buffer when it is posted; the compute action that uses
    the tensor frees it. Where the order of the sends forces a receive before a buffer is free, the order takes
    precedence, since anything else would deadlock.

    Examples:
        >>> from pipeloom import format_schedule, lower, parse_schedule
        >>> print(format_schedule(lower(parse_schedule("0F0 0B0\n1F0 1B0"))))
        0RECV_B0 0F0 0SEND_F0 0B0
        1RECV_F0 1F0 1B0 1SEND_B0
        <BLANKLINE>

    Args:
        schedule: at any level; one with communication is returned as it is.
        receive_buffers: receives posted and not yet used, for each directed edge; at least 1.

    Raises:
        CallError: ``receive_buffers`` is below 1.
    """
    if schedule.level is Level.COMMUNICATION:
        return schedule
    facts, size = schedule.facts, schedule.num_actions
    first, owner = facts.columns.first, facts.owner
    user_of = np.stack([facts.node_of[Kind.FORWARD.code], facts.input_gradients])
    find = kernel(kernels.find_messages, size)
    makers, users, begin = find(*facts.columns, owner, facts.crosses, schedule.first_backward_stage, user_of)
    receivers = facts.ranks[users[begin[:-1]]]
    posted = kernel(kernels.post, size)(users, begin, first[receivers], receive_buffers)
    columns, bounds = kernel(kernels.insert, size)(*facts.columns, makers, users, posted)
    lowered = Row(*columns)
    rows = [lowered[bounds[rank] : bounds[rank + 1]] for rank in range(schedule.num_ranks)]
    return schedule.with_rows(rows, Level.COMMUNICATION)
