"""Memory: the bandwidth of large copies and sums."""

import torch

from pipeloom.measure.findings import Traffic
from pipeloom.measure.stopwatch import Stopwatch, on_device

NUM_TRAFFIC = 2
"""Measurements that ``measure_traffic`` makes."""

_LARGE_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Of each of three tensors: beyond any cache."""
_PART = 16
"""Each tensor takes at most this part of a device's memory."""


def measure_traffic(watch: Stopwatch, memory_bytes: float) -> tuple[Traffic, Traffic]:
    """A copy (a read and a write) and a sum of two tensors (two reads and a write).

    Args:
        watch: repeats them.
        memory_bytes: of the device; small ones get smaller tensors.
    """
    device = watch.world.device
    size = int(min(_LARGE_BYTES[device.type], memory_bytes / _PART)) // 4
    left, right, out = (torch.ones(size, device=device) for _ in range(3))
    copy = watch.time("memory: copies", on_device(device, lambda: out.copy_(left)))
    add = watch.time("memory: sums", on_device(device, lambda: torch.add(left, right, out=out)))
    return Traffic(2 * 4.0 * size, copy), Traffic(3 * 4.0 * size, add)
