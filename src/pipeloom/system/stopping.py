"""How a long computation ends early: at its time limit or at Ctrl-C, wherever it is."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Reason = Literal["time", "interrupt"]
_AGAIN_S = 0.1
"""Seconds between signals: an exception that a handler raises inside a destructor is lost."""
_shields = 0
_held: type[BaseException] | None = None


class TimeUp(BaseException):
    """The time of the innermost ``Stop`` is up. Only that catches it: it is no error."""


class Stop:
    """Runs something until its deadline or Ctrl-C; the caller then uses what it has by then.

    A timer of the operating system raises wherever the work is, so that no loop has to look at a clock and no step of a
    search is too long for a time limit. That works in the main thread alone. In another thread work ends early only
    where it looks at a clock itself.

    Args:
        deadline: on ``time.monotonic``; ``None`` for Ctrl-C alone.
    """

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._is_open = False
        self._is_interrupted = False
        self.reason: Reason | None = None
        """Why the work ended early; ``None`` if it did not."""

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, or a part of it."""
        # Python runs signal handlers in the main thread alone, and signal.signal raises in any other.
        if threading.current_thread() is not threading.main_thread():
            work()
            return
        begin = time.monotonic()
        old_timer = signal.setitimer(signal.ITIMER_REAL, 0)
        old_interrupt = signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        old_alarm = signal.signal(signal.SIGALRM, lambda *_: self._raise())
        try:
            self._is_open = True
            if self._deadline is not None:
                # A time of 0 would switch the timer off, so a deadline that has passed is a microsecond away.
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._deadline - begin), _AGAIN_S)
            work()
            # Before the handlers are restored: a signal between the two must not raise into the caller.
            self._is_open = False
        except (TimeUp, KeyboardInterrupt) as end:
            self._is_open = False
            self.reason = "time" if isinstance(end, TimeUp) else "interrupt"
        finally:
            self._is_open = False
            # The timer before its handler: the default action of SIGALRM ends the process.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old_alarm)
            signal.signal(signal.SIGINT, old_interrupt)
            left_s, interval_s = old_timer
            if left_s > 0:  # such as the one that limits a test
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, left_s - (time.monotonic() - begin)), interval_s)

    def _interrupt(self) -> None:
        self._is_interrupted = True
        # The timer raises again where this exception is lost, as inside a destructor or a callback of the collector.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        self._raise()

    def _raise(self) -> None:
        """Now, or at the end of what is shielded."""
        global _held  # noqa: PLW0603  as _shields
        kind = KeyboardInterrupt if self._is_interrupted else TimeUp
        if self._is_open and _shields:
            _held = kind
        elif self._is_open:
            raise kind


@contextmanager
def shielded() -> Iterator[None]:
    """A block that no ``Stop`` ends in the middle, such as an import, which could not be repeated."""
    global _shields, _held  # noqa: PLW0603  signals arrive for the process, not for a value that a caller has
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1
        if _held is not None and not _shields:
            kind, _held = _held, None
            raise kind
