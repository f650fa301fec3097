"""What spans are measured with: the host's clock, or events on a CUDA stream."""

import time
from typing import Any

import torch

Mark = Any
"""A point in time that a clock can turn into seconds; its type is the clock's own."""


class Clock:
    """The host's monotonic clock, which all processes of a host share: right where a call returns when work is done."""

    def mark(self) -> Mark:
        """Now, in the order of the work."""
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        """Wait on the host until a mark is in the past."""

    def settle(self) -> None:
        """Wait until all marks are in the past."""

    def seconds(self, mark: Mark) -> float:
        """Seconds of a mark, on the host's clock; call ``settle`` first."""
        return mark


class CudaClock(Clock):
    """Events on the current CUDA stream: marks are taken when the device gets there, not when the host does.

    Args:
        device: index of the CUDA device.
    """

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._origin = self.mark()
        # The event and the host's clock are read when nothing is under way, so that they mean one moment.
        torch.cuda.synchronize(self._device)
        self._origin_s = time.perf_counter()

    def mark(self) -> Mark:
        """An event behind all work issued so far."""
        # Without timing, events are cheaper, but have no elapsed_time.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        """Wait until the device gets there."""
        mark.synchronize()

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, mark: Mark) -> float:
        """Host seconds, through the event that was taken when the clock was made."""
        # elapsed_time is in milliseconds.
        return self._origin_s + self._origin.elapsed_time(mark) / 1000
