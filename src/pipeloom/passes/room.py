"""Making room in a row: what a rank keeps for backwards leaves it for a while, and comes back before it is needed.

The core of the passes that swap activations (``balance``, ``offload``). A plan is made on a clock of the schedule, on
which it must not matter: what leaves does so as late as it can, in time for the action that needs its room; what comes
back does so as late as it can, in time for its backward. So the compute actions keep their times.

Which one leaves: what is needed last, as page replacement does that knows the future (Belady, IBM Systems Journal 5
(2), 1966), so that few have to. On 1F1B that is the newest micro-batch, the choice of BPipe (Kim et al., ICML 2023).
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
"""How often a plan with late loads is made again on the clock that it gives."""

Clock = tuple[Seconds, Seconds]
"""Starts and ends of all actions of a schedule."""


class Part(NamedTuple):
    """What a stage keeps of a micro-batch or of a token slice.

    Attributes:
        used: the compute action of the rank, counted from 0, that needs it first.
        made: the one that makes it.
        forward: that one.
        size: bytes.
    """

    used: int
    made: int
    forward: Action
    size: float


class Move(NamedTuple):
    """Something leaves and comes back.

    Attributes:
        kept: what.
        out_after, back_after: the compute actions behind which both stand.
        out_s, back_s: when both start at the latest.
    """

    kept: Part
    out_after: int
    back_after: int
    out_s: float
    back_s: float


@dataclass(frozen=True)
class Plan:
    """What leaves a rank.

    Attributes:
        moves: in the order in which it was found that they have to.
        missing_bytes: by how much too much is left at the worst moment; 0 if nothing is.
        is_late: whether something comes back later than its backward could start.
    """

    moves: tuple[Move, ...] = ()
    missing_bytes: float = 0.0
    is_late: bool = False


@dataclass
class _Lane:
    """When a lane is busy: stretches that do not overlap."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def latest(self, earliest_s: float, deadline_s: float, seconds: float) -> float | None:
        """The latest start of a free stretch that is over by a deadline; ``None`` if it would start too early."""
        number, end_s = bisect_left(self.begins, deadline_s), deadline_s
        while end_s - seconds >= earliest_s:
            if not number or self.ends[number - 1] <= end_s - seconds:
                return end_s - seconds
            number -= 1
            end_s = min(end_s, self.begins[number])
        return None

    def earliest(self, earliest_s: float, seconds: float) -> float:
        """The earliest start of a free stretch."""
        number, start_s = bisect_right(self.ends, earliest_s), earliest_s
        while number < len(self.begins) and self.begins[number] < start_s + seconds:
            start_s = self.ends[number]
            number += 1
        return start_s

    def take(self, start_s: float, seconds: float) -> None:
        """Make a stretch busy."""
        insort(self.begins, start_s)
        insort(self.ends, start_s + seconds)

    def free(self, start_s: float, seconds: float) -> None:
        """Make a stretch free again that was taken."""
        self.begins.remove(start_s)
        self.ends.remove(start_s + seconds)


