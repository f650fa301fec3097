"""Plans which activations of a rank move out, when, and when they return: the core of ``balance`` and ``offload``.

A plan is made on a clock of the schedule and must not change the times of compute actions: a move out ends in time for
the action that needs its memory, a move back ends in time for its backward, and both start as late as they can.

The activations with the latest backward move out, as in page replacement with known future (Belady, IBM Systems Journal
5 (2), 1966), so that few have to move. With 1F1B that is the newest micro-batch, the choice of BPipe (Kim et al., ICML
2023).
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pipeloom.schedule.action import Action
from pipeloom.schedule.clock import SecondsOf, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import COMPUTE_KINDS, KINDS, LOAD_OF, Kind
from pipeloom.schedule.ledger import Bytes
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule

_ROUNDS = 12
"""Most iterations of a plan with late loads: each changes the clock on which the next one is made."""

Clock = tuple[Seconds, Seconds]
"""Starts and ends of all actions of a schedule."""


class Part(NamedTuple):
    """Activations of a stage for a micro-batch or a token slice.

    Attributes:
        used: number of the rank's compute action, from 0, that uses them first.
        made: number of the forward that makes them.
        forward: that forward.
        size: bytes.
    """

    used: int
    made: int
    forward: Action
    size: float


class Move(NamedTuple):
    """A move out and the move back.

    Attributes:
        kept: what moves.
        out_after, back_after: numbers of the compute actions that they follow in the row.
        out_s, back_s: their latest start times.
    """

    kept: Part
    out_after: int
    back_after: int
    out_s: float
    back_s: float


@dataclass(frozen=True)
class Plan:
    """The moves of a rank.

    Attributes:
        moves: in the order in which they were chosen.
        missing_bytes: largest excess over the limit; 0 if the limit is kept.
        is_late: whether some backward waits for its move back.
    """

    moves: tuple[Move, ...] = ()
    missing_bytes: float = 0.0
    is_late: bool = False


@dataclass
class _Lane:
    """Busy intervals of a lane, disjoint and ascending."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    _searched: dict[tuple[float, float], float] = field(default_factory=dict)
    """(deadline, seconds) -> where a search for the latest start ended: every free interval of that length ends there
    or earlier. Busy intervals that are added later do not change that, so the next search continues from there."""

    def latest(self, earliest_s: float, deadline_s: float, seconds: float) -> float | None:
        """The latest start of a free interval that ends by a deadline; ``None`` if it would start too early."""
        begins, ends = self.begins, self.ends
        end_s = self._searched.get((deadline_s, seconds), deadline_s)
        number, found = bisect_left(begins, end_s), None
        while end_s - seconds >= earliest_s:
            if not number or ends[number - 1] <= end_s - seconds:
                found = end_s - seconds
                break
            number -= 1
            end_s = min(end_s, begins[number])
        self._searched[deadline_s, seconds] = end_s
        return found

    def earliest(self, earliest_s: float, seconds: float) -> float:
        """The earliest start of a free interval."""
        number, start_s = bisect_right(self.ends, earliest_s), earliest_s
        while number < len(self.begins) and self.begins[number] < start_s + seconds:
            start_s = self.ends[number]
            number += 1
        return start_s

    def take(self, start_s: float, seconds: float) -> None:
        """Make an interval busy."""
        insort(self.begins, start_s)
        insort(self.ends, start_s + seconds)

    def free(self, start_s: float, seconds: float) -> None:
        """Make an interval free that ``take`` made busy."""
        self._searched.clear()
        self.begins.remove(start_s)
        self.ends.remove(start_s + seconds)


