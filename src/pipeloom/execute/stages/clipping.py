"""Gradient norm and clipping for a model that is distributed over ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def squared_gradient_norm(gradients: Sequence[Tensor]) -> float:
    """Sum of squares of gradients; the sum over all ranks is that of the whole model."""
    return squared_norm(gradient_norms(gradients))


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient."""
    return list(torch._foreach_norm(list(gradients))) if gradients else []  # noqa: SLF001


def squared_norm(norms: Sequence[Tensor]) -> float:
    """The squared norm of all gradients together, from the norm of each."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms))).double() ** 2) if norms else 0.0


def clip_gradients(parameters: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale this rank's gradients by the whole model's gradient norm.

    Args:
        parameters: this rank's.
        norm: of the whole model's gradient.
        limit: largest norm; infinity changes nothing.
    """
    if norm <= limit:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:  # a rank may have frozen stages only
        torch._foreach_mul_(gradients, limit / norm)
