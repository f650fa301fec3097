"""What the executor takes from the dependency relation: which slots an action waits for, and whose result it uses."""

from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.kinds import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    COMPUTE_LANE_KINDS,
    MOVE_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
    TIED_RECEIVE_KINDS,
)


def awaited_slots(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """For each slot of a row those of collectives, moves, and a tied matrix's receives that its action waits for.

    By the dependency relation; collectives themselves wait for no other ones here: their lane keeps the order of the
    row, and compute is issued in that order.
    """
    row, first, graph = schedule.rows[rank], int(schedule.facts.columns.first[rank]), schedule.graph
    beside = COLLECTIVE_KINDS | MOVE_KINDS | {Kind.SWAP_IN}
    collectives = {slot for slot, action in enumerate(row) if action.kind in beside}
    received = {slot for slot, action in enumerate(row) if action.kind in TIED_RECEIVE_KINDS}
    awaited: dict[int, list[int]] = {}
    for slot, action in enumerate(row):
        some = received if action.kind in COLLECTIVE_KINDS else collectives | received
        if some and action.kind in COMPUTE_LANE_KINDS | COLLECTIVE_KINDS | {Kind.SEND_TIED}:
            found = [needed - first for needed in graph.needed(first + slot) if needed - first in some]
            if found:
                awaited[slot] = found
    return awaited


def source_of(action: Action, schedule: Schedule) -> Action | None:
    """The action whose result is this action's input, if it is not the batch or the loss."""
    if action.microbatch is None or action.kind in MOVE_KINDS:
        return None
    for needed in schedule.facts.needs(action):
        is_kept = needed.stage == action.stage and needed.kind in COMPUTE_KINDS | MOVE_KINDS  # the stage has it
        if action.kind in SEND_KINDS or not is_kept:
            return None if action.kind in RECEIVE_KINDS else needed
    return None
