"""Seconds of work outside a step, on CPUs and CUDA devices: one run, a few, or as many as make a median steady."""

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median

import torch
from torch import Tensor

from pipeloom.execute.processes.world import World
from pipeloom.measure.findings import Timing

Run = Callable[[], object]
"""What is timed, once."""

Now = Callable[[], float]
"""Seconds on a clock: ``now`` of a device, or CPU time, which other programs do not change."""

Sample = Callable[[int], float]
"""Seconds of one run, from so many in a row."""

SAMPLE_S = 2e-3
"""A sample of something short is as many runs in a row as take this long."""
STEADY = 0.01
"""Relative standard error of the median at which it is steady."""
LEAST, MOST = 5, 200
"""Samples of a measurement; the time available may end it after two."""
MOST_RUNS = 200
"""In a sample. Fewer than a CUDA stream takes before it makes the host wait (about a thousand)."""


class Stopwatch:
    """The clock of a number of measurements that share a time budget evenly; what one leaves over the later ones get.

    Every rank makes the same measurements in the same order: all of them run, and rank 0 alone decides how often.
    So whatever is measured is measured with all processes at work.

    Args:
        world: this process among the others.
        budget_s: for all measurements.
        count: how many there will be.
        show: called with what is measured next.
    """

    def __init__(self, world: World, budget_s: float, count: int, show: Callable[[str], None]) -> None:
        self.world = world
        self._left = count
        self._show = show
        self._end_s = time.perf_counter() + budget_s
        self._cpu_s = self._wall_s = 0.0

    @property
    def core_share(self) -> float:
        """CPU time of this process by time, in all samples so far."""
        return self._cpu_s / self._wall_s if self._wall_s else 1.0

    def time(self, what: str, sample: Sample) -> Timing:
        """Measure; the result of rank 0 is the one that counts."""
        self._show(what)
        share_s = (self._end_s - time.perf_counter()) / max(1, self._left)
        self._left -= 1
        self.world.wait_for_all()
        begin_s = time.perf_counter()
        sample(1)  # allocates, connects, fills caches
        runs = self.world.broadcast(min(MOST_RUNS, max(1, round(SAMPLE_S / max(sample(1), 1e-9)))), 0)
        times_s: list[float] = []
        while True:
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            times_s.append(sample(runs))
            self._cpu_s += time.process_time() - cpu_s
            self._wall_s += time.perf_counter() - wall_s
            is_spent = time.perf_counter() - begin_s > share_s
            if self.agree(len(times_s) >= 2 and (is_spent or _is_steady(times_s))):
                return Timing.of(times_s)

    def agree(self, is_so: bool) -> bool:
        """What rank 0 thinks."""
        return bool(self.world.broadcast(int(is_so), 0))

    def skip(self, count: int) -> None:
        """So many measurements that were announced are not made."""
        self._left -= count
        for _ in range(count):
            self._show("")


def _is_steady(times_s: list[float]) -> bool:
    return len(times_s) >= MOST or (len(times_s) >= LEAST and Timing.of(times_s).uncertainty < STEADY)


def on_device(device: torch.device, run: Run) -> Sample:
    """Times what the device does, without the host's time to launch it where these are apart.

    On CUDA the stream is given something long first, so that the kernels to be timed stand in a queue when the
    first of them starts: events around them see no gap that the host leaves.
    """
    if device.type != "cuda":
        return on_host(device, run)

    def sample(runs: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        left, right, out = _long_product(device)
        # A few milliseconds on the fastest GPUs, in which the host launches all runs of a sample.
        for _ in range(3):
            torch.mm(left, right, out=out)
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / runs

    return sample


def on_host(device: torch.device, run: Run) -> Sample:
    """Times what the host does: on a CPU all, on CUDA the launches alone."""
    return sample_of(run, partial(now, device), time.perf_counter)


def sample_of(run: Run, begin: Now, end: Now | None = None, factor: float = 1.0) -> Sample:
    """Times runs in a row.

    Args:
        run: once.
        begin: the clock.
        end: the same clock, read otherwise behind the last run; ``None``: as before the first one.
        factor: of the seconds.
    """

    def sample(runs: int) -> float:
        begin_s = begin()
        for _ in range(runs):
            run()
        return factor * ((end or begin)() - begin_s) / runs

    return sample


@lru_cache(maxsize=1)
def _long_product(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of a product of a TFLOP: a millisecond or more on any GPU there is."""
    left, right, out = (torch.randn(8192, 8192, device=device, dtype=torch.float16) for _ in range(3))
    return left, right, out


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
