"""Starts the processes of a run on this host and watches over them."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipeloom.errors import PeerLostError, PipeloomError, StallError, UserError, WorkerError
from pipeloom.temporary import temporary_folder

Work = Callable[[Path, int, int], Any]
"""(file for the rendezvous, rank, number of ranks) -> result, picklable."""

_GRACE_S = 2.0
"""After the first failure, how long the other workers may take to say what they saw."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """Why a worker ended.

    Attributes:
        rank: the worker.
        message: for people.
        is_user_error: the input was wrong, not the run.
        is_consequence: only saw that another worker went away.
        is_stall: waited too long, perhaps for a worker that failed.
        traceback: of the worker, where the error is not one of ours.
    """

    rank: int
    message: str
    is_user_error: bool = False
    is_consequence: bool = False
    traceback: str = ""
    is_stall: bool = False


def run_workers(work: Work, num_ranks: int, threads: int = 1) -> list[Any]:
    """Run ``work`` in ``num_ranks`` processes of this host and return their results by rank.

    Workers are forked where that is possible, since they then need not import anything again. The first
    failure ends them all; so does an interrupt, and on Linux the end of this process, however it comes.

    Args:
        work: what each process does.
        num_ranks: how many.
        threads: CPU threads of each.

    Raises:
        UserError: a worker found the input wrong.
        WorkerError: a worker failed or was killed.
    """
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    with temporary_folder() as folder:
        workers: list[tuple[BaseProcess, Connection]] = []
        with _terminated_like_interrupted():
            try:
                for rank in range(num_ranks):
                    reader, writer = context.Pipe(duplex=False)
                    place = {"rendezvous": folder / "rendezvous", "rank": rank, "num_ranks": num_ranks}
                    process = context.Process(target=_worker, args=(work, threads, writer), kwargs=place, daemon=True)
                    process.start()
                    writer.close()
                    workers.append((process, reader))
                return _supervise(workers)
            finally:
                _stop([process for process, _ in workers])


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let a SIGTERM, which cluster schedulers send, end a run in the same orderly way as an interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _worker(work: Work, threads: int, writer: Connection, *, rendezvous: Path, rank: int, num_ranks: int) -> None:
    """What a worker process runs: sends its result, or why there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(threads)
    status = 0
    try:
        writer.send(work(rendezvous, rank, num_ranks))
    except BaseException as error:  # whatever it is, the parent has to hear of it
        writer.send(describe(rank, error))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads may hang in communication with ranks that are gone


def describe(rank: int, error: BaseException) -> Failure:
    """An exception of a worker as a failure that can be sent and shown."""
    root = error.__cause__ if isinstance(error, PipeloomError) and error.__cause__ is not None else error
    trace = "" if isinstance(root, PipeloomError) else "".join(traceback.format_exception(error))
    is_ours = isinstance(error, PipeloomError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    is_user_error, is_consequence = isinstance(error, UserError), isinstance(error, PeerLostError)
    return Failure(rank, message, is_user_error, is_consequence, trace, isinstance(error, StallError))


def _supervise(workers: Sequence[tuple[BaseProcess, Connection]]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    open_ranks = set(range(len(workers)))
    deadline: float | None = None
    while open_ranks and (deadline is None or time.monotonic() < deadline):
        ready = wait([workers[rank][1] for rank in open_ranks], timeout=0.2)
        for rank in [rank for rank in open_ranks if workers[rank][1] in ready]:
            open_ranks.remove(rank)
            answer = _answer(rank, *workers[rank])
            if isinstance(answer, Failure):
                failures.append(answer)
                deadline = deadline or time.monotonic() + _GRACE_S
            else:
                results[rank] = answer
    if failures:
        raise _error(failures)
    return [results[rank] for rank in range(len(workers))]


def _answer(rank: int, process: BaseProcess, reader: Connection) -> Any:
    try:
        return reader.recv()
    except (EOFError, OSError):  # it ended without a word, or in the middle of one
        process.join()
        code = process.exitcode or 0
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
        )
        return Failure(rank, f"rank {rank} {how}")


def _error(failures: Sequence[Failure]) -> PipeloomError:
    """The error to show: the first failure that is not merely a consequence of another one, nor a wait for it."""
    cause = min(failures, key=lambda failure: (failure.is_consequence, failure.is_stall))
    if cause.is_user_error:
        return UserError(cause.message)
    others = len({failure.rank for failure in failures} - {cause.rank})
    error = WorkerError(cause.message)
    if cause.traceback:
        error.add_note(cause.traceback)
    if others:
        error.add_note(f"({others} other worker{'s' if others > 1 else ''} ended because of it)")
    return error


def _stop(processes: Sequence[BaseProcess]) -> None:
    """End all workers that still run: politely, then by force."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + 1.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
