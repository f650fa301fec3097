"""The pass that recomputes only where a rank is short of memory: micro-batch by micro-batch, stage by stage."""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Schedule
from pipeloom.terminal.words import count

_ENDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def recompute_beyond(
    schedule: Schedule, room: Sequence[float], kept: Sequence[float], left: Sequence[float]
) -> Schedule:
    """Recompute as little as it takes for what ranks keep between forwards and backwards to have room.

    A forward whose backward has an ``R`` before it keeps its stage's input alone. ``R`` stands right before that
    backward, so that it runs while the rank waits for the gradient. Where too much would be kept, what is kept the
    longest from there on gives way. For equal stages that recomputes the fewest, since it is how to drop the fewest
    intervals such that no more than a number of the others overlap. Half a backward counts as the whole.

    Args:
        schedule: before anything is swapped or recomputed, with or without communication.
        room: for each rank the bytes, or any other unit, that it has for what is kept.
        kept: for each stage what a micro-batch keeps there between forward and backward.
        left: for each stage what it keeps where it is recomputed.

    Raises:
        UserError: with everything recomputed a rank has still too little room; says which, and how much is missing.
    """
    if len(room) != schedule.num_ranks:
        wanted = f"expected {count(schedule.num_ranks, 'number')} of room, one for each rank"
        raise UserError(f"{wanted}, found {len(room)}")
    parts = schedule.num_slices
    rows: list[Row] = []
    for rank, row in enumerate(schedule.rows):
        actions = list(row)
        recomputed = _with_recomputation(row, actions, room[rank] * parts, kept, left)
        if recomputed is None:
            most = _all_recomputed(actions, kept, left) / parts
            raise UserError(
                f"rank {rank} has room for {room[rank]:g} and holds {most:g} with everything recomputed; "
                f"{most - room[rank]:g} are missing: shorten the micro-batch, or share the stages among more ranks"
            )
        rows.append(recomputed)
    return schedule.with_rows(rows, schedule.level)


def _with_recomputation(
    row: Row, actions: Sequence[Action], room: float, kept: Sequence[float], left: Sequence[float]
) -> Row | None:
    """A rank's row with ``R`` where it has to be; ``None`` if it has too little room.

    Slices count as if each kept what a micro-batch does, so that sums are exact: the room is that of as many.
    """
    end_of = {_of(action): slot for slot, action in enumerate(actions) if action.kind in _ENDS}
    again = _dropped(actions, end_of, room, kept, left)
    if again is None:
        return None
    slots = sorted(end_of[forward] for forward in again)
    inserted = [actions[slot]._replace(kind=Kind.RECOMPUTE) for slot in slots]
    return row.insert([slot - 1 for slot in slots], Row.of(inserted))


def _of(action: Action) -> Action:
    """The forward of the same part of the batch on the same stage."""
    return action._replace(kind=Kind.FORWARD)


def _dropped(
    actions: Sequence[Action], end_of: dict[Action, int], room: float, kept: Sequence[float], left: Sequence[float]
) -> set[Action] | None:
    """Forwards that keep their input alone; ``None`` if all of them would not be enough.

    Once something is recomputed, the largest part has to have room for its return.
    """
    if not end_of:
        return set()
    # Sums in another order differ by rounding.
    room *= 1 + 1e-12
    for spare in (0.0, max(kept[action.stage] - left[action.stage] for action in end_of)):
        again: set[Action] = set()
        held, longest = 0.0, list[tuple[int, Action]]()
        for slot, action in enumerate(actions):
            if action in end_of:
                held += kept[action.stage]
                # Negative, since heapq has the least on top: here the backward that is furthest ahead.
                heappush(longest, (-end_of[action], action))
                while held > room - spare and longest:
                    end, victim = heappop(longest)
                    # What has gone back already is still in the heap, and frees nothing.
                    if -end > slot:
                        again.add(victim)
                        held -= kept[victim.stage] - left[victim.stage]
                if held > room - spare:
                    return None
            elif action.kind in _ENDS:
                held -= left[action.stage] if _of(action) in again else kept[action.stage]
        if not again or spare:
            return again
    raise AssertionError("one of the two rounds answers")


def _all_recomputed(actions: Sequence[Action], kept: Sequence[float], left: Sequence[float]) -> float:
    """What a rank holds at most with everything recomputed."""
    change = [left[a.stage] * ((a.kind is Kind.FORWARD) - (a.kind in _ENDS)) for a in actions]
    more = max((kept[a.stage] - left[a.stage] for a in actions if a.kind in _ENDS), default=0.0)
    return float(np.cumsum(change).max(initial=0.0)) + more
