"""Small pipelines for tests: stages, schedules and a reference that shares nothing with the executor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from stage_outputs import stage_outputs
from torch import Tensor, nn

from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.parts.moves import ActivationMoves
from pipeloom.execute.stages.stage import Stage
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.schedule import Schedule
from pipeloom.workload.boundary import Boundary

WIDTH = 6
ROWS = 3


@dataclass(frozen=True)
class Toy:
    """Inputs and modules of a pipeline of small linear stages, in float64 or in what they are to compute in."""

    num_stages: int
    num_microbatches: int
    dtype: torch.dtype = torch.float64

    def modules(self, device: str = "cpu") -> list[nn.Module]:
        """Every stage, the same weights at every call, in the type that an optimizer updates."""
        modules = []
        for stage in range(self.num_stages):
            _seed(stage)
            modules.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device, master_dtype(self.dtype)))
        return modules

    def inputs(self) -> list[Tensor]:
        """One tensor for each micro-batch."""
        _seed(1000)
        return [torch.randn(ROWS, WIDTH, dtype=torch.float64).to(self.dtype) for _ in range(self.num_microbatches)]

    @cache  # noqa: B019  there are few toys, and a stage on meta tensors takes milliseconds
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The agreed specs."""
        modules = [module.to(self.dtype) for module in self.modules("meta")]
        return stage_outputs(lambda stage: modules[stage], self.num_stages, TensorSpec((ROWS, WIDTH), self.dtype))


def _seed(number: int) -> None:
    """What ``torch.manual_seed`` does on CPUs; that one also formats the stack, for devices that begin later."""
    torch.default_generator.manual_seed(number)


def objective(output: Tensor, microbatch: int) -> Tensor:
    """A loss that differs between micro-batches."""
    wide = output.to(master_dtype(output.dtype))
    return (wide * wide).sum() / (microbatch + 1)


def reference(modules: Sequence[nn.Module], inputs: Sequence[Tensor], loss: Callable[[Tensor, int], Tensor]) -> float:
    """Plain forward and backward, micro-batch by micro-batch; gradients add up in the modules."""
    total = 0.0
    for microbatch, tensor in enumerate(inputs):
        for module in modules:
            tensor = module(tensor)
        value = loss(tensor, microbatch)
        value.backward()
        total += value.item()
    return total


def make_executor(
    schedule: Schedule,
    rank: int,
    modules: Sequence[nn.Module],
    outputs: Sequence[TensorSpec],
    transport: Transport,
    moves: ActivationMoves | None = None,
    slices: TokenSlices | None = None,
    boundary: Boundary | None = None,
) -> Executor:
    """One rank's executor over its own of all the modules."""
    first, split = schedule.first_backward_stage, schedule.split_stages
    stages = {
        index: Stage(
            modules[index],
            index,
            outputs[index],
            needs_input_gradient=index > first,
            splits=index in split,
            slices=slices,
        )
        for index in schedule.placement.stages_of(rank)
    }
    messages = Messages(outputs, slices, boundary)
    parts = [Compute(stages, slices=slices, keeper=moves), messages, *([moves] if moves else [])]
    return Executor(schedule, rank, parts, transport=transport, clock=Clock())


def worst_difference(found: Sequence[nn.Module], expected: Sequence[nn.Module]) -> float:
    """Largest relative difference of any parameter's gradient."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            worst = max(worst, float((p.grad - q.grad).abs().max() / q.grad.abs().max()))
    return worst
