"""Finds what blocks a run that hangs: what has all that it needs, and has not ended.

Each rank is at one place of its row, and waits there, or not, by the dependency relation of the schedule
(``pipeloom.schedule.facts``) and two rules of communication: a message needs both ends to be posted, and an exchange of
several ranks needs all of them to have begun it. What does not wait blocks the run.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeloom.errors import UserError
from pipeloom.runs.action_log import ENDED, GONE, LoggedActivity, LoggedRank, read_ranks
from pipeloom.runs.run_folder import ACTIONS, DRAFTS, Failed, read_failure
from pipeloom.schedule import Action, Schedule, parse_schedule
from pipeloom.schedule.lanes import COMPUTE_LANE, lane_of
from pipeloom.system.files import MOST_SCHEDULE_BYTES, read_text

_BETWEEN = ""


@dataclass(frozen=True)
class Blocker:
    """Something that blocks a run.

    Attributes:
        rank: the process.
        what: the action as text, or the name of an activity; empty between two.
        slot: in the rank's row; ``None`` outside of it.
        row: name of the row; empty outside of one.
        has_begun: whether it has begun.
        since_ns: when it began, or when the rank last began or ended anything.
        ranks: that do it together; all of them have begun it.
        process: of the rank, as of ``LoggedRank``.
        is_shared: whether it hangs on all of ``ranks`` alike, so that none of them explains it.
    """

    rank: int
    what: str
    slot: int | None
    row: str
    has_begun: bool
    since_ns: int
    ranks: tuple[int, ...]
    process: str
    is_shared: bool


@dataclass(frozen=True)
class Hang:
    """The state of a run's ranks at one moment.

    Attributes:
        ranks: as their files have them.
        found: what does not wait, the most likely reason first.
        waits: rank -> what it waits for, in words, for ranks that wait.
        schedules: name of a row -> its schedule.
        now_ns: the moment; of a run that has ended, the last sign of life.
        failed: which rank made the run fail, where the process that started the ranks found one.
    """

    ranks: tuple[LoggedRank, ...]
    found: tuple[Blocker, ...]
    waits: dict[int, str]
    schedules: dict[str, Schedule]
    now_ns: int
    failed: Failed = field(default_factory=Failed)

    @property
    def quiet_s(self) -> float:
        """Seconds since any rank began or ended anything."""
        return (self.now_ns - max(one.last_ns for one in self.ranks)) * 1e-9

    @property
    def is_live(self) -> bool:
        """Whether a process of the run is there."""
        return any(one.process not in (GONE, ENDED) and not one.has_ended for one in self.ranks)


def actions_folder(run: Path) -> Path:
    """The folder with the files of a run's ranks; before its first step has ended, among its drafts.

    Raises:
        UserError: there is none.
    """
    for folder in (run / DRAFTS / ACTIONS, run / ACTIONS):
        if any(folder.glob("rank-*")):
            return folder
    if not run.is_dir():
        raise UserError(f"there is no run folder {run}; `pipeloom train` writes one and prints its path")
    raise UserError(
        f"{run} has no {ACTIONS}/ with what its ranks did last; expected the folder of a run that has started its ranks"
    )


def read_hang(run: Path) -> Hang:
    """Read the files of a run's ranks, and find what blocks it.

    Raises:
        UserError: there are none, or one is damaged.
    """
    folder = actions_folder(run)
    ranks = read_ranks(folder)
    names = {name for one in ranks for name in one.rows}
    schedules: dict[str, Schedule] = {}
    for name in sorted(names):
        file = folder / f"{Path(name).name}.txt"
        if file.is_file():
            schedules[name] = parse_schedule(read_text(file, most_bytes=MOST_SCHEDULE_BYTES))
    return find_blockers(ranks, schedules, read_failure(folder))


def find_blockers(ranks: Sequence[LoggedRank], schedules: Mapping[str, Schedule], failed: Failed | None = None) -> Hang:
    """Find what blocks a run.

    Args:
        ranks: the files of all ranks that there are.
        schedules: name of a row -> its schedule.
        failed: which rank made the run fail, and which processes its run ended then.

    Raises:
        UserError: rows and schedules do not belong together.
    """
    failed = failed or Failed()
    ranks = [replace(one, process=ENDED) if one.rank in failed.ended else one for one in ranks]
    by_rank = {one.rank: one for one in ranks}
    found: list[Blocker] = []
    waits: dict[int, str] = {}
    for one in ranks:
        if one.has_ended and not one.has_failed:
            continue
        own = _Own(one, by_rank, schedules)
        blockers = list(own.blockers())
        found += blockers
        if not blockers:
            waits[one.rank] = own.waits_for
    # A run that continues has a rank with a sign of life; the clock is that of its host.
    is_live = any(one.process in ("runs", "is stopped") for one in ranks)
    now_ns = time.monotonic_ns() if is_live else max(max(one.beat_ns, one.last_ns) for one in ranks)
    found.sort(key=lambda it: (it.rank != failed.rank, *_rank_of(it, by_rank[it.rank])))
    return Hang(tuple(ranks), tuple(found), waits, dict(schedules), now_ns, failed)


def _rank_of(it: Blocker, rank: LoggedRank) -> tuple[int, int, int]:
    """Sort key: processes that are gone or stopped first, what all ranks do alike last, then the oldest."""
    is_gone = it.process in (GONE, ENDED) and not rank.has_ended
    # A rank that met an error and noted it is rarely the reason: most lose a connection to another one.
    alive = 0 if is_gone or it.process == "is stopped" else 2 if rank.has_ended else 1
    return alive, int(it.is_shared), rank.beat_ns if is_gone else it.since_ns


class _Own:
    """The place of a rank, and whether it waits there."""

    def __init__(self, rank: LoggedRank, ranks: Mapping[int, LoggedRank], schedules: Mapping[str, Schedule]) -> None:
        self.rank, self.ranks = rank, ranks
        self.waits_for = ""
        self._in_row = next((one for one in rank.activities if one.name in rank.rows and one.is_open), None)
        self._row: _Row | None = None
        if self._in_row is not None and self._in_row.name in schedules:
            self._row = _Row(self._in_row, rank, ranks, schedules[self._in_row.name])

    def blockers(self) -> Iterator[Blocker]:
        """What of this rank does not wait."""
        explained: set[str] = set()
        for one in self.rank.activities:
            if not one.is_open or one is self._in_row:
                continue
            missing = self._missing(one)
            explained.add(one.lane)
            if missing:
                self.waits_for = f"{one.name}, which {_these(missing)} not begun"
                continue
            yield self._standing(one.name, one.begin_ns, ranks=one.ranks or ())
        if self._row is not None:
            yield from self._of_row(self._row, explained)
        elif "" not in explained:
            yield self._standing(_BETWEEN, self.rank.last_ns, has_begun=False)

    def _missing(self, one: LoggedActivity) -> list[int]:
        """The ranks that have not begun what this one has begun with them."""
        found: list[int] = []
        for number in one.ranks or ():
            other = self.ranks.get(number)
            its = None if other is None else next((it for it in other.activities if it.name == one.name), None)
            if its is not None and its.begun < one.begun:
                found.append(number)
        return found

    def _of_row(self, row: "_Row", explained: Collection[str]) -> Iterator[Blocker]:
        for slot in row.posted():
            if slot == row.inside:  # the host issues it, which needs no other rank
                if "" not in explained:
                    yield self._standing(str(row.actions[slot]), row.begin_ns(slot), slot=slot, row=row.name)
            elif row.lanes[slot] not in explained and row.missing(slot) is None:
                ends = row.ends(slot)
                yield self._standing(str(row.actions[slot]), row.begin_ns(slot), slot=slot, row=row.name, ranks=ends)
        if "" in explained or row.inside is not None:
            return
        slot = row.next_slot
        needs = row.host_waits_for(slot)
        if needs is not None:
            self.waits_for = self.waits_for or needs
            return
        what = str(row.actions[slot]) if slot < len(row.actions) else _BETWEEN
        yield self._standing(what, self.rank.last_ns, slot=slot, row=row.name, has_begun=False)

    def _standing(
        self,
        what: str,
        since_ns: int,
        *,
        slot: int | None = None,
        row: str = "",
        ranks: tuple[int, ...] = (),
        has_begun: bool = True,
    ) -> Blocker:
        is_shared = len(ranks) > 1
        return Blocker(self.rank.rank, what, slot, row, has_begun, since_ns, ranks, self.rank.process, is_shared)


class _Row:
    """A rank's row in the run of it that the rank is in, with the rows of the other ranks of its pipeline.

    Attributes:
        name: of the row.
        actions, lanes: of its slots.
        next_slot: the first action that has not begun; the host issues a row in its order.
        inside: slot of the action that the host issues, or runs; ``None`` between two.
    """

    def __init__(
        self, run: LoggedActivity, rank: LoggedRank, ranks: Mapping[int, LoggedRank], schedule: Schedule
    ) -> None:
        self.name, self._rank, self._schedule = run.name, rank, schedule
        place = rank.place
        pipeline = {
            one.place.pipeline: one for one in ranks.values() if one.place[1:] == place[1:] and self.name in one.rows
        }
        self._process_of = {number: one.rank for number, one in pipeline.items()}
        self.actions: Sequence[Action] = tuple(schedule.rows[place.pipeline])
        self.lanes = [lane_of(action, schedule.placement).name for action in self.actions]
        self._first = int(schedule.facts.columns.first[place.pipeline])
        self._begun, self._ended = self._states(run, pipeline)
        own = slice(self._first, self._first + len(self.actions))
        self._own = np.abs(rank.rows[self.name][:, 0])
        # The host issues the row in order, so the actions that have begun are its first ones.
        self.next_slot = int(self._begun[own].sum())
        last = self.next_slot - 1
        self.inside = last if last >= 0 and rank.rows[self.name][last, 0] < 0 else None
        self._believe_users()

    def _states(
        self, run: LoggedActivity, pipeline: Mapping[int, LoggedRank]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For each action of the schedule whether it has begun, and ended, in this run of the row."""
        begun: list[npt.NDArray[np.bool_]] = []
        ended: list[npt.NDArray[np.bool_]] = []
        for number, row in enumerate(self._schedule.rows):
            has_begun = has_ended = np.zeros(len(row), np.bool_)
            one = pipeline.get(number)
            its = None if one is None else next(it for it in one.activities if it.name == self.name)
            if one is not None and its is not None:
                table = one.rows[self.name]
                if len(table) != len(row):
                    raise UserError(
                        f"rank {one.rank} has {len(table)} actions of {self.name}, its schedule {len(row)}: "
                        "the files belong to different runs"
                    )
                if its.begun > run.begun or (its.begun == run.begun and not its.is_open):
                    has_begun = has_ended = np.ones(len(row), np.bool_)
                elif its.begun == run.begun:
                    has_begun = np.abs(table[:, 0]) >= its.begin_ns
                    has_ended = has_begun & (table[:, 1] >= np.abs(table[:, 0]))
            begun.append(has_begun)
            ended.append(has_ended.copy())
        return np.concatenate(begun), np.concatenate(ended)

    def _believe_users(self) -> None:
        """Note the ends of what others used: compute has begun with it, or the receive of a message has ended.

        A rank that was stopped or killed had no time to note them.
        """
        graph, compute = self._schedule.graph, self._is_compute
        for node in np.flatnonzero(self._begun & compute | self._ended):
            self._ended[graph.needed(int(node))] = True

    @cached_property
    def _is_compute(self) -> npt.NDArray[np.bool_]:
        lanes = [lane_of(action, self._schedule.placement) for _, _, action in self._schedule.actions()]
        return np.array([lane == COMPUTE_LANE for lane in lanes], np.bool_)

    def posted(self) -> list[int]:
        """Slots of actions that have begun and not ended."""
        own = slice(self._first, self._first + len(self.actions))
        return np.flatnonzero(self._begun[own] & ~self._ended[own]).tolist()

    def begin_ns(self, slot: int) -> int:
        """When an action began."""
        return int(self._own[slot])

    def ends(self, slot: int) -> tuple[int, ...]:
        """The processes at both ends of a message, of which the reason may be either; empty for others."""
        node = self._first + slot
        other = self._other_end(node)
        if other is None:
            return ()
        rank, _ = self._schedule.facts.place(other)
        return tuple(sorted({self._rank.rank, self._process_of.get(rank, self._rank.rank)}))

    def host_waits_for(self, slot: int) -> str | None:
        """What the host waits for before it issues an action, or behind the row; ``None`` for nothing."""
        if slot >= len(self.actions):
            left = self.posted()
            return self._words(self._first + left[0]) if left else None
        # Work of one lane is issued without a wait, and so is a receive whose send is not posted.
        for needed in self._schedule.graph.needed(self._first + slot):
            rank, other = self._schedule.facts.place(needed)
            if rank == self._rank.place.pipeline and self.lanes[other] != self.lanes[slot] and not self._ended[needed]:
                return self._words(needed)
        return None

    def missing(self, slot: int) -> str | None:
        """What an action that has begun waits for, in words; ``None`` if it has all that it needs."""
        graph, node = self._schedule.graph, self._first + slot
        other = self._other_end(node)
        for needed in graph.needed(node):
            # Of a message both ends are under way at the same time.
            if not (self._begun if needed == other else self._ended)[needed]:
                return self._words(needed)
        if other is not None and not self._begun[other]:
            return self._words(other)
        return None

    def _other_end(self, node: int) -> int | None:
        """The send of a receive and the reverse: needs on other ranks are these alone."""
        rank, _ = self._schedule.facts.place(node)
        for needed in self._schedule.graph.needed(node):
            if self._schedule.facts.place(needed)[0] != rank:
                return needed
        begin, followers = self._schedule.graph.followers
        for follower in followers[begin[node] : begin[node + 1]].tolist():
            if self._schedule.facts.place(follower)[0] != rank:
                return int(follower)
        return None

    def _words(self, node: int) -> str:
        rank, _ = self._schedule.facts.place(node)
        process = self._process_of.get(rank)
        return f"{self._schedule.facts.action(node)} of rank {rank if process is None else process}"


def _these(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
