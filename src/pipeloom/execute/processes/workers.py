"""Starts the processes of a run on this host and monitors them."""

import ctypes
import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from pipeloom.errors import (
    TRACEBACK,
    Interrupted,
    PeerLostError,
    PipeloomError,
    StallError,
    UserError,
    WorkerError,
    WrongRankError,
)
from pipeloom.execute.processes.signals import PassedOn
from pipeloom.system.end_signals import STOPS
from pipeloom.system.processes import is_stopped
from pipeloom.system.temporary import temporary_folder

Work = Callable[[Path, int, int], Any]
"""(file for the rendezvous, rank, number of ranks) -> result, picklable."""

_Error = TypeVar("_Error", bound=PipeloomError)
_GRACE_S = 2.0
"""Seconds after the first failure in which other workers may report theirs."""
_LOOK_S = 0.2
"""Interval in which the workers are looked after."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """Why a worker ended.

    Attributes:
        rank: the worker, or the one that its error names.
        message: for the user.
        is_user_error: the input was wrong, not the run.
        is_consequence: the worker only lost its connection to another one.
        is_stall: waited too long, perhaps for a worker that failed.
        traceback: of the worker, for errors other than ``PipeloomError``, and for all if ``TRACEBACK`` is set.
        number: of the signal that the worker handled.
        reason: whether the message is the reason, in place of a signal's name.
        was_killed: a signal killed the process.
        is_wrong: the error names the rank that stores or computes wrong values.
        notes: lines that belong to the message.
    """

    rank: int
    message: str
    is_user_error: bool = False
    is_consequence: bool = False
    traceback: str = ""
    is_stall: bool = False
    number: int | None = None
    reason: bool = False
    was_killed: bool = False
    is_wrong: bool = False
    notes: tuple[str, ...] = ()


def are_forked() -> bool:
    """Whether workers are copies of the process that starts them, and so have what it has loaded."""
    return sys.platform == "linux"  # macOS offers fork, but its system libraries are not safe after one


def run_workers(
    work: Work, num_ranks: int, threads: int = 1, *, grace_s: float = 0.0, stopped_s: float = math.inf
) -> list[Any]:
    """Run ``work`` in ``num_ranks`` processes of this host and return their results by rank.

    Workers are forked where that is possible, since they then need no imports. The first failure ends them all; so does
    a signal of ``STOPS``, and on Linux any end of this process.

    Args:
        work: what each process does.
        num_ranks: number of processes.
        threads: CPU threads of each.
        grace_s: seconds for an orderly end of the workers after such a signal; 0: none.
        stopped_s: a worker that SIGSTOP has stopped for so long is killed. The others may wait for it without a limit
            that a run could be set to, such as while they write a checkpoint.

    Raises:
        UserError: a worker found the input wrong.
        WorkerError: a worker failed or was killed.
        Interrupted: a signal ended the workers.
    """
    context = multiprocessing.get_context("fork") if are_forked() else multiprocessing.get_context("spawn")
    with temporary_folder() as folder:
        workers: list[tuple[BaseProcess, Connection]] = []
        passed_on = PassedOn(grace_s)
        with passed_on.handled():
            try:
                for rank in range(num_ranks):
                    reader, writer = context.Pipe(duplex=False)
                    place = {"rendezvous": folder / "rendezvous", "rank": rank, "num_ranks": num_ranks}
                    process = context.Process(target=_worker, args=(work, threads, writer), kwargs=place, daemon=True)
                    process.start()
                    # While the parent's copy is open, the reader does not see the end of the worker.
                    writer.close()
                    workers.append((process, reader))
                return _supervise(workers, passed_on, _Stopped([one for one, _ in workers], stopped_s))
            except WorkerError as error:
                error.ended = _stop([process for process, _ in workers])
                raise
            finally:
                _stop([process for process, _ in workers])


def _worker(work: Work, threads: int, writer: Connection, *, rendezvous: Path, rank: int, num_ranks: int) -> None:
    """The main function of a worker process: sends its result or its failure."""
    # A collection writes to every object that it looks at, and a forked process would get its own copy of each.
    gc.freeze()
    for number in STOPS:  # a terminal sends them to all of its processes; the parent passes them on as SIGTERM
        signal.signal(number, signal.SIG_DFL if number is signal.SIGTERM else signal.SIG_IGN)
    if sys.platform == "linux":
        # prctl(2): the kernel kills this process when its parent ends, also by a SIGKILL that the parent cannot handle.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Without this setting the library warns of threads that a fork does not copy.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Warnings of PyTorch's C++ code, from every worker, would hide the one message that matters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(threads)
    status = 0
    try:
        writer.send(work(rendezvous, rank, num_ranks))
    except BaseException as error:  # whatever it is, the parent reports it
        writer.send(describe(rank, error))
        status = 1
    # os._exit flushes nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads may hang in communication with ranks that are gone


def describe(rank: int, error: BaseException) -> Failure:
    """An exception of a worker as a failure that can be pickled."""
    root = error.__cause__ if isinstance(error, PipeloomError) and error.__cause__ is not None else error
    is_ours, is_shown = isinstance(error, PipeloomError), bool(os.environ.get(TRACEBACK))
    is_expected = isinstance(root, PipeloomError) or isinstance(error, UserError)
    trace = "" if is_expected and not is_shown else "".join(traceback.format_exception(error))
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    is_user_error, is_consequence = isinstance(error, UserError), isinstance(error, PeerLostError)
    if isinstance(error, Interrupted):
        return Failure(rank, str(error), number=error.number, reason=str(error) != str(Interrupted(error.number)))
    if isinstance(error, WrongRankError):
        return Failure(error.rank, message, is_wrong=True)
    notes = () if trace else tuple(getattr(error, "__notes__", ()))  # a traceback contains them
    return Failure(rank, message, is_user_error, is_consequence, trace, isinstance(error, StallError), notes=notes)


class _Stopped:
    """Kills workers that have been stopped for too long.

    Args:
        processes: by rank.
        most_s: how long they may be.
    """

    def __init__(self, processes: Sequence[BaseProcess], most_s: float) -> None:
        self._processes, self._most_s = processes, most_s
        self._seen = [0] * len(processes)
        self._killed: set[int] = set()

    def check(self) -> None:
        """Look after them; called every ``_LOOK_S``."""
        for rank, process in enumerate(self._processes if self._most_s < math.inf else ()):
            is_one = process.pid is not None and is_stopped(process.pid, by_debugger=False)
            # Counted, not timed: if all processes were stopped together, such as by Ctrl-Z, this one was, too.
            self._seen[rank] = self._seen[rank] + 1 if is_one else 0
            if self._seen[rank] * _LOOK_S > self._most_s:
                self._killed.add(rank)
                process.kill()

    def explain(self, rank: int, failure: Failure) -> Failure:
        """The failure of a worker, which this may have killed."""
        if rank not in self._killed:
            return failure
        return replace(failure, message=f"rank {rank} was stopped (SIGSTOP) for {self._most_s:g} s, and was killed")


def _supervise(workers: Sequence[tuple[BaseProcess, Connection]], passed_on: PassedOn, stopped: _Stopped) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    open_ranks = set(range(len(workers)))
    deadline: float | None = None
    while open_ranks and (deadline is None or time.monotonic() < deadline):
        # Not longer: the loop forwards signals that were recorded in between.
        ready = wait([workers[rank][1] for rank in open_ranks], timeout=_LOOK_S)
        passed_on.check([process for process, _ in workers])
        stopped.check()
        for rank in [rank for rank in open_ranks if workers[rank][1] in ready]:
            open_ranks.remove(rank)
            answer = _answer(rank, *workers[rank])
            if isinstance(answer, Failure):
                failures.append(stopped.explain(rank, answer))
                deadline = deadline or time.monotonic() + _GRACE_S
            else:
                results[rank] = answer
    if failures:
        raise _error(failures, passed_on.number)
    if passed_on.number is not None:
        raise Interrupted(passed_on.number)
    return [results[rank] for rank in range(len(workers))]


def _answer(rank: int, process: BaseProcess, reader: Connection) -> Any:
    try:
        return reader.recv()
    except (EOFError, OSError):  # it ended without a message, or within one
        process.join()
        code = process.exitcode or 0
        if code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            return Failure(rank, f"rank {rank} {how}", was_killed=True)
        # As StopSignals ends a rank at once.
        number = next((number for number in STOPS if code == Interrupted(number).status), None)
        return Failure(rank, f"rank {rank} ended with status {code}", number=number)


def _error(failures: Sequence[Failure], passed_on: int | None) -> PipeloomError | Interrupted:
    """The error to raise: the first failure that is neither a consequence of another one nor a stall.

    Args:
        failures: of ranks, at least one.
        passed_on: the signal that this process has forwarded to them.
    """
    cause = min(failures, key=lambda failure: (failure.number is None, failure.is_consequence, failure.is_stall))
    number = cause.number if passed_on is None else passed_on
    if number is not None:
        interrupted = Interrupted(number, cause.message if cause.reason and passed_on is None else "")
        if cause.number is None and not cause.is_consequence and not cause.was_killed:
            interrupted.add_note(cause.message)
        return interrupted
    if cause.is_user_error:
        return _noted(UserError(cause.message), [cause.traceback] if cause.traceback else cause.notes)
    others = len({failure.rank for failure in failures} - {cause.rank})
    error = _noted(WorkerError(cause.message), cause.notes)
    error.rank, error.was_killed, error.is_wrong = cause.rank, cause.was_killed, cause.is_wrong
    error.is_reason = not cause.is_consequence and not cause.is_stall
    if cause.traceback:
        error.add_note(cause.traceback)
    if others:
        error.add_note(f"({others} other worker{'s' if others > 1 else ''} ended because of it)")
    return error


def _noted(error: _Error, notes: Sequence[str]) -> _Error:
    for note in notes:
        error.add_note(note)
    return error


def _stop(processes: Sequence[BaseProcess]) -> tuple[int, ...]:
    """Kill all workers that still run, since they may be waiting for each other; returns which."""
    running = tuple(rank for rank, process in enumerate(processes) if process.is_alive())
    for rank in running:
        processes[rank].kill()
    for process in processes:
        process.join()
    return running
