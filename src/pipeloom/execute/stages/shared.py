"""Weights of layers in several stages that share them: one copy on each rank, whose gradients are summed over ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeloom.execute.communication.group import Group, Job
from pipeloom.execute.stages.flat_order import nothing_whole
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.model import Transformer


class SharedWeights:
    """One set of weights of layers in several stages, on a rank that has some of these stages.

    All stages of the rank compute on the same memory, and add to the same gradient. It is no part of any stage's flat
    buffer: its own has the same order on every rank, so that equal gradients give updates with equal bits.

    Args:
        owner: the first of the layers, by which the parameters are named.
        layer: the module that all of these layers are.
        group: the ranks that have the set, of all replicas.
        dtype: of ``StageWeights``.
        is_whole: of ``StageWeights``.

    Attributes:
        owner, group: as given.
        weights: with their gradient; not sharded.
    """

    def __init__(
        self,
        owner: int,
        layer: nn.Module,
        group: Group,
        *,
        dtype: torch.dtype | None = None,
        is_whole: Callable[[str, tuple[int, ...]], bool] = nothing_whole,
    ) -> None:
        self.owner, self.group = owner, group
        module = nn.Module()
        # The names are those of the stages' modules.
        module.layers = nn.ModuleDict({str(owner): layer})
        self.weights = StageWeights(module, "none", 1, 0, dtype=dtype, is_whole=is_whole)
        self._is_open = False

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that counts for all that have the set."""
        return self.group.index == 0

    @property
    def gradient(self) -> Tensor:
        """The sum over the stages of the rank, and after ``reduction`` over all ranks."""
        return self.weights.gradient

    def begin(self, *, trains: bool) -> None:
        """Before a step: begin with a gradient of zeros, if backwards follow."""
        self.close()
        if trains and self.weights.order.size:
            assert self.weights.whole_gradient is not None
            self.weights.open_gradient(self.weights.whole_gradient)
            self._is_open = True

    def close(self) -> None:
        """End the accumulation."""
        self._is_open = False
        self.weights.close_gradient()

    @property
    def is_pending(self) -> bool:
        """Whether backwards of the step have added to the gradient, and it is not summed."""
        return self._is_open

    def reduction(self) -> Job:
        """Sum the gradient over the ranks that have the set."""
        self.close()
        yield self.group.all_reduce(self.weights.gradient)


def own_shared(module: nn.Module, taken: dict[int, nn.Module], groups: Mapping[int, Group]) -> Collection[str]:
    """Let a stage use the layers that earlier stages of the rank share with it.

    Args:
        module: of the stage.
        taken: first layer of a set -> the module of the rank; the stage's are added.
        groups: first layer of each set of several stages -> its ranks.

    Returns:
        Names of the stage's parameters that belong to such sets.
    """
    if not groups:
        return ()
    assert isinstance(module, Transformer)
    found: Sequence[int] = [owner for owner in groups if str(owner) in module.layers]
    for owner in found:
        module.layers[str(owner)] = taken.setdefault(owner, module.layers[str(owner)])
    return [f"layers.{owner}.{name}" for owner in found for name, _ in taken[owner].named_parameters()]
