"""Starts the processes of a program, watches its steps from outside, and reads their memory."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from peers.case import Program, Row, Size
from peers.start import RUN, START
from pipeloom.runs.run_folder import METRICS
from side_by_side.hosts import INTERFACE, enter, shaped_hosts, why_not
from user_environment import user_environment

_LIMIT_S = 240.0
"""Longest wait for the steps of a turn."""
_GLANCE_S = 0.01
_KIB = 1024


@dataclass(frozen=True)
class Steps:
    """Steps of a program.

    Attributes:
        losses: of all.
        seconds: of those that count.
    """

    losses: list[float]
    seconds: list[float]


@dataclass(frozen=True)
class Alone:
    """What came of a program that ran by itself.

    Attributes:
        start_s: from the command to the end of the first step.
        memory_bytes: proportional set size of all processes, the largest seen during the last step.
        steps: what the program wrote for each step.
    """

    start_s: float
    memory_bytes: int
    steps: Steps


def why_skipped(row: Row, program: Program) -> str | None:
    """Why a program cannot run here, for people; ``None`` if it can."""
    if program.needs is not None and find_spec(program.needs) is None:
        return f"the package {program.needs} is missing (pip install '{program.needs}')"
    return why_not() if row.link is not None else None


def run_alone(row: Row, program: Program, size: Size, start: Path, num_steps: int) -> Alone:
    """Run some steps of a program with nothing beside it, and end it.

    Args:
        row: the layout.
        program: what trains.
        size: of the model.
        start: folder that ``write_start`` wrote to.
        num_steps: of which those behind the warm-up count, but for the last one, in which memory is read.

    Raises:
        RuntimeError: it ended early, or took too long; with what it printed.
    """
    with _hosts(row) as hosts, _started(row, program, size, start, hosts) as running:
        running.until(1)
        start_s = time.monotonic() - running.begin_s
        running.until(num_steps - 1)
        memory = [0]
        running.until(num_steps, lambda: memory.append(running.memory_bytes()))
        return Alone(start_s, max(memory), running.steps(range(size.warmup, num_steps - 1)))


def run_in_turns(
    row: Row, programs: Sequence[Program], size: Size, start: Path
) -> tuple[dict[Program, Steps], list[RuntimeError]]:
    """Run all programs at the same time, in turns of a few steps: one of them computes, and all others are paused.

    Background load that changes within seconds or minutes then affects all of them alike.

    Args:
        row: the layout.
        programs: what trains.
        size: of the model, and of the turns.
        start: folder that ``write_start`` wrote to.

    Returns:
        The steps of each program, and the errors of those that ended early or took too long.
    """
    failed: list[RuntimeError] = []
    under_way: dict[_Running, list[int]] = {}

    def take_turn(running: _Running, skipped: int, counted: int) -> None:
        try:
            under_way[running] += running.turn(skipped, counted)
        except RuntimeError as error:
            failed.append(error)
            running.end()  # ranks that are left would compute beside the other programs
            del under_way[running]

    with _hosts(row) as hosts, ExitStack() as stack:
        for program in programs:
            running = stack.enter_context(_started(row, program, size, start, hosts))
            under_way[running] = []
            take_turn(running, size.warmup, 0)
        for turn in range(size.turns):
            for running in _rotated(list(under_way), turn):
                take_turn(running, 1, size.timed)
        return {running.program: running.steps(counted) for running, counted in under_way.items()}, failed


def _rotated(running: "list[_Running]", by: int) -> "list[_Running]":
    """Each turn begins with another program."""
    by %= max(1, len(running))
    return running[by:] + running[:by]


def _hosts(row: Row) -> AbstractContextManager[list[str] | None]:
    """The hosts of a row's ranks; ``None`` for this one."""
    return nullcontext() if row.link is None else shaped_hosts(row.num_ranks, row.link)


@contextmanager
def _started(row: Row, program: Program, size: Size, start: Path, hosts: Sequence[str] | None) -> "Iterator[_Running]":
    """A program that has been started, and is ended with the context."""
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
        running = _Running(row, program, Path(folder))
        try:
            running.start(*_words(row, program, size, start, Path(folder)), hosts)
            yield running
        finally:
            running.end()


