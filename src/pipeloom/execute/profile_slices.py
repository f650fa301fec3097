"""Measured seconds of token slices, each behind the ones before it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.slices import moved
from pipeloom.execute.boundary import TensorSpec, TokenSlices
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.profile import Profile, Times, time_backward, timed
from pipeloom.execute.stage import Objective, Portion, Stage
from pipeloom.execute.timing import now
from pipeloom.execute.world import World
from pipeloom.workload.layout import Layout

_REPEATS = 5


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
) -> dict[int, list[Times]] | None:
    """Time every slice of one micro-batch in every stage, each rank alone. Every rank calls it.

    The halves of a backward are timed each where the stage splits it.

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
        By stage of the first pipeline, of each slice, on rank 0; ``None`` elsewhere.
    """
    own: dict[int, list[Times]] = {}
    for index, stage in stages.items():
        with data_parallel.gathered(index, world.timeout.total_seconds()):
            for team in layout.tensor_groups():
                if world.rank in team:
                    own[index] = _time(stage, outputs, slices, tokens, objective)
                world.wait_for_all()
        for parameter in stage.module.parameters():
            parameter.grad = None
    every: list[dict[int, list[Times]]] | None = world.gather(own)
    return None if every is None else {i: t for rank in layout.pipelines()[0] for i, t in every[rank].items()}


def _time(
    stage: Stage,
    outputs: Sequence[TensorSpec],
    slices: TokenSlices,
    tokens: Sequence[Tensor],
    objective: Objective,
) -> list[Times]:
    """Medians over a few micro-batches: all slices forward, then all back."""
    device, numbers = tokens[0].device, range(len(slices.lengths))
    is_last = stage.index == len(outputs) - 1

    def random(index: int, number: int, size: float) -> Tensor:
        spec = slices.spec(outputs[index], number)
        return torch.randn(spec.shape, dtype=spec.dtype, device=device) * size

    inputs = [tokens[number] if stage.index == 0 else random(stage.index - 1, number, 1.0) for number in numbers]
    gradients = [None if is_last else random(stage.index, number, 1e-6) for number in numbers]
    times: list[list[Times]] = []
    for _ in range(_REPEATS + 1):
        forward_s: list[float] = []
        for number in numbers:
            begin = now(device)
            stage.forward(Portion(0, number), inputs[number], objective if is_last else None, trains=True)
            forward_s.append(now(device) - begin)
        backward_s = [
            time_backward(stage, Portion(0, number), gradients[number], device) for number in reversed(numbers)
        ]
        times.append([Times(one, *both) for one, both in zip(forward_s, reversed(backward_s), strict=True)])
    return [Times.medians(of_slice) for of_slice in zip(*times[1:], strict=True)]


def with_slices(profile: Profile, times: Mapping[int, Sequence[Times]], slices: TokenSlices) -> Profile:
    """The profile with costs of slices.

    Args:
        profile: of whole micro-batches, complete: messages of a slice and its activations take their share of what
            theirs take.
        times: by stage, of each slice.
        slices: how micro-batches are cut.
    """
    whole, stages = profile.costs, sorted(times)
    parts: list[StageCosts] = []
    for number, length in enumerate(slices.lengths):
        share = length / slices.num_tokens
        part = replace(moved(whole, whole, share), transfer_s=whole.transfer_s * share)
        parts.append(timed(part, [times[stage][number] for stage in stages]))
    return replace(profile, slices=tuple(parts))
