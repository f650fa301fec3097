"""Gradient norm and clipping for a model that is distributed over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_ROW = 8192
"""Elements of a part of a gradient. On a CPU PyTorch accumulates the squares of a tensor in few float32 partial sums:
the norm of 27 million normal numbers is 0.15 % too low, and 5e-9 in parts of this size, which takes no longer."""
_BLOCK_ROWS = 4096


def squared_gradient_norm(gradients: Sequence[Tensor]) -> float:
    """Sum of squares of gradients; the sum over all ranks is that of the whole model."""
    return squared_norm(gradient_norms(gradients))


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Norms of the parts of gradients, of at least single precision; for ``squared_norm``."""
    norms: list[Tensor] = []
    for gradient in gradients:
        flat, dtype = gradient.flatten(), torch.promote_types(gradient.dtype, torch.float32)
        num_rows = flat.numel() // _ROW
        rows, rest = flat[: num_rows * _ROW].view(num_rows, _ROW), flat[num_rows * _ROW :]
        # In blocks, since on a CPU narrow numbers are first copied to the wider dtype.
        norms += [torch.linalg.vector_norm(block, dim=1, dtype=dtype) for block in rows.split(_BLOCK_ROWS)]
        norms.append(torch.linalg.vector_norm(rest, dtype=dtype))
    return norms


def squared_norm(norms: Sequence[Tensor]) -> float:
    """The squared norm of all gradients together, from the norms of their parts."""
    return float(torch.hstack(list(norms)).double().square().sum()) if norms else 0.0


def clip(parameters: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients to a norm of at most ``limit``; ``norm`` is that of all of them, on all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if norm > limit and gradients:
        torch._foreach_mul_(gradients, limit / norm)


def clipped_step(optimizer: Any, parameters: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale this rank's gradients by the whole model's gradient norm, and do an optimizer step.

    Args:
        optimizer: of ``torch.optim``, or what has its ``step``. Fused ones scale in their kernel, which saves a pass
            over the gradients; they have the attributes that ``torch.amp.GradScaler`` uses for that.
        parameters: this rank's, or those of them that have a gradient now.
        norm: of the whole model's gradient.
        limit: largest norm; infinity changes nothing.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if norm <= limit or not gradients:  # a rank may have frozen stages only
        optimizer.step()
    # The kernels read the scale in single precision.
    elif getattr(optimizer, "_step_supports_amp_scaling", False) and gradients[0].dtype != torch.float64:
        optimizer.grad_scale = torch.tensor(norm / limit, dtype=torch.float32, device=gradients[0].device)
        try:
            optimizer.step()
        finally:
            optimizer.grad_scale = None
    else:
        clip(parameters, norm, limit)
        optimizer.step()
