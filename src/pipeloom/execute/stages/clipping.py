"""The norm of the gradient of a model that ranks share out, and clipping by it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def squared_gradient_norm(gradients: Sequence[Tensor]) -> float:
    """Sum of the squares of some gradients; add up over ranks that share the model out for the whole model's."""
    return squared_norm(gradient_norms(gradients))


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient."""
    return list(torch._foreach_norm(list(gradients))) if gradients else []  # noqa: SLF001


def squared_norm(norms: Sequence[Tensor]) -> float:
    """The square of the norm of all gradients together, from that of each."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms))).double() ** 2) if norms else 0.0


def clip_gradients(parameters: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale this rank's gradients as the whole model's gradient norm demands.

    Args:
        parameters: this rank's.
        norm: of the whole model's gradient.
        limit: largest norm; infinity changes nothing.
    """
    if norm <= limit:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, limit / norm)
