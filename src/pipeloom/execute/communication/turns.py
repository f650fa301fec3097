"""Ranks of one process that wait in the middle of a stage: each has a thread, and one of them runs at a time."""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass

from torch import Tensor

from pipeloom.execute.communication.transport import Pending

_here = threading.local()


def wait_for(is_done: Callable[[], bool]) -> None:
    """Let the other ranks of this process go on until something is done.

    Raises:
        AssertionError: this thread is no rank's, so that nobody else would go on.
    """
    turn: Turn | None = getattr(_here, "turn", None)
    assert turn is not None, "tensor-parallel ranks of one process take turns"
    turn.wait(_Look(is_done))


class Turn:
    """A rank's steps in a thread of their own, which runs while whoever asks for the next step waits.

    To its caller it is what the steps are: an iterator over what the rank waits for, with a result.

    Args:
        steps: that no one has begun.
    """

    def __init__(self, steps: Generator[Pending, None, object]) -> None:
        self._steps = steps
        # Two, each released by one side alone, so that exactly one of both threads runs.
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._pending: Pending | None = None
        self._end: BaseException | None = None
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Turn":
        """The turn itself."""
        return self

    def __next__(self) -> Pending:
        """Run the rank until it waits.

        Raises:
            StopIteration: it has ended; with its result.
        """
        if self._end is None:
            self._go.release()
            self._back.acquire()
        if self._end is not None:
            raise self._end
        assert self._pending is not None
        return self._pending

    def close(self) -> None:
        """End a rank that will not be resumed."""
        self._is_left = True
        self._go.release()
        self._thread.join()

    def wait(self, pending: Pending) -> None:
        """In the rank's thread: hand the turn back, and go on when it comes again."""
        self._pending = pending
        self._back.release()
        self._go.acquire()
        if self._is_left:
            # Not an Exception: no handler of a rank's errors may catch it.
            raise _LeftError

    def _run(self) -> None:
        _here.turn = self
        self._go.acquire()
        try:
            while not self._is_left:
                self.wait(next(self._steps))
        except BaseException as error:
            self._end = error
        self._steps.close()
        self._back.release()


class _LeftError(BaseException):
    """Nobody will resume this rank."""


@dataclass(frozen=True)
class _Look:
    """Something to look at."""

    look: Callable[[], bool]

    def is_done(self) -> bool:
        return self.look()

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  nobody else can run meanwhile
        return self.look()

    def take(self) -> Tensor | None:
        return None
