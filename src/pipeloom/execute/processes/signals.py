"""Signals that end a run: how ranks notice them, and how the process that started the ranks passes them on."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NoReturn, Self

from pipeloom.errors import Interrupted

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; the end that a scheduler or a launcher asks for; the end of a terminal."""
_SAME_S = 0.5
"""A terminal and a launcher may both deliver one Ctrl-C: what comes so soon after the first signal is no second one."""
_MARGIN_S = 2.0
"""How much longer the process that started the ranks waits than they do themselves."""
_LEFT, _LOOK = 0, 255
"""Bytes in the pipe that are no signals: the watching thread ends; it looks at the clock again."""


def not_ignored() -> list[signal.Signals]:
    """The signals that end a run and that this process does not ignore, as it does below nohup."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def raised_signals() -> Iterator[None]:
    """Meanwhile, each signal that ends a run raises ``Interrupted`` in the main thread."""

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    with _handled(interrupt):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Meanwhile, a handler of the signals that end a run; outside the main thread Python has none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in not_ignored()}
    try:
        for number in before:
            signal.siginterrupt(number, False)  # a system call that libraries have begun goes on
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopSignals:
    """What a rank notices of signals that end a run, from when it is entered until it is left.

    Python runs handlers between two bytecodes of the main thread, which may be inside a library for minutes. So a
    thread reads the numbers of signals from a pipe, into which the interpreter writes them at once.

    While ``waits`` is false, a signal ends the process at once. While it is true, the signal is noted, and the rank
    ends in order. If it cannot do that within the grace, or if a second Ctrl-C follows, the process ends at once.

    Args:
        grace_s: seconds that a rank may take to end in order; 0: the signals keep their default.
        setting: what people change to have another grace.
        say: called in the thread with each message for people.
        last_words: called in the thread before it ends the process.

    Attributes:
        waits: whether the rank is in the middle of something that it should end in order.
    """

    def __init__(
        self,
        grace_s: float,
        setting: str,
        say: Callable[[str], None],
        last_words: Callable[[signal.Signals], None],
    ) -> None:
        self.waits = False
        self._grace_s = grace_s
        self._grace = f"{grace_s:g} s ({setting})"
        self._say = say
        self._last_words = last_words
        self._first: signal.Signals | None = None
        self._first_s = 0.0
        self._expected_end_s = 0.0
        self._work = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begin to notice signals."""
        if self._grace_s > 0 and threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            # set_wakeup_fd requires it: a signal handler must not wait for room in the pipe.
            os.set_blocking(self._writer, False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._handlers = _handled(_noted)
            self._handlers.__enter__()
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the signals back; not if one of them ends the process, which it is left to do in order."""
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
        """The signal that asks this rank to end; ``None`` as long as none does."""
        return self._first

    def agree(self, number: int) -> None:
        """Note that another rank was asked to end, so that this one does as well; no-op if this one was asked too."""
        if self._first is None and self._thread is not None:
            self._first_s = time.monotonic()
            self._first = signal.Signals(number)
            os.write(self._writer, bytes([_LOOK]))

    def expect(self, seconds: float, work: str) -> None:
        """Note how long the rank will take, from now on, until it can have ended in order.

        Args:
            seconds: the least that it takes; 0 if nobody knows.
            work: what takes them, for people.
        """
        self._expected_end_s = time.monotonic() + seconds
        self._work = work

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], (), (), self._left_s())
            if not ready:
                # select returned with nothing to read: the grace is over.
                self._end(f"the run did not end in order within {self._grace}; it ends at once")
            for number in os.read(self._reader, 64):
                if number == _LEFT:
                    return
                if number in STOPS:
                    self._take(signal.Signals(number))

    def _left_s(self) -> float | None:
        """Seconds until the grace is over; ``None`` before any signal."""
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
        self._say(f"the run ends after this step, with a checkpoint, within {self._grace}; Ctrl-C ends it at once")

    def _end(self, why: str = "") -> NoReturn:
        """End the process: an exception in a thread would not reach a main thread that is inside a library."""
        assert self._first is not None
        with suppress(Exception):  # whatever fails here, the process ends
            if why:
                self._say(why)
            self._last_words(self._first)
        # Not sys.exit, which raises in this thread alone; 128 + number is how shells report a signal.
        os._exit(128 + self._first)


def _noted(*_: object) -> None:
    """A handler that leaves the work to the thread that reads the pipe."""


class PassedOn:
    """Passes the first signal on to the processes of the ranks, which then end in order.

    Its handler only notes signals: what it raised would be lost in the callbacks of a fork.

    Args:
        grace_s: that the ranks have; 0: the first signal ends them at once.

    Attributes:
        number: the first signal; ``None`` as long as there is none.
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
        """Meanwhile, signals are noted."""
        with _handled(self._handle):
            yield

    def check(self, processes: Sequence[BaseProcess]) -> None:
        """Pass a signal on that was noted; to be called every now and then.

        Args:
            processes: of the ranks.

        Raises:
            Interrupted: the ranks have no time left.
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
            os._exit(128 + number)
        now_s = time.monotonic()
        if self.number is None:
            self.number, self._first_s, self._is_over = number, now_s, self._grace_s <= 0
        elif number == signal.SIGINT and now_s > self._first_s + _SAME_S:
            self._is_over = True
