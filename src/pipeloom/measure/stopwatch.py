"""Times work outside a step, on CPUs and CUDA devices: a few runs, or as many as a stable median needs."""

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median

import torch
from torch import Tensor

from pipeloom.execute.processes.world import World
from pipeloom.measure.findings import Timing

Run = Callable[[], object]
"""One run of the timed work."""

Now = Callable[[], float]
"""Seconds on a clock: ``now`` of a device, or CPU time, which excludes other programs."""

Sample = Callable[[int], float]
"""Number of consecutive runs -> seconds of one run."""

SAMPLE_S = 2e-3
"""A sample of short work has as many consecutive runs as take this long."""
STEADY = 0.01
"""Relative standard error at which a median is stable."""
LEAST, MOST = 5, 200
"""Samples of a measurement; the time budget may end it after two."""
MOST_RUNS = 200
"""Runs in a sample; fewer than a CUDA stream queues before the host has to wait (about a thousand)."""


class Stopwatch:
    """Repeats a number of measurements that share a time budget evenly; unused time passes to later ones.

    All ranks make the same measurements in the same order, at the same time; rank 0 decides how often.

    Args:
        world: this process and the others.
        budget_s: for all measurements.
        count: number of measurements.
        show: called with the name of each measurement before it begins.
    """

    def __init__(self, world: World, budget_s: float, count: int, show: Callable[[str], None]) -> None:
        self.world = world
        self._left = count
        self._show = show
        self._end_s = time.perf_counter() + budget_s
        self._cpu_s = self._wall_s = 0.0

    @property
    def core_share(self) -> float:
        """CPU time of this process divided by wall-clock time, over all samples so far."""
        return self._cpu_s / self._wall_s if self._wall_s else 1.0

    def time(self, what: str, sample: Sample) -> Timing:
        """Make one measurement, named ``what``. Collective; callers use the result of rank 0."""
        self._show(what)
        share_s = (self._end_s - time.perf_counter()) / max(1, self._left)
        self._left -= 1
        self.world.wait_for_all()
        begin_s = time.perf_counter()
        sample(1)  # allocates, connects, warms caches
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
        """Rank 0's value of a condition, on all ranks."""
        return bool(self.world.broadcast(int(is_so), 0))

    def skip(self, count: int) -> None:
        """Leave out so many of the announced measurements."""
        self._left -= count
        for _ in range(count):
            self._show("")


def _is_steady(times_s: list[float]) -> bool:
    return len(times_s) >= MOST or (len(times_s) >= LEAST and Timing.of(times_s).uncertainty < STEADY)


def on_device(device: torch.device, run: Run) -> Sample:
    """Time work of the device; on CUDA without the host's launch overhead.

    On CUDA a long kernel runs first, so that the timed kernels are queued before the first of them starts, and the
    events around them include no gaps.
    """
    if device.type != "cuda":
        return on_host(device, run)

    def sample(runs: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        left, right, out = _long_product(device)
        # A few milliseconds on the fastest GPUs, enough for the host to launch all runs of a sample.
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
    """Time work of the host: execution on one thread of a CPU, launches on CUDA."""
    if device.type != "cuda":
        # Where processes outnumber cores, a sample may fall between two turns or contain one.
        return sample_of(run, time.process_time)
    return sample_of(run, partial(now, device), time.perf_counter)


def sample_of(run: Run, begin: Now, end: Now | None = None, factor: float = 1.0, before: Run | None = None) -> Sample:
    """Time consecutive runs.

    Args:
        run: the work.
        begin: the clock, read before the first run.
        end: the clock as read after the last run, for example without synchronization; ``None``: ``begin``.
        factor: applied to the seconds.
        before: once before the runs of a sample, not timed.
    """

    def sample(runs: int) -> float:
        if before is not None:
            before()
        begin_s = begin()
        for _ in range(runs):
            run()
        return factor * ((end or begin)() - begin_s) / runs

    return sample


@lru_cache(maxsize=1)
def _long_product(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of a product of 1.1 TFLOP, about a millisecond on the fastest GPUs."""
    left, right, out = (torch.randn(8192, 8192, device=device, dtype=torch.float16) for _ in range(3))
    return left, right, out


def now(device: torch.device) -> float:
    """Synchronize the device, and return seconds on the host's clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_seconds(
    run: Callable[[], object], repeats: int, device: torch.device, before: Callable[[], object] | None = None
) -> float:
    """Median seconds of some runs, after an uncounted one, which allocates and warms caches.

    Args:
        run: the work.
        repeats: number of counted runs, at least 1.
        device: that runs the work.
        before: called before each run, not timed.
    """
    times: list[float] = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        begin = now(device)
        run()
        times.append(now(device) - begin)
    return median(times[1:])
