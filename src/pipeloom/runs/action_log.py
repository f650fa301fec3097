"""What each rank did last, in a file of the run folder that its process writes through memory.

    RUN/actions/
        rank-00003              of a rank: for each action of a row when it last began and ended, and what else it does
        training.txt, ...       the schedules whose rows these are

A table in place of a list of events: whatever the length of a row, the state of each of its actions is there. Writing
is a store to mapped memory, so the file is right when the process is stopped or killed, and on a GPU, where the host
writes it. On a full disk, the rank writes to memory that no other process sees. Times are those of the host's
monotonic clock.

A file begins with its description as JSON; at ``_TEXT`` is a text, at ``_CELLS`` are numbers of 64 bits: the state of
the process, then four for each activity; behind them the tables of rows, each ``[actions, 2]``, at multiples of 4096.
"""

import json
import mmap
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.errors import UserError, reason_of
from pipeloom.schedule import Schedule, format_schedule
from pipeloom.system.files import parse_json
from pipeloom.system.processes import is_stopped, lives, start_of
from pipeloom.system.room import take_room
from pipeloom.workload.layout import Coordinates

_FORMAT = 1
_TEXT, _TEXT_BYTES = 1 << 16, 1 << 13
_CELLS = _TEXT + _TEXT_BYTES
_PAGE = 4096
_TABLES = _CELLS + _PAGE
_BEAT, _END, _FAILED, _STEP, _FIRST = 0, 1, 2, 3, 8
"""Cells: the last sign of life, the end, whether it was an error, the step, the first activity."""
_ERROR, _INTERRUPTED = 1, 2
"""How a rank failed: an error, or a signal or a limit of time that ended the run in order."""
GONE, ENDED = "is gone", "was ended by its run"
"""States of a process: it was killed, by whomever, or by its run after another one had failed."""
_MOST_ACTIVITIES = 100
_MOST_ACTIONS = 1 << 24
_ZEROS = np.zeros((0, 2), np.int64)

_now = time.monotonic_ns


class Activity:
    """Something that a rank does again and again, such as an exchange with other ranks. Writing takes no lock.

    Args:
        cells: four numbers: how often it has begun, when last, how often it has ended, when last.
    """

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def begin(self) -> None:
        """It begins."""
        cells = self._cells
        cells[1] = _now()
        cells[0] += 1

    def end(self) -> None:
        """The oldest that has begun has ended."""
        cells = self._cells
        cells[3] = _now()
        cells[2] += 1

    def __enter__(self) -> None:
        """``begin``."""
        self.begin()

    def __exit__(self, *_: object) -> None:
        """``end``."""
        self.end()


