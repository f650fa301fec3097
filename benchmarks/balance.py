"""What balancing and offloading activations save, and what they cost in time. Run by ``make bench-balance``.

1F1B over a few processes with emulated compute: stages sleep, and keep bytes for their backwards. Each way of keeping
them runs a step in turn, in the same processes.

    python benchmarks/balance.py [--repetitions 10] [--megabytes 4] [--ranks 4]
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from pipeloom.analysis.memory import memory_over_time
from pipeloom.cost.costs import Costs
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.communication.wires import make_wires
from pipeloom.execute.executor import Executor, StepResult
from pipeloom.execute.lanes import Lanes
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.parts.moves import ActivationMoves
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import World, join_forked
from pipeloom.execute.stages.stage import Stage
from pipeloom.families import make_schedule
from pipeloom.passes import balance, lower, offload
from pipeloom.schedule import Schedule
from pipeloom.schedule.kinds import MOVE_KINDS
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.simulation import simulate
from pipeloom.trace import Trace, merge
from side_by_side.results import Target, load_noted, machine, wide_console
from side_by_side.stages import EmulatedStage, OwnCost, loss, sleep_precisely

_TIMEOUT_S = 60.0
_LEAD_S = 0.02
_SHARES = (1, 1, 2, 4, 4, 4)
"""Sizes of the tensors that a stage keeps, in parts of all."""
_MEGA = 1e6


@dataclass(frozen=True)
class Case:
    """A pipeline whose stages sleep and keep bytes.

    Attributes:
        pp: ranks, one stage each.
        num_microbatches: of a step.
        forward_s, backward_s: of a stage, for a micro-batch.
        kept_bytes: what a stage keeps of a micro-batch for its backward, in addition to its input.
    """

    pp: int = 4
    num_microbatches: int = 16
    forward_s: float = 0.030
    backward_s: float = 0.060
    kept_bytes: int = 4_000_000

    @property
    def message(self) -> Tensor:
        """What two stages hand over."""
        return torch.zeros(1, 4096)

    def schedules(self) -> dict[str, Schedule]:
        """The ways of keeping things, by name; the first is compared with."""
        plain = lower(make_schedule("1f1b", pp=self.pp, num_microbatches=self.num_microbatches))
        balanced = balance(plain)
        cap = float(self.pp // 2 + 1)
        return {"1F1B": plain, "balanced": balanced, "offloaded": offload(plain, budget_bytes=[cap] * self.pp)}


class _Keep(torch.autograd.Function):
    """Hands its input on, and keeps tensors of its own for the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(tensor, *(torch.ones(size, dtype=torch.uint8) for size in sizes))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        assert all(int(kept[-1]) == 1 for kept in ctx.saved_tensors[1:]), "what was kept came back as something else"
        return gradient, None


