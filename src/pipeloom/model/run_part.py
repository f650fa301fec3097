"""Activation checkpointing (recomputation)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run_part(part: Callable[..., Tensor], *inputs: Any, recomputes: bool, **settings: Any) -> Tensor:
    """Run a part of the network; save for its backward all activations, or only its inputs.

    Args:
        part: a module or a function.
        inputs: of the part.
        recomputes: whether only the inputs are saved and the backward recomputes the rest.
        settings: keyword arguments of the part.
    """
    if not (recomputes and torch.is_grad_enabled() and _trains(part, inputs)):
        return part(*inputs, **settings)
    # Non-reentrant: saved-tensor hooks and the executor's backward see one graph, and recomputation stops early.
    # No RNG state: no part draws random numbers.
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)


def _trains(part: Callable[..., Tensor], inputs: Sequence[Any]) -> bool:
    """Whether the part has a backward; for one without, ``checkpoint`` would save the inputs nevertheless."""
    own = part.parameters() if isinstance(part, nn.Module) else ()
    return any(one.requires_grad for one in (*inputs, *own) if isinstance(one, Tensor))
