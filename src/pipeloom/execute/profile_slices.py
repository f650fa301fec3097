"""Measured seconds of token slices, each behind the ones before it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from pipeloom.cost.costs import StageCosts
from pipeloom.execute.boundary import TensorSpec, TokenSlices
from pipeloom.execute.data_parallel import DataParallel
from pipeloom.execute.profile import Profile
from pipeloom.execute.stage import Objective, Part, Stage
from pipeloom.execute.world import World
from pipeloom.layout import Layout

_REPEATS = 5

Times = list[tuple[float, float]]
"""For each slice the seconds of its forward and its backward."""


def profile_slices(
    world: World,
    stages: Mapping[int, Stage],
    data_parallel: DataParallel,
    *,
    outputs: Sequence[TensorSpec],
    slices: TokenSlices,
    tokens: Sequence[Tensor],
    objective: Objective,
    layout: Layout,
) -> dict[int, Times] | None:
    """Time every slice of one micro-batch in every stage, each rank alone. Every rank calls it.

    Args:
        world: this process among the others.
        stages: this rank's, of slices.
        data_parallel: gathers their weights. Gradients that this leaves behind are dropped.
        outputs: the agreed spec of every stage's output for a whole micro-batch.
        slices: how it is cut.
        tokens: stage 0's inputs, one for each slice.
        objective: applied to the last stage's outputs.
        layout: of the ranks.

    Returns:
        By stage of the first pipeline, on rank 0; ``None`` elsewhere.
    """
    own: dict[int, Times] = {}
    for index, stage in stages.items():
        with data_parallel.gathered(index, world.timeout.total_seconds()):
            for team in layout.tensor_groups():
                if world.rank in team:
                    own[index] = _time(stage, outputs, slices, tokens, objective)
                world.wait_for_all()
        for parameter in stage.module.parameters():
            parameter.grad = None
    every: list[dict[int, Times]] | None = world.gather(own)
    return None if every is None else {i: t for rank in layout.pipelines()[0] for i, t in every[rank].items()}


def _time(
    stage: Stage,
    outputs: Sequence[TensorSpec],
    slices: TokenSlices,
    tokens: Sequence[Tensor],
    objective: Objective,
) -> Times:
    """Medians over a few micro-batches: all slices forward, then all back."""
    device, numbers = tokens[0].device, range(len(slices.lengths))
    is_last = stage.index == len(outputs) - 1

    def random(index: int, number: int, size: float) -> Tensor:
        spec = slices.spec(outputs[index], number)
        return torch.randn(spec.shape, dtype=spec.dtype, device=device) * size

    inputs = [tokens[number] if stage.index == 0 else random(stage.index - 1, number, 1.0) for number in numbers]
    gradients = [None if is_last else random(stage.index, number, 1e-6) for number in numbers]
    times: list[Times] = []
    for _ in range(_REPEATS + 1):
        marks = [_now(device)]
        for number in numbers:
            stage.forward(Part(0, number), inputs[number], objective if is_last else None, trains=True)
            marks.append(_now(device))
        for number in reversed(numbers):
            stage.backward(Part(0, number), gradients[number])
            marks.append(_now(device))
        seconds = [end - begin for begin, end in pairwise(marks)]
        times.append(list(zip(seconds[: len(numbers)], seconds[: len(numbers) - 1 : -1], strict=True)))
    return [
        (median(one[number][0] for one in times[1:]), median(one[number][1] for one in times[1:])) for number in numbers
    ]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def with_slices(profile: Profile, times: Mapping[int, Times], slices: TokenSlices) -> Profile:
    """The profile with costs of slices; messages take their share of a whole one's time."""
    parts: list[StageCosts] = []
    for number, length in enumerate(slices.lengths):
        forward_s, backward_s = zip(*(times[stage][number] for stage in sorted(times)), strict=True)
        share = length / slices.num_tokens
        sides = {"forward_s": forward_s, "backward_s": backward_s}
        parts.append(replace(profile.costs, **sides, transfer_s=profile.costs.transfer_s * share))
    return replace(profile, slices=tuple(parts))
