"""Update rules by name: what everything but the update itself has to know of one; torch is imported by ``make`` alone.

An update is elementwise: it is applied to pieces of flat buffers, cut by shards and stages, not to matrices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipeloom.registry import Registry

Setting = float | tuple[float, ...]
SHARED = ("betas", "eps", "momentum", "weight_decay")
"""Settings that have a field in the section ``optimizer`` of a run, which each rule may take or not."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An update rule.

    Attributes:
        summary: one line for people.
        settings: that it takes -> their defaults. ``weight_decay`` comes to ``make`` in the groups, 0 for vectors.
        state: what it keeps of each parameter: keys of ``optimizer.state[parameter]`` whose tensors have its shape.
            They begin with zeros, beside a scalar ``step`` that it may count in, and have to be changed in place, since
            stages take them along when they leave the device.
        make: ``(groups, lr=..., **settings)`` -> a ``torch.optim.Optimizer``, whose step leaves parameters alone that
            have no gradient.
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
"""Every update rule by name."""
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
