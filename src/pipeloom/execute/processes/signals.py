"""Signals that end a run: how ranks handle them, and how the process that started the ranks forwards them."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NoReturn, Self

from pipeloom.errors import Interrupted
from pipeloom.system.end_signals import STOPS, handled

_SAME_S = 0.5
"""A terminal and a launcher may both deliver one Ctrl-C: signals within this time after the first one are ignored."""
_MARGIN_S = 2.0
"""Seconds by which the process that started the ranks waits longer than they do."""
_LEFT, _LOOK = 0, 255
"""Bytes in the pipe that are no signals: end the thread; read the clock again."""


class StopSignals:
    """Context in which a rank handles signals that end a run.

    Python runs handlers between two bytecodes of the main thread, which may be inside a library for minutes. So a
    thread reads the numbers of signals from a pipe, into which the interpreter writes them at once.

    While ``waits`` is false, a signal ends the process at once. While it is true, the signal is recorded, and the rank
    ends in order. If that takes longer than the grace period, or at a second Ctrl-C, the process ends at once.

    Args:
        grace_s: seconds for an orderly end; 0: the signals keep their default action.
        setting: name of the option that sets the grace period, for messages.
        print_line: called in the thread with each message for the user.
        last_words: called in the thread before it ends the process.

    Attributes:
        waits: whether the rank is in a section that it should end in order.
    """

    def __init__(
        self,
        grace_s: float,
        setting: str,
        print_line: Callable[[str], None],
        last_words: Callable[[signal.Signals], None],
    ) -> None:
        self.waits = False
        self._grace_s = grace_s
        self._grace = f"{grace_s:g} s ({setting})"
        self._print_line = print_line
        self._last_words = last_words
        self._first: signal.Signals | None = None
        self._first_s = 0.0
        self._expected_end_s = 0.0
        self._work = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Install the handlers and start the thread."""
        if self._grace_s > 0 and threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            # set_wakeup_fd requires it: a signal handler must not wait for room in the pipe.
            os.set_blocking(self._writer, False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._handlers = handled(_noted)
            self._handlers.__enter__()
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the handlers, unless a signal is ending the process in order."""
        if self._thread is None or (kind is not None and issubclass(kind, Interrupted)):
            return
        self._handlers.__exit__(None, None, None)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._writer, bytes([_LEFT]))
        self._thread.join()
        self._thread = None
        os.close(self._writer)
        os.close(self._reader)

    @property
    def number(self) -> signal.Signals | None:
        """The first signal of this rank; ``None`` without one."""
        return self._first

    def agree(self, number: int) -> None:
        """Record that another rank got a signal, so that this one ends, too; no-op if it got one itself."""
        if self._first is None and self._thread is not None:
            self._first_s = time.monotonic()
            self._first = signal.Signals(number)
            os.write(self._writer, bytes([_LOOK]))

    def expect(self, seconds: float, work: str) -> None:
        """Set the expected time from now to the orderly end.

        Args:
            seconds: the least that it takes; 0 if unknown.
            work: what takes them, for messages.
        """
        self._expected_end_s = time.monotonic() + seconds
        self._work = work

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], (), (), self._left_s())
            if not ready:
                # select returned with nothing to read: the grace period is over.
                self._end(f"the run did not end in order within {self._grace}; it ends at once")
            for number in os.read(self._reader, 64):
                if number == _LEFT:
                    return
                if number in STOPS:
                    self._take(signal.Signals(number))

    def _left_s(self) -> float | None:
        """Seconds to the end of the grace period; ``None`` before any signal."""
        return None if self._first is None else max(0.0, self._first_s + self._grace_s - time.monotonic())

    def _take(self, number: signal.Signals) -> None:
        now_s = time.monotonic()
        if self._first is not None:
            if number == signal.SIGINT and now_s > self._first_s + _SAME_S:
                self._end("interrupted again: the run ends at once")
            return
        self._first_s = now_s
        self._first = number
        if not self.waits:
            self._end()
        if self._expected_end_s - now_s > self._grace_s:
            self._end(f"the run cannot end in order within {self._grace}, since {self._work}; it ends at once")
        self._print_line(
            f"the run ends after this step, with a checkpoint, within {self._grace}; Ctrl-C ends it at once"
        )

    def _end(self, why: str = "") -> NoReturn:
        """End the process: an exception in a thread would not reach a main thread that is inside a library."""
        assert self._first is not None
        with suppress(Exception):  # whatever fails here, the process ends
            if why:
                self._print_line(why)
            self._last_words(self._first)
        # Not sys.exit, which raises in this thread alone.
        os._exit(Interrupted(self._first).status)


def ended_at_once() -> StopSignals:
    """A context in which a signal ends this process at once, even inside a library that waits for other processes."""
    return StopSignals(inf, "", _ignored, _ignored)


def _ignored(_: object) -> None:
    """A message that nobody needs: rank 0 prints it."""


def _noted(*_: object) -> None:
    """An empty handler: the thread that reads the pipe does the work."""


class PassedOn:
    """Forwards the first signal to the processes of the ranks, which then end in order.

    Its handler only records signals: exceptions would be lost in the callbacks of a fork.

    Args:
        grace_s: grace period of the ranks; 0: the first signal ends them at once.

    Attributes:
        number: the first signal; ``None`` without one.
    """

    def __init__(self, grace_s: float) -> None:
        self.number: int | None = None
        self._grace_s = grace_s
        self._first_s = 0.0
        self._is_over = False
        self._asked: set[int | None] = set()
        self._owner = os.getpid()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Context in which signals are recorded."""
        with handled(self._handle):
            yield

    def check(self, processes: Sequence[BaseProcess]) -> None:
        """Forward a recorded signal; call it regularly.

        Args:
            processes: of the ranks.

        Raises:
            Interrupted: the grace period of the ranks is over.
        """
        if self.number is None:
            return
        if self._is_over or time.monotonic() > self._first_s + self._grace_s + _MARGIN_S:
            raise Interrupted(self.number)
        for process in processes:
            if process.pid not in self._asked:
                self._asked.add(process.pid)
                process.terminate()  # SIGTERM: they ignore what a terminal sends to all of its processes

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a process that was forked just now and has no handlers of its own yet
            os._exit(Interrupted(number).status)
        now_s = time.monotonic()
        if self.number is None:
            self.number, self._first_s, self._is_over = number, now_s, self._grace_s <= 0
        elif number == signal.SIGINT and now_s > self._first_s + _SAME_S:
            self._is_over = True
