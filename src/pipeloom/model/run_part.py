"""Activation checkpointing (recomputation)."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_Output = TypeVar("_Output")


def run_part(part: Callable[..., _Output], *inputs: Any, recomputes: bool, **settings: Any) -> _Output:
    """Run a part of the network; save for its backward all activations, or only its inputs.

    Args:
        part: a module, a method of one, or a function.
        inputs: of the part.
        recomputes: whether only the inputs are saved and the backward recomputes the rest.
        settings: keyword arguments of the part.
    """
    if not (recomputes and torch.is_grad_enabled() and _trains(part, inputs)):
        return part(*inputs, **settings)
    # Non-reentrant: saved-tensor hooks and the executor's backward see one graph, and recomputation stops early.
    # No RNG state: no part draws random numbers.
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)


def _trains(part: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether the part has a backward; for one without, ``checkpoint`` would save the inputs nevertheless."""
    module = getattr(part, "__self__", part)
    own = module.parameters() if isinstance(module, nn.Module) else ()
    return any(one.requires_grad for one in (*inputs, *own) if isinstance(one, Tensor))