@dataclass(frozen=True)
class RowClock:
    """A rank's row on a clock.

    Attributes:
        begin_s, end_s: of its compute actions.
        held_bytes: for each compute action the peak from the end of the one before it to its own end.
        kept: activations that could move, in the order of their forwards.
        out: kind of the move out.
        seconds_of: seconds of both moves.
        busy: (kind, start, end) of the actions that use the lanes of both moves already.
    """

    begin_s: list[float]
    end_s: list[float]
    held_bytes: list[float]
    kept: list[Part]
    out: Kind
    seconds_of: SecondsOf
    busy: list[tuple[Kind, float, float]]

    @property
    def back(self) -> Kind:
        """Kind of the move back."""
        return LOAD_OF[self.out]

    def lane(self, kind: Kind) -> _Lane:
        """A lane with its busy intervals."""
        lane = _Lane()
        for other, start_s, end_s in self.busy:
            if other.lane == kind.lane:
                lane.take(start_s, end_s - start_s)
        return lane

    def with_more(self, changed_s: Seconds, more: Bytes) -> "RowClock":
        """The same with further changes of memory (times, bytes)."""
        held = np.array(self.held_bytes) + _most_held(self.end_s, changed_s, more)
        return replace(self, held_bytes=held.tolist())


def row_clock(
    schedule: Schedule,
    rank: int,
    clock: Clock,
    held: tuple[Seconds, Bytes],
    *,
    sizes: Bytes,
    out: Kind,
    seconds_of: SecondsOf,
) -> RowClock:
    """A rank's row on a clock.

    Args:
        schedule: without moves of the kind ``out``.
        rank: whose row.
        clock: starts and ends of all actions.
        held: times and bytes of the changes of the rank's memory.
        sizes: for each stage, micro-batch and slice its bytes (``KeptBytes.moved``).
        out: kind of the moves out.
        seconds_of: seconds of the moves out and back.
    """
    row = schedule.rows[rank]
    first = int(schedule.facts.columns.first[rank])
    start_s, end_s = (array[first : first + len(row)] for array in clock)
    computes = row.is_kind(*COMPUTE_KINDS)
    ends = end_s[computes].tolist()
    lanes = (out.lane, out.partner.lane)
    busy = np.flatnonzero(row.is_kind(*(kind for kind in KINDS if kind.lane in lanes)))
    return RowClock(
        begin_s=start_s[computes].tolist(),
        end_s=ends,
        held_bytes=_most_held(ends, *held).tolist(),
        kept=_movable(row, sizes),
        out=out,
        seconds_of=seconds_of,
        busy=[(row[slot].kind, float(start_s[slot]), float(end_s[slot])) for slot in busy.tolist()],
    )


def _most_held(ends: Sequence[float], changed_s: Seconds, more: Bytes) -> Bytes:
    """Peaks between consecutive end times."""
    if not len(changed_s):
        return np.zeros(len(ends))
    # Of changes at one time, releases come first: they make room for the others.
    order = np.lexsort((more, changed_s))
    changed_s, total = changed_s[order], np.cumsum(more[order])
    begins = np.concatenate([[-np.inf], ends[:-1]])
    first = np.searchsorted(changed_s, begins, side="left")
    last = np.searchsorted(changed_s, ends, side="left")
    # Memory at the begin of an interval: the sum of all changes up to it, releases at that very time included.
    at_begin = np.searchsorted(changed_s, begins, side="right") - 1
    entry = np.where(at_begin >= 0, total[np.maximum(at_begin, 0)], 0.0)
    # reduceat takes no index behind the end; every second maximum is of a gap between two intervals and is dropped.
    padded = np.append(total, -np.inf)
    most = np.maximum.reduceat(padded, np.stack([first, last], axis=1).reshape(-1))[::2]
    return np.maximum(entry, np.where(first < last, most, -np.inf))


def _movable(row: Row, sizes: Bytes) -> list[Part]:
    """Activations that a backward, or a recomputation before it, uses and that no action moves yet."""
    computes = row.take(row.is_kind(*COMPUTE_KINDS))
    known = {(a.stage, a.microbatch, a.slice) for a in row.take(row.is_kind(*LOAD_OF))}
    made: dict[tuple[int, int | None, int], tuple[int, Action]] = {}
    found: list[Part] = []
    for number, action in enumerate(computes):
        key = action[1:]
        if action.kind is Kind.FORWARD:
            made[key] = number, action
        elif key not in known and sizes[key] > 0:
            known.add(key)
            found.append(Part(number, *made[key], float(sizes[key])))
    return sorted(found, key=lambda kept: kept.made)


