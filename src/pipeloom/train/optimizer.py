"""The optimizer over this rank's parameters, and its learning rate."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipeloom.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Linear warm-up to the peak, then a cosine down to ``lr_min_fraction`` of it.

    Args:
        config: peak, warm-up and end.
        step: counted from 0.
        num_steps: steps of the run.
    """
    peak, rising = config.known_lr, config.known_lr_warmup_steps
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, num_steps - 1 - rising)
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return peak * (config.lr_min_fraction + (1 - config.lr_min_fraction) * cosine)


def make_optimizer(
    config: OptimizerConfig, decayed: Sequence[nn.Parameter], plain: Sequence[nn.Parameter], *, begins: bool = True
) -> torch.optim.Optimizer:
    """The optimizer of a run.

    Args:
        config: with its rule and settings.
        decayed: parameters whose weights decay.
        plain: those whose weights do not.
        begins: whether its state is there at once (``begin_state``).
    """
    settings = config.values
    decay = settings.pop("weight_decay", None)
    groups = [
        {"params": list(parameters), **({} if decay is None else {"weight_decay": share * decay})}
        for parameters, share in ((decayed, 1.0), (plain, 0.0))
        if parameters
    ]
    optimizer = config.rule.make(groups, lr=config.known_lr, **settings)
    if begins:
        begin_state(optimizer, config, [*decayed, *plain])
    return optimizer


def begin_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig, parameters: Iterable[Tensor]) -> None:
    """Give an optimizer the state that it begins with for some parameters, which some would make at the first step."""
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.get_default_dtype()),
            **{name: torch.zeros_like(parameter) for name in config.rule.state},
        }
