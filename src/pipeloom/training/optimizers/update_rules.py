"""Update rules of optimizers that PyTorch lacks, or has with other properties; their declarations are in
``pipeloom.workload.optimizers``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Muon's quintic iteration; its slope at 0 is steep, and it leaves singular values between 0.7 and 1.2 (Jordan 2024,
https://kellerjordan.github.io/posts/muon)."""
STEPS = 5
_MATCHED_RMS = 0.2
"""Root mean square of AdamW's updates, which those of Muon get (arXiv 2502.16982, section 2.2)."""


class Muon(torch.optim.Optimizer):
    """Muon (arXiv 2502.16982, algorithm 1) for groups with ``is_matrix``, AdamW for the others.

    Args:
        groups: of parameters, with ``weight_decay`` and ``is_matrix``.
        lr: learning rate of both.
        momentum: of matrices, in Nesterov's form.
        betas: of AdamW.
        eps: of AdamW.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if group.get("is_matrix"):
                for parameter in parameters:
                    self._update_matrix(parameter, group)
            elif parameters:
                self._update_others(parameters, group)

    def _update_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        change = orthogonal(gradient.lerp(momentum, group["momentum"]))
        rate = group["lr"] * _MATCHED_RMS * max(parameter.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.to(parameter.dtype), alpha=-rate)

    def _update_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[one] for one in parameters]
        adamw(
            parameters,
            [one.grad for one in parameters if one.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            fused=True,
        )


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with the singular vectors of the given one and singular values near 1, by Newton-Schulz steps.

    In bfloat16 on GPUs, as published; on CPUs, where products in bfloat16 are slow, in the type of the matrix.
    """
    x = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    one, three, five = COEFFICIENTS
    for _ in range(STEPS):
        product = x @ x.T
        x = one * x + (three * product + five * product @ product) @ x
    return x.T if is_tall else x


def adafactor(
    groups: Iterable[dict[str, Any]], lr: float, beta2_decay: float, clip: float, least_size: float
) -> torch.optim.Adafactor:
    """PyTorch's Adafactor.

    Args:
        groups: of parameters, with ``weight_decay``.
        lr: largest rate; in the first steps one over the root of their number.
        beta2_decay: the second moment's decay rate after n steps is 1 - n ** beta2_decay.
        clip: largest root mean square of an update before its scaling.
        least_size: the smallest size, as root mean square, that a parameter is taken to have.
    """
    return torch.optim.Adafactor(groups, lr=lr, beta2_decay=beta2_decay, eps=(None, least_size), d=clip, foreach=False)
