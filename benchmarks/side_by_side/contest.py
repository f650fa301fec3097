"""Runs a plan: all contenders in the same processes, one step of each in turn."""

import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipeloom.analysis.summary import communication
from pipeloom.execute.communication.collectives import make_groups
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import World, join_forked
from pipeloom.trace import Trace, merge
from pipeloom.workload.layout import Layout
from side_by_side.case import Case, Contender, Gradient, Measured, Plan
from side_by_side.hosts import INTERFACE, enter, shaped_hosts
from side_by_side.orders import compute_order
from side_by_side.runtimes import Own, PyTorch, Runtime
from side_by_side.stages import OwnCost, measure_stage, own_cost, sleep_precisely
from side_by_side.theory import theory_s

_RANK_PRIORITY = 1
_TIMEOUT_S = 90.0
_LEAD_S = 0.004
"""From the agreement on a start to the start, in addition to a millisecond for each rank."""


def hold_the_cores() -> str:
    """Let this process and those it starts run before all others of the machine, where that is allowed; returns how."""
    if hasattr(os, "SCHED_RR"):
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_RANK_PRIORITY))
        except PermissionError:
            return "ordinary scheduling (SCHED_RR needs root): other load on this machine counts"
        return "SCHED_RR: ranks run before other load on this machine"
    return "ordinary scheduling (this system has no SCHED_RR): other load on this machine counts"


def warm_up() -> None:
    """Import in this process what PyTorch imports late, so that forked ranks need not."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def run(plan: Plan) -> list[Measured]:
    """Time every contender of a plan.

    Raises:
        WorkerError: a rank failed.
    """
    with ExitStack() as stack:
        link = plan.case.link
        hosts = stack.enter_context(shaped_hosts(plan.case.num_ranks, link)) if link is not None else None
        answers = run_workers(partial(_rank, plan, hosts), plan.case.num_ranks)
    return [_measured(plan, number, [answer[number] for answer in answers]) for number in range(len(plan.contenders))]


class _Stretch(NamedTuple):
    """A rank's step."""

    start_s: float
    end_s: float


@dataclass
class _Answer:
    """What a rank reports of a contender."""

    steps: list[_Stretch]
    cpu_s: float
    num_actions: int
    stage_s: tuple[float, float]
    trace: Trace | None
    gradients: dict[str, Gradient]


def _rank(plan: Plan, hosts: list[str] | None, rendezvous: Path, rank: int, size: int) -> list[_Answer]:
    if hosts is not None:
        enter(hosts[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    sleep_precisely()
    case = plan.case
    world = join_forked(rendezvous, rank, size, "cpu", _TIMEOUT_S)
    stage_s = _agreed(world, measure_stage(case))
    runtimes = _runtimes(plan, world, own_cost(case, *stage_s))
    answers = [_Answer([], 0.0, runtime.num_actions, stage_s, None, {}) for runtime in runtimes]
    skipped = int(plan.turn > 1)
    for repetition in range(-plan.warmup, plan.repetitions):
        num_steps = 1 if repetition < 0 else skipped + plan.turn
        for runtime, answer in zip(runtimes, answers, strict=True):
            for number in range(num_steps):
                runtime.prepare()
                start_s = _start_together(world)
                cpu_s = time.process_time()
                result = runtime.step()
                end_s = time.perf_counter()
                if repetition >= 0 and number >= skipped:
                    answer.steps.append(_Stretch(start_s, end_s))
                    answer.cpu_s += (time.process_time() - cpu_s) / (plan.repetitions * plan.turn)
                    answer.trace = None if result is None else result.trace
    world.wait_for_all()
    for runtime, answer in zip(runtimes, answers, strict=True):
        answer.gradients = _gradients(runtime) if plan.compares_gradients else {}
        runtime.close()
    world.leave()
    return answers


def _runtimes(plan: Plan, world: World, own: OwnCost) -> list[Runtime]:
    case = plan.case
    layout = Layout(pp=case.pp, dp=case.dp, loops=case.loops, shard="full" if case.dp > 1 else "none")
    groups = make_groups(layout, world) if case.dp > 1 else None
    mesh = init_device_mesh("cpu", (case.pp, case.dp), mesh_dim_names=("pp", "dp"))
    made: list[Runtime] = []
    for contender in plan.contenders:
        if contender.runtime == "pipeloom":
            made.append(Own(case, contender, world, groups, own))
        else:
            made.append(PyTorch(case, contender, world, mesh, own))
    return made


def _agreed(world: World, stage_s: tuple[float, float]) -> tuple[float, float]:
    """The medians of what the ranks found, so that all sleep alike."""
    found = [stage_s] * world.size
    dist.all_gather_object(found, stage_s, group=world.control)
    forwards, backwards = zip(*found, strict=True)
    return statistics.median(forwards), statistics.median(backwards)


def _gradients(runtime: Runtime) -> dict[str, Gradient]:
    named = [(f"{i}.{name}", p) for i, module in runtime.modules.items() for name, p in module.named_parameters()]
    return {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}


def _start_together(world: World) -> float:
    """Wait until a moment that all ranks agree on; all hosts are on one machine and share its clock."""
    start = torch.tensor([time.perf_counter() + _LEAD_S + 1e-3 * world.size], dtype=torch.float64)
    dist.all_reduce(start, op=dist.ReduceOp.MAX, group=world.control)
    start_s = float(start.item())
    time.sleep(max(0.0, start_s - time.perf_counter()))
    return start_s


def _measured(plan: Plan, number: int, answers: list[_Answer]) -> Measured:
    case, contender = plan.case, plan.contenders[number]
    steps = zip(*(answer.steps for answer in answers), strict=True)
    if case.width is not None:
        forward_s, backward_s = answers[0].stage_s
        case = replace(case, forward_s=forward_s, backward_s=backward_s)
    return Measured(
        contender=contender,
        seconds=[max(one.end_s for one in step) - step[0].start_s for step in steps],
        theory_s=theory_s(case, contender, compute_order(case, contender)),
        compute_s=case.ideal_s,
        num_actions=max(answer.num_actions for answer in answers),
        cpu_s=sum(answer.cpu_s for answer in answers),
        lanes=_lanes(case, contender, answers),
        gradients={name: array for answer in answers for name, array in answer.gradients.items()},
    )


def _lanes(case: Case, contender: Contender, answers: list[_Answer]) -> dict[str, tuple[float, float]]:
    """Hidden and exposed seconds of a rank by kind of lane, from the last step's trace of the first replica."""
    if contender.runtime != "pipeloom":
        return {}
    traces = [answer.trace for answer in answers[:: case.dp]]
    trace = merge(trace for trace in traces if trace is not None)
    found: dict[str, tuple[float, float]] = {}
    for use in communication(trace):
        hidden_s, exposed_s = found.get(use.lane.name, (0.0, 0.0))
        found[use.lane.name] = hidden_s + use.hidden_s / case.pp, exposed_s + use.exposed_s / case.pp
    return found
