"""Optimizers by name: their settings and state; only ``make`` imports torch.

An update must be elementwise: it runs on pieces of flat buffers, cut at shards and stages, not on matrices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipeloom.registry import Registry

Setting = float | tuple[float, ...]
SHARED = ("betas", "eps", "momentum", "weight_decay")
"""Settings with a field in the section ``optimizer`` of a run file; an optimizer may take any of them."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer.

    Attributes:
        summary: one line for help texts.
        settings: setting -> default. ``weight_decay`` is passed to ``make`` in the groups, 0 for vectors.
        state: keys of ``optimizer.state[parameter]`` whose tensors have the parameter's shape. They must begin as zeros
            and be changed in place, since swaps of stages move them; a scalar ``step`` is allowed beside them.
        make: ``(groups, lr=..., **settings)`` -> a ``torch.optim.Optimizer`` whose step skips parameters without
            gradient.
    """

    summary: str
    settings: Mapping[str, Setting]
    state: tuple[str, ...]
    make: Callable[..., Any]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of each parameter, in single precision."""
        return 4 * len(self.state)


def _of_torch(name: str) -> Callable[..., Any]:
    """The class of ``torch.optim`` of that name."""

    def make(groups: list[dict[str, Any]], lr: float, **settings: Setting) -> Any:
        optim = import_module("torch.optim")  # not before: what plans and simulates starts without torch
        return getattr(optim, name)(groups, lr=lr, **settings)

    return make


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "pipeloom.optimizers", Optimizer)
"""Every optimizer by name."""
OPTIMIZERS.add(
    "adamw",
    Optimizer(
        summary="Adam with decoupled weight decay (arXiv 1711.05101)",
        settings={"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        state=("exp_avg", "exp_avg_sq"),
        make=_of_torch("AdamW"),
    ),
)
OPTIMIZERS.add(
    "sgd",
    Optimizer(
        summary="gradient descent with momentum; weight decay is added to the gradient",
        settings={"momentum": 0.9, "weight_decay": 0.1},
        state=("momentum_buffer",),
        make=_of_torch("SGD"),
    ),
)
