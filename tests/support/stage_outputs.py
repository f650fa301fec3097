"""Specs of the tensors between any stages, from running them on the meta device."""

from collections.abc import Callable

import torch

from pipeloom.execute.communication.boundary import TensorSpec


def stage_outputs(
    build_stage: Callable[[int], Callable[[torch.Tensor], torch.Tensor]], num_stages: int, first_input: TensorSpec
) -> tuple[TensorSpec, ...]:
    """The spec of every stage's output for one micro-batch.

    Every rank can compute all of them, since a stage on the meta device takes no memory.

    Args:
        build_stage: makes a stage's module on the meta device.
        num_stages: stages of the whole pipeline.
        first_input: what stage 0 takes.
    """
    specs: list[TensorSpec] = []
    tensor = first_input.empty("meta")
    with torch.no_grad():
        for stage in range(num_stages):
            tensor = build_stage(stage)(tensor)
            specs.append(TensorSpec.of(tensor))
    return tuple(specs)