@dataclass
class _Planner:
    """Makes the plan of a row in one pass over its compute actions."""

    clock: RowClock
    allows_late: bool
    moves: list[Move] = field(default_factory=list)
    is_late: bool = False
    away_bytes: float = 0.0
    returning: dict[int, list[int]] = field(default_factory=dict)
    """First compute action after a move back -> numbers of such moves."""
    seconds: dict[tuple[Kind, int, int], float] = field(default_factory=dict)
    """Cache of ``seconds_of``."""

    def __post_init__(self) -> None:
        self.outs, self.backs = self.clock.lane(self.clock.out), self.clock.lane(self.clock.back)
        self.least_s = 1e-9 * self.clock.end_s[-1]  # less than any time that matters

    def plan(self, limit_bytes: float) -> Plan:
        """Move activations out wherever the limit is exceeded."""
        there: list[Part] = []  # ascending by use
        arriving = iter(self.clock.kept)
        following = next(arriving, None)
        missing_bytes = 0.0
        for step, held in enumerate(self.clock.held_bytes):
            self.away_bytes -= sum(self.moves[number].kept.size for number in self.returning.get(step, ()))
            # Their backwards have begun, so they can no longer move out.
            while there and there[0].used <= step:
                there.pop(0)
            # Above a rounding error of sums in another order.
            while held - self.away_bytes > limit_bytes * (1 + 1e-9):
                if not self._postpone(step) and not self._leave(there, step):
                    break
            too_much = held - self.away_bytes - limit_bytes
            if too_much > 1e-9 * limit_bytes:
                missing_bytes = max(missing_bytes, too_much)
            while following is not None and following.made <= step:
                insort(there, following)
                following = next(arriving, None)
        return Plan(tuple(self.moves), missing_bytes, self.is_late)

    def _away(self, number: int) -> None:
        """Count a move's bytes as moved out until its move back."""
        move = self.moves[number]
        self.away_bytes += move.kept.size
        self.returning.setdefault(move.back_after + 1, []).append(number)

    def _postpone(self, step: int) -> bool:
        """Delay a move back that is due now into the idle time before its backward; whether one could be delayed."""
        coming = self.returning.get(step, [])
        for number in coming:
            move = self.moves[number]
            takes_s = self._seconds(move.kept, self.clock.back)
            self.backs.free(move.back_s, takes_s)
            start_s = self.backs.latest(
                self.clock.end_s[step] - self.least_s, self.clock.begin_s[move.kept.used], takes_s
            )
            if start_s is None:
                self.backs.take(move.back_s, takes_s)
                continue
            self.backs.take(start_s, takes_s)
            self.moves[number] = move._replace(back_s=start_s, back_after=self._last_before(start_s, move.kept))
            coming.remove(number)
            self._away(number)
            return True
        return False

    def _leave(self, there: list[Part], step: int) -> bool:
        """Move out the activations with the latest backward that can move by ``step``; whether there were any."""
        # Late moves are the last resort: they delay their backward and all that follows.
        for in_time in (True, False) if self.allows_late else (True,):
            # From the end of the list, where the latest backwards are.
            for place in range(len(there) - 1, -1, -1):
                # The latest may have no free interval on the lanes; then the one before it moves.
                move = self._move(there[place], step, in_time=in_time)
                if move is not None:
                    del there[place]
                    self.moves.append(move)
                    self.is_late = self.is_late or not in_time
                    self._away(len(self.moves) - 1)
                    return True
        return False

    def _seconds(self, kept: Part, kind: Kind) -> float:
        key = kind, kept.forward.stage, kept.forward.slice  # the same for all micro-batches
        if key not in self.seconds:
            self.seconds[key] = self.clock.seconds_of(kept.forward._replace(kind=kind))
        return self.seconds[key]

    def _last_before(self, start_s: float, kept: Part) -> int:
        """The last compute action that ends before a move back starts, at most the one before its backward."""
        return min(bisect_right(self.clock.end_s, start_s + self.least_s), kept.used) - 1

    def _move(self, kept: Part, step: int, *, in_time: bool) -> Move | None:
        clock = self.clock
        takes_s, takes_back_s = self._seconds(kept, clock.out), self._seconds(kept, clock.back)
        out_s = self.outs.latest(clock.end_s[kept.made] - self.least_s, clock.end_s[step - 1], takes_s)
        if out_s is None:
            return None
        # Back only behind the action whose memory it made free, or the move would have been useless.
        earliest_s = max(out_s + takes_s, clock.end_s[step])
        back_s = self._back_s(kept, earliest_s, takes_back_s, in_time=in_time)
        if back_s is None:
            return None
        self.outs.take(out_s, takes_s)
        self.backs.take(back_s, takes_back_s)
        out_after = bisect_right(clock.end_s, out_s + self.least_s) - 1
        return Move(kept, out_after, self._last_before(back_s, kept), out_s, back_s)

    def _back_s(self, kept: Part, earliest_s: float, takes_s: float, *, in_time: bool) -> float | None:
        """Start of the move back: to end one compute action early, else in the idle time before its backward."""
        if not in_time:
            return self.backs.earliest(earliest_s, takes_s)
        # One action early where possible: a load that is a little late then delays nothing.
        for deadline_s in (self.clock.end_s[kept.used - 1], self.clock.begin_s[kept.used]):
            found = self.backs.latest(earliest_s - self.least_s, deadline_s, takes_s)
            if found is not None:
                return found
        return None