@dataclass(frozen=True)
class RowClock:
    """A rank's row on a clock.

    Attributes:
        begin_s, end_s: of its compute actions.
        held_bytes: for each compute action the most that is held from the end of the one before it to its own.
        kept: what could leave, in the order in which it is made.
        out: what moves it away.
        seconds_of: how long that takes.
        busy: (kind, start, end) of what already runs on the lanes of both.
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
        """What brings it back."""
        return LOAD_OF[self.out]

    def lane(self, kind: Kind) -> _Lane:
        """A lane with what already runs there."""
        lane = _Lane()
        for other, start_s, end_s in self.busy:
            if other.lane == kind.lane:
                lane.take(start_s, end_s - start_s)
        return lane

    def with_more(self, changed_s: Seconds, more: Bytes) -> "RowClock":
        """The same with other things held besides."""
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
        schedule: nothing of it moves by ``out`` yet.
        rank: whose row.
        clock: starts and ends of all actions.
        held: when the rank holds how many bytes more or fewer.
        sizes: for each stage, micro-batch and slice what is kept (``KeptBytes.moved``).
        out: what moves things away.
        seconds_of: how long that and its counterpart take.
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
    """The most that is held from one end to the next."""
    if not len(changed_s):
        return np.zeros(len(ends))
    # At one time what goes comes before what is added: it makes the room for it.
    order = np.lexsort((more, changed_s))
    changed_s, total = changed_s[order], np.cumsum(more[order])
    begins = np.concatenate([[-np.inf], ends[:-1]])
    first = np.searchsorted(changed_s, begins, side="left")
    last = np.searchsorted(changed_s, ends, side="left")
    # what is held when a stretch begins is what the changes up to there leave, and of those what goes at once is gone
    at_begin = np.searchsorted(changed_s, begins, side="right") - 1
    entry = np.where(at_begin >= 0, total[np.maximum(at_begin, 0)], 0.0)
    # reduceat takes no index behind the end; every second of its maxima lies between two stretches and is left out.
    padded = np.append(total, -np.inf)
    most = np.maximum.reduceat(padded, np.stack([first, last], axis=1).reshape(-1))[::2]
    return np.maximum(entry, np.where(first < last, most, -np.inf))


def _movable(row: Row, sizes: Bytes) -> list[Part]:
    """What a backward needs, or a recomputation before it, and nothing moves yet."""
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
    """Sweeps over a row once."""

    clock: RowClock
    allows_late: bool
    moves: list[Move] = field(default_factory=list)
    is_late: bool = False
    away_bytes: float = 0.0
    returning: dict[int, list[int]] = field(default_factory=dict)
    """Numbers of moves by the first compute action before which they are back."""
    seconds: dict[tuple[Kind, int, int], float] = field(default_factory=dict)
    """Answers so far."""

    def __post_init__(self) -> None:
        self.outs, self.backs = self.clock.lane(self.clock.out), self.clock.lane(self.clock.back)
        self.least_s = 1e-9 * self.clock.end_s[-1]  # less than any time that matters

    def plan(self, limit_bytes: float) -> Plan:
        """Let things leave wherever more than the limit is held."""
        there: list[Part] = []  # ascending by use
        arriving = iter(self.clock.kept)
        following = next(arriving, None)
        missing_bytes = 0.0
        for step, held in enumerate(self.clock.held_bytes):
            self.away_bytes -= sum(self.moves[number].kept.size for number in self.returning.get(step, ()))
            # Its backward has begun: it can no longer leave.
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
        """Note that something is away from now on."""
        move = self.moves[number]
        self.away_bytes += move.kept.size
        self.returning.setdefault(move.back_after + 1, []).append(number)

    def _postpone(self, step: int) -> bool:
        """Let something that comes back now do so later: in the pause before its backward."""
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
        """Let what is needed last of what can go by a step do so."""
        # Late is the last resort: what comes back late delays its backward, and all that follows.
        for in_time in (True, False) if self.allows_late else (True,):
            # From the end of the list, which is what is needed last.
            for place in range(len(there) - 1, -1, -1):
                # What is needed last may have no free stretch on the lanes; then the one before it leaves.
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
        """The last compute action that ends before a load, and before the backward for which it is."""
        return min(bisect_right(self.clock.end_s, start_s + self.least_s), kept.used) - 1

    def _move(self, kept: Part, step: int, *, in_time: bool) -> Move | None:
        clock = self.clock
        takes_s, takes_back_s = self._seconds(kept, clock.out), self._seconds(kept, clock.back)
        out_s = self.outs.latest(clock.end_s[kept.made] - self.least_s, clock.end_s[step - 1], takes_s)
        if out_s is None:
            return None
        # Back only behind the action whose room it left for, or it would have left for nothing.
        earliest_s = max(out_s + takes_s, clock.end_s[step])
        back_s = self._back_s(kept, earliest_s, takes_back_s, in_time=in_time)
        if back_s is None:
            return None
        self.outs.take(out_s, takes_s)
        self.backs.take(back_s, takes_back_s)
        out_after = bisect_right(clock.end_s, out_s + self.least_s) - 1
        return Move(kept, out_after, self._last_before(back_s, kept), out_s, back_s)

    def _back_s(self, kept: Part, earliest_s: float, takes_s: float, *, in_time: bool) -> float | None:
        """When it has to start to come back: one compute action ahead, or, where only that is left, in the pause."""
        if not in_time:
            return self.backs.earliest(earliest_s, takes_s)
        # One action early where possible: a load that is a little late then delays nothing.
        for deadline_s in (self.clock.end_s[kept.used - 1], self.clock.begin_s[kept.used]):
            found = self.backs.latest(earliest_s - self.least_s, deadline_s, takes_s)
            if found is not None:
                return found
        return None


def make_room(clock: RowClock, limit_bytes: float, *, allows_late: bool = False) -> Plan:
    """What has to leave a rank, and when, so that it never holds more than a limit.

    Args:
        clock: the rank's row.
        limit_bytes: the most that it may hold, what is under way included.
        allows_late: whether something may come back too late rather than not leave.
    """
    return _Planner(clock, allows_late).plan(limit_bytes)


def lane_times(clock: RowClock, moves: Sequence[Move], kind: Kind) -> list[tuple[float, float]]:
    """When the moves of a kind start and end on their lane, for each move: each as soon as its place and the lane are
    free, and what comes back no sooner than it is away.
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
    """A row with what its plan moves; each action precedes the next compute action."""
    if not moves:
        return row
    slots = [*np.flatnonzero(row.is_kind(*COMPUTE_KINDS)).tolist(), len(row)]
    added = [(slots[m.out_after + 1] - 1, m.out_s, m.kept.forward._replace(kind=out)) for m in moves]
    added += [(slots[m.back_after + 1] - 1, m.back_s, m.kept.forward._replace(kind=LOAD_OF[out])) for m in moves]
    return row.with_actions(added)


def settle(schedule: Schedule, seconds_of: SecondsOf, out: Kind, plan: Callable[[Clock], Sequence[Plan]]) -> Schedule:
    """The schedule with a plan that was made on its own clock.

    Where nothing comes back late, that is the clock of the schedule without it. Otherwise backwards wait, and what they
    wait for gives others more time: the plan is made again on the clock that it gives, until nothing is late there.

    Args:
        schedule: nothing of it moves by ``out`` yet.
        seconds_of: of every action, what moves included.
        out: what moves things away.
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