class KeepingStage(EmulatedStage):
    """A stage that sleeps and keeps bytes."""

    def __init__(self, case: Case, index: int) -> None:
        super().__init__(case.forward_s, case.backward_s, 64, is_first=index == 0, own=OwnCost())
        self._sizes = [case.kept_bytes * share // sum(_SHARES) for share in _SHARES]

    def forward(self, tensor: Tensor) -> Tensor:
        """Sleep, keep, and hand the input on."""
        return _Keep.apply(super().forward(tensor), self._sizes)


@dataclass(frozen=True)
class Ran:
    """What a rank reports of one way, of every timed step.

    Attributes:
        starts_s, ends_s: of the steps.
        live_bytes: the most that it held for backwards.
        trace: of the last step.
        gradient: of its weights after it.
    """

    starts_s: list[float]
    ends_s: list[float]
    live_bytes: list[int]
    trace: Trace | None
    gradient: float


def run_case(case: Case, repetitions: int) -> dict[str, list[Ran]]:
    """For each way what every rank reports, by rank."""
    answers = run_workers(partial(_rank, case, repetitions), case.pp)
    return {name: [answer[name] for answer in answers] for name in answers[0]}


def _rank(case: Case, repetitions: int, rendezvous: Path, rank: int, size: int) -> dict[str, Ran]:
    sleep_precisely()
    world = join_forked(rendezvous, rank, size, "cpu", _TIMEOUT_S)
    runs = {name: _Run(case, schedule, world) for name, schedule in case.schedules().items()}
    steps: dict[str, list[tuple[float, float, StepResult]]] = {name: [] for name in runs}
    for repetition in range(-1, repetitions):
        for name, run in runs.items():
            start_s = _start_together(world)
            result = run.step()
            if repetition >= 0:
                steps[name].append((start_s, time.perf_counter(), result))
    found: dict[str, Ran] = {}
    for name, run in runs.items():
        starts, ends, results = zip(*steps[name], strict=True)
        live = [result.held.live_bytes for result in results]
        found[name] = Ran(list(starts), list(ends), live, results[-1].trace, run.gradient)
    world.wait_for_all()
    for run in runs.values():
        run.close()
    world.leave()
    return found


class _Run:
    """One rank of one way."""

    def __init__(self, case: Case, schedule: Schedule, world: World) -> None:
        rank, clock = world.rank, Clock()
        outputs = [TensorSpec.of(case.message)] * case.pp
        self._module: nn.Module = KeepingStage(case, rank)
        self._transport = Transport(rank, edges_of(schedule, outputs), world.device, timedelta(seconds=_TIMEOUT_S))
        wires = make_wires(schedule, rank, world, [range(case.pp)])
        self._lanes = Lanes(clock, world.device)
        moves = ActivationMoves(schedule, rank, self._lanes, wires)
        stages = {rank: Stage(self._module, rank, outputs[rank], needs_input_gradient=rank > 0)}
        parts = [Compute(stages, keeper=moves), Messages(outputs), moves]
        self._executor = Executor(schedule, rank, parts, transport=self._transport, clock=clock)
        self._inputs = [case.message] * case.num_microbatches

    @property
    def gradient(self) -> float:
        """Sum of the weights' gradient."""
        return sum(float(p.grad.sum()) for p in self._module.parameters() if p.grad is not None)

    def step(self) -> StepResult:
        """Run the row once, from no gradients."""
        for parameter in self._module.parameters():
            parameter.grad = None
        return self._executor.run(self._inputs, lambda output, _: loss(output), _TIMEOUT_S)

    def close(self) -> None:
        """Close the threads."""
        self._lanes.close()
        self._transport.close()


def _start_together(world: World) -> float:
    """Wait until a moment that all ranks agree on: a little after the slowest one has come."""
    start = torch.tensor([time.perf_counter() + _LEAD_S], dtype=torch.float64)
    torch.distributed.all_reduce(start, op=torch.distributed.ReduceOp.MAX, group=world.control)
    start_s = float(start.item())
    time.sleep(max(0.0, start_s - time.perf_counter()))
    return start_s


def step_times(ran: Sequence[Ran]) -> list[float]:
    """Seconds of every step, until the last rank is done."""
    return [max(ends) - min(starts) for starts, ends in _by_step(ran)]


def _by_step(ran: Sequence[Ran]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    starts, ends = zip(*(one.starts_s for one in ran), strict=True), zip(*(one.ends_s for one in ran), strict=True)
    return list(zip(starts, ends, strict=True))


def peaks(ran: Sequence[Ran]) -> list[int]:
    """For each rank the most bytes held in any step."""
    return [max(one.live_bytes) for one in ran]


def predicted_peaks(case: Case, schedule: Schedule, evict_s: float) -> list[float]:
    """For each rank the most that its schedule holds in simulation, in bytes."""
    size = float(case.kept_bytes + case.message.nbytes)
    held = HeldBytes(always_bytes=(0.0,) * case.pp, kept=KeptBytes([size] * case.pp))
    costs = Costs(case.forward_s, case.backward_s, evict_s=evict_s, offload_s=evict_s)
    return [curve.peak_bytes for curve in memory_over_time(schedule, simulate(schedule, costs), held)]


def evict_seconds(ran: Sequence[Ran]) -> float:
    """Median seconds of what moves in the last step; 0 if nothing does."""
    trace = merge(one.trace for one in ran if one.trace is not None)
    seconds = [span.end_s - span.start_s for span in trace.spans if span.action.kind in MOVE_KINDS]
    return statistics.median(seconds) if seconds else 0.0


def targets_of(case: Case, found: Mapping[str, Sequence[Ran]]) -> list[Target]:
    """What is to hold."""
    plain, balanced = found["1F1B"], found["balanced"]
    ratios = [ours / theirs for ours, theirs in zip(step_times(balanced), step_times(plain), strict=True)]
    most = max(peaks(balanced)) / (case.kept_bytes + case.message.nbytes)
    return [
        Target("balanced / plain 1F1B, step time", statistics.median(ratios), 1.03),
        Target(
            "micro-batches that the fullest rank holds, balanced, with a message in the making",
            most,
            case.pp // 2 + 1.05,
        ),
    ]


def main() -> None:
    """Run, and print what came of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=10, help="timed steps of each way")
    options.add_argument("--megabytes", type=float, default=4.0, help="that a stage keeps of a micro-batch")
    options.add_argument("--ranks", type=int, default=4)
    chosen, console = options.parse_args(), wide_console()
    case = Case(pp=chosen.ranks, kept_bytes=round(chosen.megabytes * _MEGA))
    console.print(f"{machine('ordinary scheduling: other load on this machine counts')}\n")
    with load_noted() as load:
        found = run_case(case, chosen.repetitions)
    columns = ("step ms", "min .. max", "/ 1F1B", "min .. max", "one move ms")
    table = Table("", *columns, "peak MB by rank", "simulated", title=_title(case))
    plain = step_times(found["1F1B"])
    for name, schedule in case.schedules().items():
        times, evict_s = step_times(found[name]), evict_seconds(found[name])
        ratios = [ours / theirs for ours, theirs in zip(times, plain, strict=True)]
        table.add_row(
            name,
            f"{statistics.median(times) * 1e3:.0f}",
            f"{min(times) * 1e3:.0f} .. {max(times) * 1e3:.0f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} .. {max(ratios):.3f}",
            f"{evict_s * 1e3:.1f}",
            _megabytes(peaks(found[name])),
            _megabytes(predicted_peaks(case, schedule, evict_s)),
        )
    console.print(table)
    for target in targets_of(case, found):
        console.print(f"  {target}")
    console.print(f"  load average {load.before:.1f} before, {load.after:.1f} after")


def _title(case: Case) -> str:
    return (
        f"1F1B, {case.pp} ranks, {case.num_microbatches} micro-batches, forward {case.forward_s * 1e3:g} ms, backward "
        f"{case.backward_s * 1e3:g} ms, {case.kept_bytes / _MEGA:g} MB kept of each"
    )


def _megabytes(values: Sequence[float]) -> str:
    return " ".join(f"{value / _MEGA:.1f}" for value in values)


if __name__ == "__main__":
    main()
