"""One piece of work at a time in a thread beside the training steps."""

import threading
import time
from collections.abc import Callable


class Background:
    """A thread for one piece of work at a time. What the work raises is raised by ``end``.

    The thread is a daemon: it does not keep a process alive whose main thread failed.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._seconds = 0.0

    def begin(self, work: Callable[[], None]) -> None:
        """Start the work; ``end`` must have returned the result of the work before."""
        assert self._thread is None, "the result of the earlier work was not taken"
        self._thread = threading.Thread(target=self._do, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def end(self, *, waits: bool) -> float | None:
        """Seconds that the work took; ``None`` if there is none, or it is under way and ``waits`` is false.

        Raises:
            BaseException: what the work raised.
        """
        if self._thread is None or (self._thread.is_alive() and not waits):
            return None
        self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error
        return self._seconds

    def leave(self, patience_s: float) -> None:
        """Wait for the work so long at most, and drop its result and its error."""
        if self._thread is not None:
            self._thread.join(patience_s)
            self._thread = self._error = None

    def _do(self, work: Callable[[], None]) -> None:
        begin_s = time.monotonic()
        try:
            work()
        except BaseException as error:
            self._error = error
        self._seconds = time.monotonic() - begin_s
