"""Refuses state of an optimizer that no checkpoint would have, because the optimizer does not declare it."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from pipeloom.config import OptimizerConfig
from pipeloom.errors import UserError
from pipeloom.execute.stages.weights import FlatPart
from pipeloom.training.optimizers.optimizer import STEP, state_shapes

_VALUES = (Number, str, Tensor, tuple, list, dict, type(None))
"""Kinds of settings that are compared: other objects need not equal their own copies."""


class DeclaredState:
    """Compares the state that an optimizer keeps with the one that it declares.

    Args:
        config: with the declaration.
        optimizer: of ``parts``.
        parts: what it updates.
    """

    def __init__(self, config: OptimizerConfig, optimizer: torch.optim.Optimizer, parts: Sequence[FlatPart]) -> None:
        self._config, self._optimizer, self._parts = config, optimizer, parts
        self._settings = deepcopy(self._group_settings())
        self._is_checked = False

    def _group_settings(self) -> list[dict[str, Any]]:
        """For each group its settings, without the learning rate, which changes in every step."""
        return [
            {
                name: value
                for name, value in group.items()
                if name not in ("params", "lr") and isinstance(value, _VALUES)
            }
            for group in self._optimizer.param_groups
        ]

    def _changed_settings(self) -> Iterator[str]:
        """Names of settings that the optimizer has changed or added in a group."""
        for before, now in zip(self._settings, self._group_settings(), strict=True):
            yield from (name for name in now if name not in before or not _equals(before[name], now[name]))

    def check(self, *, again: bool = False) -> None:
        """Compare once, behind the first step; an optimizer may add state later, so ``again`` before a checkpoint.

        Raises:
            UserError: names every state that is not declared.
        """
        if self._is_checked and not again:
            return
        self._is_checked = True
        found: dict[str, str] = {}
        for part in self._parts:
            shape = tuple(part.parameter.shape)
            state, declared = self._optimizer.state.get(part.parameter, {}), state_shapes(self._config, part)
            # A key without a value, such as of a momentum of 0, is nothing to lose.
            for key in [key for key in state if key != STEP and key not in declared and state[key] is not None]:
                found.setdefault(str(key), _advice(key, state[key], shape, is_matrix=part.name is not None))
        parameters = {part.parameter for part in self._parts}
        for key in [key for key in self._optimizer.state if key not in parameters and self._parts]:
            name = repr(key) if isinstance(key, str) else type(key).__name__
            found.setdefault(
                f"state[{name}]", "expected a parameter of the run as the key; keep it in state[parameter]"
            )
        for name in self._changed_settings():
            found.setdefault(
                f"param_groups[{name!r}]", "expected the value that it began with; keep it in state[parameter]"
            )
        if found:
            begin = f"optimizer {self._config.name} keeps state that it does not declare; no checkpoint would have it:"
            raise UserError("\n".join([begin, *(f"  - {key}: {advice}" for key, advice in found.items())]))


def _equals(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _advice(key: object, value: object, shape: tuple[int, ...], *, is_matrix: bool) -> str:
    """What to declare for a state of a parameter of this shape."""
    if isinstance(value, Tensor) and is_matrix:
        return f"declare it in Matrices(state={{{key!r}: ...}}) with a function of its shape, here {list(value.shape)}"
    if isinstance(value, Tensor) and tuple(value.shape) == shape:
        return f"declare it in Optimizer(state=(..., {key!r}))"
    what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
    return f"expected a tensor of the parameter's shape {list(shape)}, found {what}; keep none, or one of that shape"
