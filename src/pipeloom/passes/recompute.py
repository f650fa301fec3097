"""The pass that recomputes only as much as memory requires, for each micro-batch and stage."""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Schedule
from pipeloom.terminal.words import count

_ENDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@checked
def recompute_beyond(
    schedule: Schedule, room: Sequence[float], kept: Sequence[float], left: Sequence[float]
) -> Schedule:
    """Recompute as few forwards as keep the activation memory of every rank within its limit.

    A forward with an ``R`` before its backward keeps only its stage's input. ``R`` is right before the backward, so
    that it runs while the rank waits for the gradient. Where memory is exceeded, the activations with the latest
    backward are recomputed. For equal stages that is the fewest recomputations: it drops the fewest intervals such that
    at most a given number of the others overlap. An input gradient counts as the backward.

    Args:
        schedule: without moves and recomputations, with or without communication.
        room: for each rank its limit, in bytes or any other unit.
        kept: for each stage the memory of a micro-batch between forward and backward.
        left: for each stage the same where it is recomputed.

    Raises:
        UserError: a rank exceeds its limit with everything recomputed; names it and what is missing.
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
    """A rank's row with its recomputations; ``None`` if it exceeds its limit with all of them.

    Slices count as much as micro-batches, and ``room`` is that many times larger, so that sums are exact.
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
    """Forwards to recompute; ``None`` if all of them would not be enough.

    If any is recomputed, the limit must leave room for the activations of the largest while its backward runs.
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
                    # Forwards whose backward is over are still in the heap, and free nothing.
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
    """A rank's peak with everything recomputed."""
    change = [left[a.stage] * ((a.kind is Kind.FORWARD) - (a.kind in _ENDS)) for a in actions]
    more = max((kept[a.stage] - left[a.stage] for a in actions if a.kind in _ENDS), default=0.0)
    return float(np.cumsum(change).max(initial=0.0)) + more
