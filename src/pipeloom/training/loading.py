"""The batches of a run's steps, which a thread reads while the step before runs."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.data.windows import Windows
from pipeloom.errors import RunError, reason_of
from pipeloom.training.background import Background

_PATIENCE_S = 1.0
"""A run that ends early waits at most this long for the thread, which may hang on a file system."""


class Loading:
    """Reads the batches of steps in their order, one step ahead. Nobody else may read these windows meanwhile.

    Args:
        windows: of the run; batch 0 is that of the first step.
        batch_size: windows of a batch.
        first_step: number of the first step, for messages.
        num_steps: how many follow; behind the last nothing is read.

    Attributes:
        waited_s: seconds that the last step waited for its batch.
        position: what a checkpoint after the last step stores of several sources (``Mixture.position``).
    """

    def __init__(self, windows: Windows, batch_size: int, first_step: int, num_steps: int) -> None:
        self._windows, self._batch_size, self._first, self._num_steps = windows, batch_size, first_step, num_steps
        self._taken = 0
        self._thread = Background("data")
        self.waited_s = 0.0
        self.position = windows.position(0)
        self._begin()

    def take(self) -> npt.NDArray[np.int64]:
        """The next batch, as of ``TokenWindows.batch``; the one behind it begins to be read.

        Raises:
            RunError: the text cannot be read.
        """
        begin_s = time.perf_counter()
        try:
            self._thread.end(waits=True)
        except OSError as error:
            step, reason = self._first + self._taken, reason_of(error)
            raise RunError(f"cannot read the data of step {step}: {reason}; checkpoints before it remain") from error
        self.waited_s = time.perf_counter() - begin_s
        batch, self.position = self._found
        self._taken += 1
        self._begin()
        return batch

    @property
    def taken(self) -> int:
        """Number of batches taken."""
        return self._taken

    def extend(self, num_steps: int) -> None:
        """Let more steps follow, after some that are done again with other batches."""
        was_over = self._taken == self._num_steps
        self._num_steps += num_steps
        if was_over:
            self._begin()

    def close(self) -> None:
        """End the thread, before the last step too."""
        self._thread.leave(_PATIENCE_S)

    def _begin(self) -> None:
        if self._taken < self._num_steps:
            self._thread.begin(self._read)

    def _read(self) -> None:
        batch = self._windows.batch(self._taken, self._batch_size)
        # Right behind the batch: from its place alone, a mixture would have to count all draws again.
        position = self._windows.position((self._taken + 1) * self._batch_size)
        self._found: tuple[npt.NDArray[np.int64], list[dict[str, Any]]] = batch, position
