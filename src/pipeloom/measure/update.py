"""What follows a step's pipeline, on copies of weights: the norm of the gradient, clipping, the optimizer."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.clipping import clip_gradients, squared_gradient_norm

MakeOptimizer = Callable[[list[nn.Parameter], list[nn.Parameter]], torch.optim.Optimizer]
"""(parameters whose weights decay, those whose weights do not) -> optimizer of a run."""


class Update:
    """An update of all parameters of a rank.

    Args:
        make: the optimizer.
        clip_grad_norm: largest norm of the gradient.
        parts: parameters whose weights decay, and those whose weights do not; they stay as they are.
        world: this process among the others.

    Attributes:
        size: number of parameters.
    """

    def __init__(
        self, make: MakeOptimizer, clip_grad_norm: float, parts: Iterable[Iterable[Tensor]], world: World
    ) -> None:
        self._limit, self._world = clip_grad_norm, world
        decayed, plain = ([nn.Parameter(torch.zeros_like(p)) for p in part] for part in parts)
        self._copies = [*decayed, *plain]
        self._gradients = [torch.empty_like(copy) for copy in self._copies]
        for copy, gradient in zip(self._copies, self._gradients, strict=True):
            copy.grad = gradient
        self._optimizer = make(decayed, plain)
        self.size = sum(copy.numel() for copy in self._copies)

    def fill_gradients(self) -> None:
        """Give every gradient values that are large enough to be clipped."""
        for gradient in self._gradients:
            gradient.fill_(1.0)

    def step(self) -> None:
        """Norm over all ranks, which call this together, clipping and the optimizer's rule."""
        squares = self._world.sum([0.0, squared_gradient_norm(self._gradients)])[1]
        clip_gradients(self._copies, squares**0.5, self._limit)
        self._optimizer.step()
