"""The signals that end a run, and a context in which they raise an error."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from pipeloom.errors import Interrupted

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C; the signal of schedulers and launchers; the end of a terminal; Slurm's warning before the time limit."""


def not_ignored() -> list[signal.Signals]:
    """The signals of ``STOPS`` that this process does not ignore (under nohup it ignores some)."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


def ignore_stops() -> None:
    """Ignore the signals of ``STOPS`` for the rest of the process, which ends."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def raised_signals() -> Iterator[None]:
    """Context in which each signal of ``STOPS`` raises ``Interrupted`` in the main thread."""

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    with handled(interrupt):
        yield


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Context with a handler of these signals; no-op outside the main thread, where Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in not_ignored()}
    try:
        for number in before:
            signal.siginterrupt(number, False)  # a system call that libraries have begun continues
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
