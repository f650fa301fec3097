"""Ending a long computation early: at a time limit or at Ctrl-C, wherever it is."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Reason = Literal["time", "interrupt"]
_AGAIN_S = 0.1
"""Seconds between repeated signals: Python ignores an exception that a handler raises inside a destructor."""
_shields = 0
_held: type[BaseException] | None = None


class TimeUp(BaseException):
    """The time limit of the innermost ``Stop`` has passed; only ``Stop`` catches it."""


_OURS = TimeUp, KeyboardInterrupt


class Stop:
    """Runs work until it ends, its deadline passes, or Ctrl-C; the caller then uses the results so far.

    A timer signal raises an exception wherever the work is, so that loops need not check a clock and a single long step
    does not exceed the limit. Signals need the main thread: in other threads work ends early only where it checks a
    clock itself.

    Args:
        deadline: by ``time.monotonic``; ``None`` for no limit.
    """

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._is_open = False
        self._is_interrupted = False
        self.reason: Reason | None = None
        """Why the work ended early; ``None`` if it ended by itself."""

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work``; return when it ends, or when it is stopped, which sets ``reason``."""
        # Python runs signal handlers in the main thread alone, and signal.signal raises an error in any other.
        if threading.current_thread() is not threading.main_thread():
            work()
            return
        begin = time.monotonic()
        old_timer, old_hook = signal.setitimer(signal.ITIMER_REAL, 0), sys.unraisablehook
        old_interrupt = signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        old_alarm = signal.signal(signal.SIGALRM, lambda *_: self._raise())
        try:
            self._is_open = True
            # Python prints what a handler raised inside a destructor before it ignores it; the timer repeats ours.
            sys.unraisablehook = lambda lost: None if lost.exc_type in _OURS else old_hook(lost)
            if self._deadline is not None:
                # A time of 0 would disable the timer, so a deadline in the past becomes a microsecond.
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._deadline - begin), _AGAIN_S)
            work()
            # Before the handlers are restored: a signal in between must not raise into the caller.
            self._is_open = False
        except (TimeUp, KeyboardInterrupt, SystemError) as error:
            self._is_open = False
            end = next((one for one in _causes(error) if isinstance(one, TimeUp | KeyboardInterrupt)), None)
            if end is None:
                raise
            self.reason = "time" if isinstance(end, TimeUp) else "interrupt"
        finally:
            self._is_open = False
            # Disable the timer before its handler: the default action of SIGALRM ends the process.
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = old_hook
            signal.signal(signal.SIGALRM, old_alarm)
            signal.signal(signal.SIGINT, old_interrupt)
            left_s, interval_s = old_timer
            if left_s > 0:  # such as the time limit of a test
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, left_s - (time.monotonic() - begin)), interval_s)

    def _interrupt(self) -> None:
        self._is_interrupted = True
        # The timer repeats the exception, which is lost inside a destructor or a callback of the garbage collector.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        self._raise()

    def _raise(self) -> None:
        """Raise now, or at the end of a shielded block."""
        global _held  # noqa: PLW0603  as _shields
        kind = KeyboardInterrupt if self._is_interrupted else TimeUp
        if self._is_open and _shields:
            _held = kind
        elif self._is_open:
            raise kind


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes: C code that ignores what a handler raised, such as Numba's, ends in another one."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


@contextmanager
def shielded() -> Iterator[None]:
    """A block that no ``Stop`` interrupts, such as an import: a module that is half imported stays broken."""
    global _shields, _held  # noqa: PLW0603  signals belong to the process, not to an object
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1
        if _held is not None and not _shields:
            kind, _held = _held, None
            raise kind
