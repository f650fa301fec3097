"""A group whose collectives a stage waits for in the middle of its computation: tensor parallelism."""

from torch import Tensor

from pipeloom.execute.collectives import Finish, Group
from pipeloom.execute.turns import wait_for


class BlockingGroup:
    """The ranks that share a stage's matrices, as ``model.tensor_parallel`` wants them.

    Args:
        group: the ranks. Nothing else uses it, since its collectives come in the order of the computation.
    """

    def __init__(self, group: Group) -> None:
        self.size = group.size
        self.index = group.index
        self._group = group

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """All-gather, ``[size * n]`` from ``[n]``."""
        _finish(self._group.gather(whole, part))

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Reduce-scatter, ``[n]`` from ``[size * n]``."""
        _finish(self._group.reduce_scatter(part, whole))

    def sum(self, tensor: Tensor) -> None:
        """All-reduce by sum."""
        _finish(self._group.all_reduce(tensor))

    def max(self, tensor: Tensor) -> None:
        """All-reduce by maximum."""
        _finish(self._group.all_reduce(tensor, "max"))


def _finish(finish: Finish) -> None:
    if not finish():  # only where ranks share a thread of control is it not over yet
        wait_for(finish)
