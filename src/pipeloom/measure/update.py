"""The update after a step's pipeline, on copies of the weights: gradient norm, clipping, optimizer step."""

from collections.abc import Callable, Iterable

import torch

from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.clipping import clipped_step, squared_gradient_norm
from pipeloom.execute.stages.weights import FlatPart

MakeOptimizer = Callable[[list[FlatPart]], torch.optim.Optimizer]
"""What is updated -> optimizer of a run."""


class Update:
    """An update of all parameters of a rank.

    Args:
        make: makes the optimizer.
        clip_grad_norm: limit of the gradient norm.
        parts: what is updated; they stay unchanged.
        world: this process and the others.

    Attributes:
        size: number of parameters.
    """

    def __init__(self, make: MakeOptimizer, clip_grad_norm: float, parts: Iterable[FlatPart], world: World) -> None:
        self._limit, self._world = clip_grad_norm, world
        copies = [part.with_tensor(torch.zeros_like(part.parameter)) for part in parts]
        self._copies = [part.parameter for part in copies]
        self._gradients = [torch.empty_like(copy, dtype=copy.grad_dtype) for copy in self._copies]
        for copy, gradient in zip(self._copies, self._gradients, strict=True):
            copy.grad = gradient
        self._optimizer = make(copies)
        self.size = sum(copy.numel() for copy in self._copies)

    def fill_gradients(self) -> None:
        """Fill all gradients with values large enough to be clipped."""
        for gradient in self._gradients:
            gradient.fill_(1.0)

    def step(self) -> None:
        """Compute the norm over all ranks, clip, and do an optimizer step. Collective."""
        self._clip_and_step(self._world.sum([0.0, squared_gradient_norm(self._gradients)])[1])

    def step_alone(self) -> None:
        """As ``step`` by the norm of these parameters, without other ranks."""
        self._clip_and_step(squared_gradient_norm(self._gradients))

    def _clip_and_step(self, squares: float) -> None:
        clipped_step(self._optimizer, self._copies, squares**0.5, self._limit)
