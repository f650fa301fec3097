"""Forward again in the backward: what a part of the network computes is dropped, and computed once more when needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def run_part(part: Callable[..., Tensor], *inputs: Any, recomputes: bool, **settings: Any) -> Tensor:
    """Run a part of the network, and keep for its backward either what it computes or only its inputs.

    Args:
        part: a module or a function.
        inputs: of the part; tensors among them are what is kept.
        recomputes: whether the backward computes the part again.
        settings: of the part, by name.
    """
    if not (recomputes and torch.is_grad_enabled()):
        return part(*inputs, **settings)
    # Non-reentrant: one graph for hooks and the executor's backward, and recomputation ends at the last tensor needed.
    # No generator state: no part draws random numbers.
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)