def make_room(clock: RowClock, limit_bytes: float, *, allows_late: bool = False) -> Plan:
    """Plan the moves that keep a rank within a limit.

    Args:
        clock: the rank's row.
        limit_bytes: of activation memory, transfers in progress included.
        allows_late: whether a backward may wait for its activations where the limit cannot be kept otherwise.
    """
    return _Planner(clock, allows_late).plan(limit_bytes)


def lane_times(clock: RowClock, moves: Sequence[Move], kind: Kind) -> list[tuple[float, float]]:
    """For each move its start and end on the lane of ``kind``: as soon as its place in the row and the lane allow; a
    move back no sooner than the end of the move out.
    """
    is_out = kind is clock.out
    gone_s = [end_s for _, end_s in lane_times(clock, moves, clock.out)] if not is_out else [0.0] * len(moves)
    found: dict[int, tuple[float, float]] = {}
    free_s = 0.0
    for number in sorted(range(len(moves)), key=lambda n: moves[n].out_s if is_out else moves[n].back_s):
        move = moves[number]
        posted_s = clock.end_s[move.out_after if is_out else move.back_after]
        start_s = max(posted_s, free_s, gone_s[number])
        free_s = start_s + clock.seconds_of(move.kept.forward._replace(kind=kind))
        found[number] = start_s, free_s
    return [found[number] for number in range(len(moves))]


def _with_moves(row: Row, moves: Sequence[Move], out: Kind) -> Row:
    """A row with the moves of its plan."""
    if not moves:
        return row
    slots = [*np.flatnonzero(row.is_kind(*COMPUTE_KINDS)).tolist(), len(row)]
    added = [(slots[m.out_after + 1] - 1, m.out_s, m.kept.forward._replace(kind=out)) for m in moves]
    added += [(slots[m.back_after + 1] - 1, m.back_s, m.kept.forward._replace(kind=LOAD_OF[out])) for m in moves]
    return row.with_actions(added)


def settle(schedule: Schedule, seconds_of: SecondsOf, out: Kind, plan: Callable[[Clock], Sequence[Plan]]) -> Schedule:
    """The schedule with plans that were made on its own clock.

    Where no move back is late, that is the clock of the schedule without moves. Otherwise backwards wait, which gives
    other moves more time: the plans are made again on the resulting clock, until no move is late.

    Args:
        schedule: without moves of the kind ``out``.
        seconds_of: seconds of every action, moves included.
        out: kind of the moves out.
        plan: clock -> for each rank its plan.
    """
    clock = times(schedule, seconds_of)
    for _ in range(_ROUNDS):
        plans = plan(clock)
        rows = [_with_moves(row, each.moves, out) for row, each in zip(schedule.rows, plans, strict=True)]
        moved = schedule.with_rows(rows, Level.COMMUNICATION)
        if not any(each.is_late for each in plans):
            break
        is_old = ~moved.facts.row.is_kind(out, LOAD_OF[out])
        start_s, end_s = times(moved, seconds_of)
        clock = start_s[is_old], end_s[is_old]
    return moved
