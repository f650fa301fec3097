"""Clocks of traces: the host's clock, or events on a CUDA stream."""

import time
from typing import Any

import torch

Mark = Any
"""A point in time; its type depends on the clock."""


class Clock:
    """The host's monotonic clock, which all processes of a host share; for calls that return after the work.

    Attributes:
        is_host: whether what has returned has ended.
    """

    is_host = True

    def mark(self) -> Mark:
        """A mark of this moment."""
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        """Wait on the host until a mark has passed."""

    def has_passed(self, mark: Mark) -> bool:  # noqa: ARG002  a mark of the host is in the past
        """Whether a mark has passed, without waiting."""
        return True

    def settle(self) -> None:
        """Wait until all marks have passed."""

    def seconds(self, mark: Mark) -> float:
        """Seconds of a mark, on the host's clock; call ``settle`` first."""
        return mark


class CudaClock(Clock):
    """Events on the current CUDA stream: a mark is the time at which the device reaches it.

    Args:
        device: index of the CUDA device.
    """

    is_host = False

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._origin = self.mark()
        # The event and the host's clock are read on an idle device, so that both are the same moment.
        torch.cuda.synchronize(self._device)
        self._origin_s = time.perf_counter()

    def mark(self) -> Mark:
        """An event behind all work that has been issued."""
        # Without timing, events are cheaper, but have no elapsed_time.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached the event."""
        mark.synchronize()

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has reached the event."""
        return mark.query()

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, mark: Mark) -> float:
        """Host seconds, through the event that was taken when the clock was made."""
        # elapsed_time is in milliseconds.
        return self._origin_s + self._origin.elapsed_time(mark) / 1000