class _Running:
    """The processes of a program.

    Attributes:
        program: what trains.
        begin_s: when they were started.
        num_steps: lines of steps so far.
    """

    def __init__(self, row: Row, program: Program, folder: Path) -> None:
        self.program, self.begin_s, self.num_steps = program, 0.0, 0
        self._row, self._printed = row, folder / "printed.txt"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str], lines: Path, hosts: Sequence[str] | None) -> None:
        """Start all processes.

        Args:
            words: the command.
            lines: file that gets a line for each step.
            hosts: of the ranks; ``None`` for this one.
        """
        row, self._lines = self._row, lines
        port, self.begin_s = _free_port(), time.monotonic()
        # pipeloom starts the ranks of one host itself.
        forks = self.program.kind == "pipeloom" and hosts is None
        with self._printed.open("wb") as printed:
            for rank in range(1 if forks else row.num_ranks):
                given = _environment(row.threads) | ({} if forks else _place(rank, row.num_ranks, hosts, port))
                inside = None if hosts is None else partial(enter, hosts[rank])
                self._processes.append(
                    subprocess.Popen(  # one thread runs here, so the function before the command is safe
                        words,
                        env=given,
                        stdout=printed,
                        stderr=printed,
                        start_new_session=True,
                        preexec_fn=inside,  # noqa: PLW1509
                    )
                )

    def end(self) -> None:
        """End the processes."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def turn(self, skipped: int, counted: int) -> list[int]:
        """Let it run for some steps and pause it within the next one; returns the numbers of those that count.

        Raises:
            RuntimeError: it ended early, or took too long; with what it printed.
        """
        self.check()  # a step may have ended before the program was paused
        self._signal(signal.SIGCONT)
        first = self.num_steps + skipped
        self.until(first + counted)
        self._signal(signal.SIGSTOP)
        return list(range(first, first + counted))

    def until(self, num_steps: int, look: Callable[[], None] = lambda: None) -> None:
        """Wait until so many steps are done, and call ``look`` meanwhile; errors as of ``turn``."""
        limit_s = time.monotonic() + _LIMIT_S
        while self.num_steps < num_steps:
            look()
            self.check()
            if time.monotonic() > limit_s:
                raise self._failed(f"no step {num_steps} after {_LIMIT_S:g} s")
            time.sleep(_GLANCE_S)

    def check(self) -> None:
        """Count the steps.

        Raises:
            RuntimeError: a process ended early.
        """
        self.num_steps = self._lines.read_bytes().count(b"\n") if self._lines.exists() else 0
        if any(process.poll() for process in self._processes):
            raise self._failed("a process ended early")

    def memory_bytes(self) -> int:
        """Proportional set size of all of its processes."""
        return sum(_pss_bytes(pid) for pid in _descendants({one.pid for one in self._processes}))

    def steps(self, counted: Sequence[int]) -> Steps:
        """Those so far."""
        lines = [json.loads(line) for line in self._lines.read_bytes().splitlines()[: self.num_steps]]
        return Steps([line["loss"] for line in lines], [lines[number]["step_time_s"] for number in counted])

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _failed(self, why: str) -> RuntimeError:
        output = self._printed.read_text(encoding="utf-8", errors="replace")
        return RuntimeError(f"{self._row.name}, {self.program.name}: {why}\n{output[-3000:]}")


def _words(row: Row, program: Program, size: Size, start: Path, folder: Path) -> tuple[list[str], Path]:
    """The command, and the file that gets a line for each step."""
    if program.kind == "pipeloom":
        run = folder / "run"
        words = [sys.executable, "-m", "pipeloom", "train", str(start / RUN), *row.words(program, size)]
        return [*words, "--output.folder", str(run)], run / METRICS
    lines = folder / METRICS
    words = [sys.executable, "-m", "peers.programs", program.kind, str(start / START), str(lines)]
    words += ["--threads", str(row.threads), "--pp", str(row.pp), "--loops", str(program.loops)]
    return words + (["--schedule", program.schedule] if program.schedule else []), lines


def _environment(threads: int) -> dict[str, str]:
    here = str(Path(__file__).parent.parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**user_environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _place(rank: int, size: int, hosts: Sequence[str] | None, port: int) -> dict[str, str]:
    """torchrun's variables."""
    where = {"MASTER_ADDR": "127.0.0.1"} if hosts is None else {"MASTER_ADDR": "10.78.0.1"}
    if hosts is not None:
        where["GLOO_SOCKET_IFNAME"] = INTERFACE
    each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if hosts is not None else {"LOCAL_RANK": str(rank)}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port), **where, **each}


def _descendants(pids: set[int]) -> set[int]:
    """Processes and those that they started."""
    found, new = set(pids), set(pids)
    while new:
        children: set[int] = set()
        for pid in new:
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    children |= set(map(int, (task / "children").read_text().split()))
        new = children - found
        found |= new
    return found


def _pss_bytes(pid: int) -> int:
    """Memory of a process; what several share is divided among them."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * _KIB
    return 0
