"""Lowering: schedule -> schedule, adding what the machine needs. Each result is verified at its level."""

from bisect import insort

from pipeloom.errors import UserError
from pipeloom.schedule.action import Action
from pipeloom.schedule.depend import consumer_of, matching_receive
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.schedule.verify import messages_of


def lower(schedule: Schedule, receive_buffers: int = 2) -> Schedule:
    """Make a compute-only schedule ready to run.

    Args:
        schedule: at any level; one that has its communication already is returned as it is.
        receive_buffers: see ``add_send_receive``.
    """
    if schedule.level is Level.COMMUNICATION:
        return schedule
    return add_send_receive(schedule, receive_buffers)


def add_send_receive(schedule: Schedule, receive_buffers: int) -> Schedule:
    """Add a send and a receive for every tensor that changes rank.

    A send follows the compute action whose result it sends. A receive stands as early as its rank has a
    free buffer for the directed edge, in the order in which the other side sends: a buffer is taken when
    the receive is posted and is free again when the compute action that uses it has run. Where the order
    of the sends forces a receive earlier than the buffers allow, the order wins, since anything else
    would deadlock.

    Args:
        schedule: a compute-only schedule.
        receive_buffers: receives posted and not yet used, for each directed edge; at least 1.

    Raises:
        UserError: ``receive_buffers`` is below 1.
    """
    if receive_buffers < 1:
        raise UserError(f"receive_buffers must be at least 1, found {receive_buffers}")
    posted = _post_slots(schedule, receive_buffers)
    rows = []
    for rank, row in enumerate(schedule.rows):
        lowered: list[Action] = []
        for slot, action in enumerate(row):
            lowered.extend(posted[rank][slot])
            lowered.append(action)
            lowered.extend(messages_of(action, schedule)[:1])
        rows.append(lowered)
    return schedule.with_rows(rows, Level.COMMUNICATION)


def _post_slots(schedule: Schedule, receive_buffers: int) -> list[list[list[Action]]]:
    """For each rank and slot the receives that are posted before the compute action there."""
    slot_of = {action: slot for _, slot, action in schedule.actions()}
    posted: list[list[list[Action]]] = [[[] for _ in row] for row in schedule.rows]
    for (_, receiver), receives in _receives_by_edge(schedule).items():
        used_at = [slot_of[consumer_of(receive, schedule)] for receive in receives]
        for receive, slot in zip(receives, _earliest(used_at, receive_buffers), strict=True):
            posted[receiver][slot].append(receive)
    return posted


def _receives_by_edge(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """The receives of each directed edge, in the order in which the sender sends."""
    owner = schedule.placement.rank_by_stage
    edges: dict[tuple[int, int], list[Action]] = {}
    for rank, _, action in schedule.actions():
        for send in messages_of(action, schedule)[:1]:
            receive = matching_receive(send)
            edges.setdefault((rank, owner[receive.stage]), []).append(receive)
    return edges


def _earliest(used_at: list[int], receive_buffers: int) -> list[int]:
    """The slot before which each receive of one edge is posted.

    Args:
        used_at: slot of the compute action that uses each receive, in the order of the receives.
        receive_buffers: receives that may be posted and unused at once.

    Receive ``k`` needs a buffer: all but ``receive_buffers - 1`` of the earlier ones are used. It must
    stand before its user, and before the user of every later receive, since receives stay in order.
    """
    latest = list(used_at)
    for k in range(len(latest) - 2, -1, -1):
        latest[k] = min(latest[k], latest[k + 1])
    slots: list[int] = []
    earlier_uses: list[int] = []  # ascending
    for k, limit in enumerate(latest):
        has_buffer = earlier_uses[k - receive_buffers] + 1 if k >= receive_buffers else 0
        slots.append(min(limit, max(has_buffer, slots[-1] if slots else 0)))
        insort(earlier_uses, used_at[k])
    return slots