class _Nothing(Activity):
    """An activity that nobody records."""

    def begin(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


NOTHING = _Nothing(memoryview(bytes(32)).cast("q"))


class RowLog:
    """The actions of one row. The executor writes the cells itself, since a call for each would cost more than it does.

    Args:
        run: the activity: from the begin of the row to its end.
        cells: two for each action: when it last began, negative while the host issues it, and when it last ended.
    """

    def __init__(self, run: Activity, cells: memoryview) -> None:
        self.run, self.cells = run, cells


class ActionLog:
    """Writes the file of a rank.

    Args:
        folder: of the files; it exists.
        rank, size: of the process, and the number of processes.
        place: coordinates of the rank.

    Attributes:
        problem: why there is no file; empty if there is one.

    Raises:
        OSError: the folder cannot be opened.
    """

    def __init__(self, folder: Path, rank: int, size: int, place: Coordinates) -> None:
        self._rank = rank
        self.problem = ""
        # The run's folder takes its place under another name when the first step has ended.
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file: int | None = None
        self._head: dict[str, Any] = {
            "format": _FORMAT,
            "rank": rank,
            "size": size,
            "place": [place.pipeline, place.data, place.tensor],
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": start_of(os.getpid()),
            "begun_ns": _now(),
            "activities": [],
            "rows": [],
        }
        self._size = 0
        self._runs: dict[str, Activity] = {}
        try:
            self._file = self._open(_name_of(rank), os.O_RDWR)
        except OSError as error:
            self._give_up(error)
        self._memory = self._map(_TABLES)
        self._cells = memoryview(self._memory)[_CELLS:].cast("q")
        self.beat()
        self._write_head()

    def activity(self, name: str, ranks: Sequence[int] | None = None, lane: str = "") -> Activity:
        """Add an activity.

        Args:
            name: what the rank does, for messages; with an equal name on all of ``ranks``.
            ranks: that do it together, so that none can end it before all have begun it; ``None`` for this one alone.
            lane: the lane of the rank on which it runs; empty for its own thread.
        """
        number = len(self._head["activities"])
        assert number < _MOST_ACTIVITIES
        self._head["activities"].append({"name": name, "ranks": None if ranks is None else list(ranks), "lane": lane})
        self._write_head()
        first = _FIRST + 4 * number
        return Activity(self._cells[first : first + 4])

    def row(self, name: str, schedule: Schedule, rank: int) -> RowLog:
        """Add the actions of a pipeline rank's row.

        Args:
            name: of the schedule; rank 0 writes ``NAME.txt``.
            schedule: its rows are known to all ranks.
            rank: the pipeline rank.
        """
        if name not in self._runs:
            self._runs[name] = self.activity(name)
        run, count = self._runs[name], len(schedule.rows[rank])
        # In place of an earlier schedule with this name, whose cells stay where they are.
        self._head["rows"] = [one for one in self._head["rows"] if one["name"] != name]
        self._head["rows"].append({"name": name, "offset": self._size, "count": count})
        memory = self._map(-(-16 * max(count, 1) // _PAGE) * _PAGE)
        self._write_head()
        if self._rank == 0:
            self._write_schedule(f"{name}.txt", schedule)
        return RowLog(run, memoryview(memory).cast("q"))

    def begin_step(self, step: int) -> None:
        """Note the number of the step."""
        self._cells[_STEP] = step

    def beat(self) -> None:
        """Note that the process runs."""
        self._cells[_BEAT] = _now()

    def note(self, text: str) -> None:
        """Replace the text, such as where the threads of a rank are that hangs; behind the end it stays."""
        if not self._cells[_END]:  # a thread may still beat
            self._write_text(text)

    def _write_text(self, text: str) -> None:
        content = text.encode(errors="replace")[: _TEXT_BYTES - 1] + b"\0"
        self._memory[_TEXT : _TEXT + len(content)] = content

    def end(self, text: str = "", *, is_interrupted: bool = False) -> None:
        """Note that the rank has ended in order, or the error with which it ended, which may be an interruption."""
        self._write_text(text)
        self._cells[_FAILED] = _INTERRUPTED if is_interrupted else _ERROR if text else 0
        self.beat()
        self._cells[_END] = _now()

    def _open(self, name: str, access: int) -> int:
        return os.open(name, access | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666, dir_fd=self._folder)

    def _map(self, size: int) -> mmap.mmap:
        """Map further bytes of the file, or memory of this process alone."""
        begin = self._size
        self._size += size
        if self._file is not None:
            try:
                take_room(self._file, size, begin)
                return mmap.mmap(self._file, size, offset=begin)
            except OSError as error:
                self._give_up(error)
        return mmap.mmap(-1, size)

    def _write_schedule(self, name: str, schedule: Schedule) -> None:
        try:
            with os.fdopen(self._open(name, os.O_WRONLY), "w", encoding="utf-8") as text:
                text.write(format_schedule(schedule))
        except OSError as error:
            # A part of a schedule is none that can be read.
            self._remove(name)
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Remove the file: what it lacks would read as what the rank has not done. A run must not end because of it."""
        self.problem = self.problem or reason_of(error)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._remove(_name_of(self._rank))

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def _write_head(self) -> None:
        text = json.dumps(self._head).encode()
        assert len(text) < _TEXT, "too many activities for the head of the file"
        self._memory[: len(text) + 1] = text + b"\0"


@dataclass(frozen=True)
class LoggedActivity:
    """An activity as a file has it; see ``ActionLog.activity``.

    Attributes:
        name, ranks, lane: of the activity.
        begun, ended: how often it has begun and ended.
        begin_ns, end_ns: when last.
    """

    name: str
    ranks: tuple[int, ...] | None
    lane: str
    begun: int
    begin_ns: int
    ended: int
    end_ns: int

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        return self.begun > self.ended


@dataclass(frozen=True)
class LoggedRank:
    """The file of a rank.

    Attributes:
        rank, size: of the process, and the number of processes.
        place: coordinates of the rank.
        pid: its process ID.
        host: its host.
        process: ``runs``, ``is stopped``, ``GONE``, ``ENDED``, or ``is on another host``.
        step: that it does; 0 before the first.
        begun_ns: when the file was begun.
        beat_ns: last sign of life.
        has_ended: whether the rank noted its end.
        has_failed: whether that was an error, whose text is ``text``.
        is_interrupted: whether that error is a signal, or a limit of time, which ended the run in order.
        text: what it noted last; empty for nothing.
        activities: all that it has.
        rows: name of a schedule -> [actions, 2] when each action of the rank's row last began, negative while the host
            issues it, and ended.
    """

    rank: int
    size: int
    place: Coordinates
    pid: int
    host: str
    process: str
    step: int
    begun_ns: int
    beat_ns: int
    has_ended: bool
    has_failed: bool
    is_interrupted: bool
    text: str
    activities: tuple[LoggedActivity, ...]
    rows: dict[str, npt.NDArray[np.int64]] = field(repr=False)

    @property
    def last_ns(self) -> int:
        """When the rank last began or ended anything; before that, when its file was begun."""
        marks = [self.begun_ns, *(max(one.begin_ns, one.end_ns) for one in self.activities)]
        return max([*marks, *(int(np.abs(row).max(initial=0)) for row in self.rows.values())])


def read_ranks(folder: Path) -> list[LoggedRank]:
    """The files of all ranks, by rank.

    Raises:
        UserError: a file cannot be read or is none of a rank.
    """
    found: list[LoggedRank] = []
    for file in sorted(folder.glob("rank-*")):
        try:
            found.append(_read(file.read_bytes()))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}") from None
        except (UserError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{file} is no file of a rank's actions: {error}") from None
    return found


def _read(content: bytes) -> LoggedRank:
    head = parse_json(content[:_TEXT].split(b"\0", 1)[0].decode())
    if head["format"] != _FORMAT:
        raise UserError(f"expected format {_FORMAT}, found {head['format']!r}")
    if len(content) < _TABLES:
        raise UserError(f"expected at least {_TABLES} bytes, found {len(content)}")
    cells = np.frombuffer(content, np.int64, _PAGE // 8, _CELLS).tolist()
    activities = [
        LoggedActivity(
            str(one["name"]),
            None if one["ranks"] is None else tuple(map(int, one["ranks"])),
            str(one["lane"]),
            *cells[_FIRST + 4 * number : _FIRST + 4 * number + 4],
        )
        for number, one in enumerate(head["activities"][:_MOST_ACTIVITIES])
    ]
    pid, host, started = int(head["pid"]), str(head["host"]), str(head["started"])
    return LoggedRank(
        rank=int(head["rank"]),
        size=int(head["size"]),
        place=Coordinates(*map(int, head["place"])),
        pid=pid,
        host=host,
        process=_process(pid, host, started),
        step=cells[_STEP],
        begun_ns=int(head.get("begun_ns", cells[_BEAT])),  # files of earlier versions lack it
        beat_ns=cells[_BEAT],
        has_ended=cells[_END] > 0,
        has_failed=cells[_FAILED] > 0,
        is_interrupted=cells[_FAILED] == _INTERRUPTED,
        text=content[_TEXT:_CELLS].split(b"\0", 1)[0].decode(errors="replace"),
        activities=tuple(activities),
        rows={str(one["name"]): _table(content, int(one["offset"]), int(one["count"])) for one in head["rows"]},
    )


def _table(content: bytes, offset: int, count: int) -> npt.NDArray[np.int64]:
    if not (0 <= count <= _MOST_ACTIONS and _TABLES <= offset <= len(content) - 16 * count):
        raise UserError(f"{count} actions at {offset} are not within its {len(content)} bytes")
    return np.frombuffer(content, np.int64, 2 * count, offset).reshape(-1, 2) if count else _ZEROS


def _process(pid: int, host: str, started: str) -> str:
    if host != socket.gethostname():
        return "is on another host"
    if not 0 < pid < 1 << 31 or not lives(pid, started):
        return GONE
    return "is stopped" if is_stopped(pid) else "runs"


def _name_of(rank: int) -> str:
    return f"rank-{rank:05}"
