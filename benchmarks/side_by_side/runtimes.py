"""The two runtimes behind one face: made once, stepped often."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.group import Groups
from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.executor import Executor, StepResult
from pipeloom.execute.lanes import ThreadLane
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.parts.part import Part
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage import Stage
from pipeloom.schedule import Placement, Schedule
from side_by_side.case import ONE_STAGE, Case, Contender
from side_by_side.orders import compute_order
from side_by_side.stages import OwnCost, loss, message, stage_of
from side_by_side.theory import lowered

_TIMEOUT_S = 60.0


class Runtime(Protocol):
    """One rank of a contender.

    Attributes:
        num_actions: of this rank in a step, communication included.
        modules: this rank's stages by index.
    """

    num_actions: int
    modules: dict[int, nn.Module]

    def prepare(self) -> None:
        """Before each step, outside of what is timed."""
        ...

    def step(self) -> StepResult | None:
        """Forward and backward of all micro-batches; ours returns what came of it."""
        ...

    def close(self) -> None:
        """Close the threads."""
        ...


class Own:
    """pipeloom's executor.

    Args:
        case: what is run.
        contender: the order.
        world: the ranks.
        groups: of data parallelism; ``None`` without.
        own: what stages cost in addition to their sleeps.
    """

    def __init__(self, case: Case, contender: Contender, world: World, groups: Groups | None, own: OwnCost) -> None:
        schedule = lowered(case, contender, compute_order(case, contender), case.receive_buffers)
        rank = world.rank // case.dp
        self.num_actions = len(schedule.rows[rank])
        self.modules = modules = _modules(case, contender, schedule.placement, rank, own)
        outputs = [TensorSpec.of(message(case))] * schedule.num_stages
        clock = Clock()
        self._parallel, self._lane = None, ThreadLane(clock)
        if groups is not None:
            self._parallel = DataParallel(schedule, modules.items(), "full", groups, self._lane)
        self._transport = _transport(case, contender, schedule, outputs, world)
        splits = schedule.split_stages
        stages = {
            i: Stage(module, i, outputs[i], needs_input_gradient=i > 0, splits=i in splits)
            for i, module in modules.items()
        }
        parts: list[Part] = [Compute(stages), Messages(outputs, boundary=contender.boundary)]
        if self._parallel is not None:
            parts.append(self._parallel)
        self._executor = Executor(schedule, rank, parts, transport=self._transport, clock=clock)
        self._inputs = [message(case, seed) for seed in range(case.num_microbatches)]

    def prepare(self) -> None:
        """Drop gradients; with data parallelism the executor does."""
        if self._parallel is None:
            _drop_gradients(self.modules.values())

    def step(self) -> StepResult | None:
        """Run the row once."""
        return self._executor.run(self._inputs, lambda output, _: loss(output), _TIMEOUT_S)

    def close(self) -> None:
        """Let the lanes' threads end."""
        self._transport.close()
        self._lane.close()


class PyTorch:
    """``torch.distributed.pipelining``, with FSDP2 where there is data parallelism.

    Args:
        case: what is run.
        contender: the schedule.
        world: the ranks.
        mesh: of two axes, ``pp`` and ``dp``.
        own: what stages cost in addition to their sleeps.
    """

    def __init__(self, case: Case, contender: Contender, world: World, mesh: DeviceMesh, own: OwnCost) -> None:
        rank, order = world.rank // case.dp, compute_order(case, contender)
        self.modules = modules = _modules(case, contender, order.placement, rank, own)
        if case.dp > 1:
            for module in modules.values():
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        device, group = torch.device("cpu"), mesh.get_group("pp")
        stages = [PipelineStage(module, i, order.num_stages, device, group=group) for i, module in modules.items()]
        self._schedule = _schedule(contender, stages, case.num_microbatches)
        self.num_actions = _num_actions(case, contender, rank)
        self._has_first, self._has_last = 0 in modules, order.num_stages - 1 in modules
        self._inputs = torch.cat([message(case, seed) for seed in range(case.num_microbatches)])

    def prepare(self) -> None:
        """Drop gradients."""
        _drop_gradients(self.modules.values())

    def step(self) -> StepResult | None:
        """Run its schedule once."""
        inputs = (self._inputs,) if self._has_first else ()
        target = {"target": self._inputs} if self._has_last else {}
        self._schedule.step(*inputs, **target, return_outputs=False)
        return None

    def close(self) -> None:
        """Nothing to close."""


def _transport(
    case: Case, contender: Contender, schedule: Schedule, outputs: Sequence[TensorSpec], world: World
) -> Transport:
    pipelines = [range(replica, case.num_ranks, case.dp) for replica in range(case.dp)]
    timeout = timedelta(seconds=_TIMEOUT_S)
    rank = world.rank // case.dp
    edges = edges_of(schedule, outputs, boundary=contender.boundary)
    return Transport(rank, edges, world.device, timeout, pipelines)


def _modules(case: Case, contender: Contender, placement: Placement, rank: int, own: OwnCost) -> dict[int, nn.Module]:
    return {index: stage_of(case, contender.loops, index, own) for index in placement.stages_of(rank)}


def _drop_gradients(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def _loss(output: Tensor, _: Tensor) -> Tensor:
    return loss(output)


def _schedule(
    contender: Contender, stages: list[PipelineStage], num_microbatches: int
) -> schedules.PipelineScheduleSingle | schedules.PipelineScheduleMulti:
    """Gradients are not divided by the number of micro-batches: ours are not either."""
    make = schedules.get_schedule_class(contender.order)
    given = stages[0] if contender.order in ONE_STAGE else stages
    return make(given, num_microbatches, loss_fn=_loss, scale_grads=False)


def _num_actions(case: Case, contender: Contender, rank: int) -> int:
    """Actions that any runtime has to run for this order: computes, sends and receives, gathers and reductions."""
    order = compute_order(case, contender)
    return len(lowered(case, contender, order, case.receive_buffers).rows[rank])
