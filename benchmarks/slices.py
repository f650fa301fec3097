"""Token slices with fewer micro-batches than ranks: measured on four processes, by formula, and simulated.

Stages sleep for as long as a slice takes by a latency of its length and of the tokens before it, so that four ranks fit
on few cores; messages, executor and processes are real.

    python benchmarks/slices.py [--repetitions 15] [--num-microbatches 2]
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.slices import SliceCosts
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.execute.stages.stage import Stage
from pipeloom.families import make_schedule
from pipeloom.model import KeyValueCache
from pipeloom.passes import lower
from pipeloom.planner.slice_lengths import LatencyTable, Slicing, best_slices
from pipeloom.schedule import Schedule
from pipeloom.simulation import simulate
from side_by_side.stages import sleep_precisely

RANKS, TOKENS, WIDTH, UNIT = 4, 2048, 4, 16
FIXED_S, TOKEN_S, PAIR_S = 8e-3, 120e-6, 120e-9
"""Of a slice, of each of its tokens, and of each pair of a token with one before it: forward and backward, a third and
two thirds. A whole sequence takes half a second, half of that attention."""
FAMILIES = ("gpipe", "1f1b")
EVEN = (2, 4, 8, 16)
"""Numbers of even slices that are measured, in addition to the number with which the formula is fastest."""


def latency(length: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
    """Seconds of a slice's forward and backward."""
    return FIXED_S + TOKEN_S * length + PAIR_S * length * (before + length / 2)


def evens(table: LatencyTable, num_microbatches: int) -> list[Slicing]:
    """The even slices that are measured, by their number: among them the best of all numbers by the formula."""
    every = [table.even(number) for number in range(2, table.num_units + 1)]
    best = min(every, key=lambda one: one.step_s(RANKS, num_microbatches))
    return [one for one in every if one is best or len(one.lengths) in EVEN]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds / 3)
        return gradient, None


class SleepingStage(nn.Module):
    """Takes as long as a stage of a transformer would."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Sleep for these tokens behind those before them, and hand the input on."""
        before = 0 if cache is None else cache.take(x.shape[1])
        return _Sleep.apply(x * self.weight, float(latency(x.shape[1], before)))


@dataclass(frozen=True)
class Contender:
    """A schedule with its slices."""

    family: str
    slicing: Slicing
    num_microbatches: int

    @property
    def schedule(self) -> Schedule:
        """Ready to run."""
        sizes = {"pp": RANKS, "num_microbatches": self.num_microbatches, "num_slices": len(self.slicing.lengths)}
        return lower(make_schedule(self.family, **sizes), receive_buffers=4)

    @property
    def simulated_s(self) -> float:
        """Seconds of a step with messages that take no time."""
        parts = [StageCosts((s / 3,) * RANKS, (2 * s / 3,) * RANKS) for s in self.slicing.seconds]
        return simulate(self.schedule, SliceCosts(parts[0], tuple(parts))).end_s


def measure(contenders: list[Contender], repetitions: int, rendezvous: Path, rank: int, size: int) -> list[list[float]]:
    """Seconds of each contender's steps, in turn, so that all see the same machine."""
    sleep_precisely()
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    runs = [_make(contender, world) for contender in contenders]
    times: list[list[float]] = [[] for _ in runs]
    for repetition in range(repetitions + 2):
        for number, (executor, inputs) in enumerate(runs):
            world.wait_for_all()
            begin = time.perf_counter()
            executor.run(inputs, lambda output, _: output.sum())
            world.wait_for_all()
            if repetition >= 2:
                times[number].append(time.perf_counter() - begin)
    world.leave()
    return times


def _make(contender: Contender, world: Any) -> tuple[Executor, list[Tensor]]:
    schedule, lengths, rank = contender.schedule, contender.slicing.lengths, world.rank
    slices = TokenSlices(lengths) if len(lengths) > 1 else None
    outputs = [TensorSpec((1, TOKENS, WIDTH), torch.float32)] * RANKS
    edges = edges_of(schedule, outputs, slices=slices)
    transport = Transport(rank, edges, world.device, world.timeout)
    stage = Stage(SleepingStage(), rank, outputs[rank], needs_input_gradient=rank > 0, slices=slices)
    parts = [Compute({rank: stage}, slices=slices), Messages(outputs, slices)]
    executor = Executor(schedule, rank, parts, transport=transport, clock=Clock())
    whole = [torch.ones(1, TOKENS, WIDTH) for _ in range(contender.num_microbatches)]
    return executor, whole if slices is None else slices.cut(whole)


def main() -> None:
    """Measure, and print beside the formula and the simulation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--num-microbatches", type=int, default=2)
    options = parser.parse_args()
    table = LatencyTable(latency, TOKENS, UNIT)
    chosen = best_slices(table, RANKS, options.num_microbatches)
    slicings = [table.even(1), *evens(table, options.num_microbatches), chosen]
    contenders = [Contender(family, one, options.num_microbatches) for family in FAMILIES for one in slicings]
    times = run_workers(partial(measure, contenders, options.repetitions), RANKS)[0]
    medians = [statistics.median(each) for each in times]
    shown = Table("order", "slices", "measured", "formula", "simulated", "by whole sequences: measured", "formula")
    for number, (contender, median_s) in enumerate(zip(contenders, medians, strict=True)):
        first = number - number % len(slicings)
        formula_s = contender.slicing.step_s(RANKS, options.num_microbatches)
        whole_s = slicings[0].step_s(RANKS, options.num_microbatches)
        what = "chosen" if contender.slicing is chosen else "even"
        shown.add_row(
            contender.family,
            f"{len(contender.slicing.lengths)} {what}",
            *(f"{seconds * 1e3:.1f} ms" for seconds in (median_s, formula_s, contender.simulated_s)),
            f"{median_s / medians[first]:.3f}",
            f"{formula_s / whole_s:.3f}",
        )
    console = Console(width=110)
    console.print(shown)
    console.print(f"chosen: {' '.join(map(str, chosen.lengths))}")


if __name__ == "__main__":
    main()
