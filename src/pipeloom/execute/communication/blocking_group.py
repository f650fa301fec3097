"""A group whose collectives a stage waits for in the middle of its computation: tensor parallelism."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.communication.collectives import Finish, Group
from pipeloom.execute.communication.turns import wait_for


class BlockingGroup:
    """The ranks that share a stage's matrices, as ``model.tensor_parallel`` wants them.

    Args:
        group: the ranks. Nothing else uses it, since its collectives come in the order of the computation.
        processes: their numbers, for people.

    Attributes:
        busy_s: seconds that the host has spent in exchanges; on CUDA, where it does not wait for them, issuing them.
    """

    def __init__(self, group: Group, processes: Sequence[int] = ()) -> None:
        self.size = group.size
        self.index = group.index
        self._group = group
        self._processes = processes
        self._exchange = ""
        self.busy_s = 0.0

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """All-gather, ``[size * n]`` from ``[n]``."""
        self._run("gather", lambda: self._group.gather(whole, part))

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Reduce-scatter, ``[n]`` from ``[size * n]``."""
        self._run("reduce-scatter", lambda: self._group.reduce_scatter(part, whole))

    def sum(self, tensor: Tensor) -> None:
        """All-reduce by sum."""
        self._run("sum", lambda: self._group.all_reduce(tensor))

    def max(self, tensor: Tensor) -> None:
        """All-reduce by maximum."""
        self._run("maximum", lambda: self._group.all_reduce(tensor, "max"))

    def position(self) -> str:
        """The exchange that the rank is in, for people; empty between exchanges."""
        exchange = self._exchange  # read once: another thread may ask meanwhile
        return exchange and f"in a {exchange} of tensor-parallel processes {', '.join(map(str, self._processes))}"

    def _run(self, exchange: str, start: Callable[[], Finish]) -> None:
        begin_s = time.perf_counter()
        self._exchange = exchange
        try:
            finish = start()
            if not finish():  # only where ranks share a thread of control is it not over yet
                wait_for(finish)
        except (PeerLostError, StallError) as error:
            raise type(error)(f"{self.position()}: {error}") from error
        self._exchange = ""
        self.busy_s += time.perf_counter() - begin_s
