"""Activation checkpointing (recomputation)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def run_part(part: Callable[..., Tensor], *inputs: Any, recomputes: bool, **settings: Any) -> Tensor:
    """Run a part of the network; save for its backward all activations, or only its inputs.

    Args:
        part: a module or a function.
        inputs: of the part.
        recomputes: whether only the inputs are saved and the backward recomputes the rest.
        settings: keyword arguments of the part.
    """
    if not (recomputes and torch.is_grad_enabled()):
        return part(*inputs, **settings)
    # Non-reentrant: saved-tensor hooks and the executor's backward see one graph, and recomputation stops early.
    # No RNG state: no part draws random numbers.
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)
