"""Measures a machine, in worker processes that it starts or in those of a launcher."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from pipeloom.errors import ConfigError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import (
    World,
    is_launched,
    join_forked,
    join_launched,
    launched_size,
    num_processes_here,
)
from pipeloom.measure.device import (
    NUM_LAUNCHES,
    NUM_TRAFFIC,
    measure_kernel,
    measure_launch,
    measure_products,
    measure_traffic,
    num_products,
)
from pipeloom.measure.findings import Collectives, Findings
from pipeloom.measure.host import describe_host, num_devices
from pipeloom.measure.links import group_sizes, measure_collectives, measure_messages, num_links
from pipeloom.measure.stopwatch import Stopwatch
from pipeloom.terminal.guard import print_beside
from pipeloom.terminal.progress import Bar

MOST_PROCESSES = 8
"""Default limit of the number of processes."""
_PATIENCE_S = 120.0
"""Added to the time budget of all measurements for the timeout of communication."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        kind: "cpu" or "cuda".
        num_processes: over all hosts.
        budget_s: seconds for all measurements together; about, since each is made at least twice.
    """

    kind: str
    num_processes: int
    budget_s: float

    @classmethod
    def make(cls, kind: str | None, num_processes: int | None, budget_s: float) -> "Request":
        """Fill in defaults (``None``) from this machine and its launcher.

        Raises:
            ConfigError: there is no such device, there are too few, or a number is out of range.
        """
        kind = kind or ("cuda" if num_devices("cuda") else "cpu")
        found, wanted, problems = num_devices(kind), num_processes, list[str]()
        num_processes = launched_size() if is_launched() else wanted or max(1, min(found, MOST_PROCESSES))
        num_here = num_processes_here(num_processes)
        if wanted is not None and wanted < 1:
            problems.append(f"--processes must be at least 1, found {wanted}")
        elif wanted not in (None, num_processes):
            problems.append(f"--processes is {wanted}, but the launcher started {num_processes}; leave --processes out")
        if not 0 < budget_s < float("inf"):
            problems.append(f"--budget-s must be a number of seconds above 0, found {budget_s:g}")
        if found == 0:
            problems.append("--device cuda needs a CUDA device that PyTorch sees, found none; use --device cpu")
        elif kind == "cuda" and num_here > found:
            problems.append(
                f"--device cuda takes one CUDA device for each of {num_here} processes on a host, found {found}; "
                f"use --processes {found}"
            )
        if problems:
            raise ConfigError(problems, "the command line")
        return cls(kind=kind, num_processes=num_processes, budget_s=budget_s)


def measure_machine(request: Request) -> Findings | None:
    """Measure, with progress on standard error.

    Returns:
        The measurements; under a launcher on rank 0 only, ``None`` elsewhere.

    Raises:
        WorkerError: a worker process failed.
    """
    if is_launched():
        # As in worker processes: one device of a CPU's cluster file is one core.
        torch.set_num_threads(1)
        return _measure_in(request, join_launched(request.kind, request.budget_s + _PATIENCE_S))
    return run_workers(partial(_work, request), request.num_processes)[0]


def _work(request: Request, rendezvous: Path, rank: int, num_ranks: int) -> Findings | None:
    return _measure_in(request, join_forked(rendezvous, rank, num_ranks, request.kind, request.budget_s + _PATIENCE_S))


def _measure_in(request: Request, world: World) -> Findings | None:
    per_host = num_processes_here(world.size)
    with ProfileProgress(_num_measurements(world, per_host), is_shown=world.rank == 0) as progress:
        findings = measure_on(world, request.budget_s, per_host, progress.show)
    world.leave()
    return findings if world.rank == 0 else None


def _num_measurements(world: World, per_host: int) -> int:
    device = world.device
    return num_products(device) + NUM_TRAFFIC + NUM_LAUNCHES + num_links(device, world.size, per_host)


def measure_on(world: World, budget_s: float, per_host: int, show: Callable[[str], None]) -> Findings:
    """Make all measurements. Collective; callers use the findings of rank 0.

    Args:
        world: this process and the others.
        budget_s: seconds for all measurements together.
        per_host: processes on each host; ranks 0 to per_host - 1 are on the first host, and so on.
        show: called with the name of each measurement before it begins.
    """
    begin_s = time.perf_counter()
    watch = Stopwatch(world, budget_s, _num_measurements(world, per_host), show)
    host = describe_host(world.device)
    launch, kernel = measure_launch(watch), measure_kernel(watch)
    products, too_slow = measure_products(watch)
    copy, add = measure_traffic(watch, host.memory_bytes)
    core_share = watch.core_share
    between = [(rank, per_host + rank) for rank in range(per_host)]
    intra = measure_messages(watch, [(0, 1)], "two processes") if per_host > 1 else None
    inter = measure_messages(watch, between, "two hosts") if world.size > per_host else None
    collectives: list[Collectives] = []
    for num_ranks in group_sizes(per_host):
        collectives += measure_collectives(watch, num_ranks, per_host)
    return Findings(
        host=host,
        num_processes=world.size,
        per_host=per_host,
        core_share=core_share,
        products=products,
        too_slow=too_slow,
        kernel=kernel,
        launch=launch,
        copy=copy,
        add=add,
        intra=intra,
        inter=inter,
        collectives=tuple(collectives),
        seconds=time.perf_counter() - begin_s,
    )


_LINES_WITHOUT_TERMINAL = 6


class ProfileProgress(Bar):
    """Progress over measurements.

    Args:
        count: number of measurements.
        is_shown: whether this rank prints.
    """

    def __init__(self, count: int, *, is_shown: bool) -> None:
        self._count = count
        self._is_shown = is_shown
        self._begun = 0
        self._every = max(1, count // _LINES_WITHOUT_TERMINAL)
        columns = (
            TextColumn("measurement {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
        )
        super().__init__(sys.stderr, *columns, total=count, is_shown=is_shown, transient=True, what="starting")

    def show(self, what: str) -> None:
        """Show that a measurement begins; an empty name means that it is left out."""
        self._begun += 1
        is_bar = self.update(self._begun, what=what)
        if not is_bar and self._is_shown and what and (self._begun - 1) % self._every == 0:
            print_beside(f"measuring {self._begun}/{self._count}: {what}")
