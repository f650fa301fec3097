"""Stages run outside a step, by themselves: to be timed, or so that what is compiled on first use is compiled."""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage import Objective, Portion, Stage
from pipeloom.measure.stopwatch import now


class Times(NamedTuple):
    """Seconds of one micro-batch, or of a slice of it, on a stage.

    Attributes:
        forward_s: of the forward.
        backward_s: of the backward, or of its first half where the stage splits it.
        weight_s: of the second half, which makes the gradients of the weights; 0 where there is none.
    """

    forward_s: float
    backward_s: float
    weight_s: float

    @classmethod
    def medians(cls, times: Sequence["Times"]) -> "Times":
        """Of several measurements."""
        return cls(*map(median, zip(*times, strict=True)))


Run = Callable[[], Times]
"""Forward and backward, of one micro-batch or the mean of several."""


def stage_runner(
    stage: Stage,
    outputs: Sequence[TensorSpec],
    tokens: Tensor,
    objective: Objective,
    device: torch.device,
    *,
    held: int = 1,
) -> Run:
    """What runs micro-batches through a stage, with random tensors for those of its neighbors.

    Args:
        stage: which.
        outputs: the agreed spec of every stage's output.
        tokens: stage 0's input.
        objective: applied to the last stage's output.
        device: that the stage is on.
        held: micro-batches that all go forward before the first goes back. What a single one writes finds the memory,
            still in a cache, that the one before it has just given back: on CPUs that is faster than a step is.
    """
    tensor = tokens if stage.index == 0 else _random(outputs[stage.index - 1], device)
    is_last = stage.index == len(outputs) - 1
    # Small, since all runs add to the same gradients.
    gradient = None if is_last else _random(outputs[stage.index], device) * 1e-6

    def run() -> Times:
        begin = now(device)
        for number in range(held):
            stage.forward(Portion(number), tensor, objective if is_last else None, trains=True)
        forward_s = now(device) - begin
        backward_s = [time_backward(stage, Portion(number), gradient, device) for number in range(held)]
        return Times(forward_s / held, *map(mean, zip(*backward_s, strict=True)))

    return run


def time_backward(stage: Stage, part: Portion, gradient: Tensor | None, device: torch.device) -> tuple[float, float]:
    """Seconds of a part's backward, or of its two halves where the stage splits it; the second is 0 otherwise."""
    begin = now(device)
    if not stage.splits:
        stage.backward(part, gradient)
        return now(device) - begin, 0.0
    stage.backward_input(part, gradient)
    middle = now(device)
    stage.backward_weight(part)
    return middle - begin, now(device) - middle


def _random(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.randn(spec.shape, dtype=spec.dtype, device=device)


def warm_up(
    world: World,
    stages: Mapping[int, Stage],
    data_parallel: DataParallel,
    *,
    outputs: Sequence[TensorSpec],
    tokens: Tensor,
    objective: Objective,
    first: Collection[int] = (0,),
) -> None:
    """Run every stage forward and backward once. Every rank calls it, each with equally many stages.

    Some go first: what they compile is on disk when the others come. These wait as long as communication may take
    (``World.timeout``), not as long as a tensor may in a step. Gradients that this leaves behind are dropped.

    Args:
        world: this process among the others.
        stages: this rank's.
        data_parallel: gathers their weights.
        outputs: the agreed spec of every stage's output.
        tokens: stage 0's input.
        objective: applied to the last stage's output.
        first: ranks that go first: rank 0, with the tensor-parallel ranks that compute with it.
    """
    for index, stage in stages.items():
        run = stage_runner(stage, outputs, tokens, objective, world.device)
        with data_parallel.gathered(index, world.timeout.total_seconds()):
            for is_first in (True, False):
                if (world.rank in first) is is_first:
                    run()
                world.wait_for_all()
        for parameter in stage.module.parameters():
            parameter.grad = None
