"""The order of an epoch's windows."""

import threading
from functools import cached_property

import numpy as np
import numpy.typing as npt

SLOW = 1 << 16
"""Windows that take longer to sort than a thread to start."""


class Order:
    """An epoch's permutation of windows, the same in all versions of NumPy; computed by a thread or when needed."""

    def __init__(self, seed: int, epoch: int, num_windows: int) -> None:
        self._seed, self._epoch, self._num_windows = seed, epoch, num_windows
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Compute it in a thread."""
        if self._thread is None and "places" not in self.__dict__:
            self._thread = threading.Thread(target=self._sort, name="order", daemon=True)
            self._thread.start()

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """The permutation, [windows]."""
        if self._thread is None:
            return _sorted(self._seed, self._epoch, self._num_windows)
        self._thread.join()
        return self._found

    def _sort(self) -> None:
        self._found = _sorted(self._seed, self._epoch, self._num_windows)


def _sorted(seed: int, epoch: int, num_windows: int) -> npt.NDArray[np.int64]:
    # NumPy guarantees the raw bits of its generators over versions, but not the results of shuffle and permutation
    # (NEP 19). SeedSequence takes no negative numbers, so the seed is taken modulo 2^64.
    bits = np.random.PCG64([seed % (1 << 64), epoch]).random_raw(num_windows)
    # Stable, so that equal numbers have the same order everywhere.
    return np.argsort(bits, kind="stable")
