"""A visit of a stage outside a step: forward and backward of one micro-batch, whose results ranks compare."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeloom.execute.stages.digest import digest
from pipeloom.execute.stages.stage import Objective
from pipeloom.model import Documents, StageModule
from pipeloom.model.deferred import gradients_by_autograd
from pipeloom.model.experts import without_history

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 3e-2
"""Largest difference of a projection between unlike devices, as a share of the tensor's norm; the last one is that of
narrower types."""


@dataclass(frozen=True)
class Visited:
    """The results of a visit in a few numbers.

    Attributes:
        bits: digest of output, input gradient and weight gradients.
        projections: of each of them, divided by its norm, on a fixed vector; and its norm.
        tolerance: for comparisons between unlike devices.
    """

    bits: int
    projections: tuple[tuple[float, float], ...]
    tolerance: float

    def equals(self, other: "Visited", *, is_alike: bool) -> bool:
        """Whether another rank has the same results: the same bits, or on unlike devices the same up to rounding."""
        if is_alike:
            return self.bits == other.bits
        return all(
            abs(norm - its_norm) <= self.tolerance * max(norm, its_norm)
            and abs(one * norm - its_one * its_norm) <= self.tolerance * max(norm, its_norm)
            for (one, norm), (its_one, its_norm) in zip(self.projections, other.projections, strict=True)
        )


@dataclass(frozen=True)
class Given:
    """What a visit computes from.

    Attributes:
        tensor: tokens, or the spec's shape filled with random numbers.
        needs_gradient: whether an earlier stage needs the gradient of the input.
        trains: whether the stage has a backward.
        objective: applied to the output of the last stage; ``None`` on others.
        documents: of the micro-batch; ``None`` where attention has no borders.
        matrix: in place of the embedding's, for a head that borrows it.
        draw: shape -> random numbers, the same on all ranks that are compared.
    """

    tensor: Tensor
    needs_gradient: bool
    trains: bool
    objective: Objective | None
    documents: Documents | None
    matrix: Tensor | None
    draw: Callable[[Sequence[int]], Tensor]


def visit(module: StageModule, given: Given) -> Visited:
    """Run forward and backward of one micro-batch; no gradient of the module's parameters changes.

    Args:
        module: the stage, with weights.
        given: its input; the gradient of its output is drawn behind it.
    """
    tensor = given.tensor.detach().requires_grad_(given.needs_gradient)
    leaves = [one for one in module.parameters() if one.requires_grad]
    if given.matrix is not None:
        module.borrow(given.matrix)
    try:
        # Ranks that do not train the stage build it, without what it has counted.
        with gradients_by_autograd(module), without_history(module):
            with torch.set_grad_enabled(given.trains):
                output = module(tensor) if given.documents is None else module(tensor, documents=given.documents)
                if given.objective is not None:
                    output = given.objective(output, 0)
            found = [output.detach()]
            wanted = [tensor, *leaves] if given.needs_gradient else leaves
            if given.trains and wanted:
                gradient = torch.ones_like(output) if given.objective is not None else given.draw(output.shape)
                # Not backward(): gradients of the step must stay.
                made = torch.autograd.grad(output, wanted, gradient.to(output.dtype), allow_unused=True)
                found += [one for one in made if one is not None]
    finally:
        if given.matrix is not None:
            module.borrow(None)
    return Visited(digest(found), tuple(map(_projection, found)), _TOLERANCES.get(found[0].dtype, _COARSE))


def _projection(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.detach().flatten().double()
    norm = float(flat.norm())
    # Golden-angle phases: no two elements of a tensor have the same weight.
    angles = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device) * (math.pi * (3 - math.sqrt(5)))
    return (float(flat @ angles.cos()) / norm if norm else 0.0), norm
