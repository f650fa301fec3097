"""LOMO (arXiv 2306.09782) and AdaLomo (arXiv 2310.10195): updates with little or no state.

They can run stage by stage behind a stage's backwards; where in a step they run is not part of the rules.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.training.optimizers.fused_adamw import Rule

_LEAST_SQUARE = 1e-30
"""Added to squares of gradients (lomo-optim), so that rows of zeros have a root."""


class Lomo(Rule):
    """Gradient descent with decoupled weight decay, and without state.

    Args:
        groups: as of ``Rule``.
        lr: learning rate.
        weight_decay: of the weights.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self.state[parameter]["step"] += 1
        if group["weight_decay"]:
            torch._foreach_mul_(list(parameters), 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(list(parameters), list(gradients), alpha=-group["lr"])


class AdaLomo(Rule):
    """Factored second moments, normalized for each parameter, relative to its size (arXiv 2310.10195, algorithm 1).

    Args:
        groups: as of ``Rule``, of whole parameters.
        lr: learning rate, relative to the size of a parameter.
        beta2_decay: the second moment's decay rate in step n is 1 - n ** beta2_decay.
        clip: largest root mean square of an update before its scaling.
        least_size: the smallest size, as root mean square, that a parameter is taken to have.
        weight_decay: of the weights.
    """

    def __init__(  # noqa: PLR0917  settings are passed by name
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        beta2_decay: float,
        clip: float,
        least_size: float,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "beta2_decay": beta2_decay, "clip": clip, "least_size": least_size}
        super().__init__(groups, {**settings, "weight_decay": weight_decay})

    def _update(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], group: dict[str, Any]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            change = self._change(self.state[parameter], gradient, group)
            change /= (_rms(change) / group["clip"]).clamp_(min=1.0)
            rate = group["lr"] * _rms(parameter).clamp_(min=group["least_size"])
            parameter.mul_(1 - rate * group["weight_decay"]).sub_(rate * change)

    def _change(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient over the root of its second moment, which is updated."""
        state["step"] += 1
        new, squares = float(state["step"]) ** group["beta2_decay"], gradient.square() + _LEAST_SQUARE
        if "variance" in state:
            return gradient * state["variance"].lerp_(squares, new).rsqrt()
        row = state["row_var"].lerp_(squares.mean(-1, keepdim=True), new)
        column = state["col_var"].lerp_(squares.mean(-2, keepdim=True), new)
        return gradient * (row / row.mean(-2, keepdim=True)).rsqrt() * column.rsqrt()


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()
