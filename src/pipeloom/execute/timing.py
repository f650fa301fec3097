"""Seconds of work, on a CPU or on a CUDA device, outside a step."""

import time
from collections.abc import Callable
from statistics import median

import torch


def now(device: torch.device) -> float:
    """Seconds on the host's clock when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_seconds(
    run: Callable[[], object], repeats: int, device: torch.device, before: Callable[[], object] | None = None
) -> float:
    """Median of some runs behind a first one, which does not count: it allocates, and fills caches.

    Args:
        run: what is timed.
        repeats: how many runs count, at least 1.
        device: that the work is done on.
        before: called before each run, and not timed.
    """
    times: list[float] = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        begin = now(device)
        run()
        times.append(now(device) - begin)
    return median(times[1:])
