"""What collectives are to those who run them: a group of ranks, and operations that are waited for.

A *job* is the work of one action of a lane: a generator that starts asynchronous operations one by one. It yields a
``Finish`` for each, and uses the result after that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from pipeloom.runs.action_log import Activity

Finish = Callable[[], bool]
"""Waits for a collective or a move and returns whether it is finished. On CUDA the stream waits, not the host. With all
ranks in one process it cannot wait, and only returns the state."""

Job = Iterator[Finish]
"""Collectives or moves, one by one."""

Reduction = Literal["sum", "max"]


class Group(Protocol):
    """A process group; all its ranks call the same methods in the same order.

    Attributes:
        size: number of ranks.
        index: of this rank in the group.
    """

    size: int
    index: int

    def gather(self, whole: Tensor, part: Tensor) -> Finish:
        """All-gather the shards into ``whole``, in the order of the ranks: ``[size * n]`` from ``[n]``."""
        ...

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        """Sum ``whole`` over the ranks; write this rank's part to ``part``: ``[n]`` from ``[size * n]``."""
        ...

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:
        """Replace the tensor by its sum or its element-wise maximum over the ranks."""
        ...

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Send tensors to the next rank, and receive as many from the one before."""
        ...

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Send a tensor to each rank and receive one from each, in the order of the ranks; this rank's own is copied.

        Tensors may be empty, if they are on both sides.
        """
        ...


class Alone:
    """A group of one rank, without communication."""

    size = 1
    index = 0

    def gather(self, whole: Tensor, part: Tensor) -> Finish:
        """Copy."""
        whole.copy_(part)
        return already_done

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        """Copy."""
        part.copy_(whole)
        return already_done

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:  # noqa: ARG002  it is its own
        """Nothing."""
        return already_done

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Copy."""
        return self.exchange(received, sent)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Copy."""
        for one, other in zip(received, sent, strict=True):
            one.copy_(other)
        return already_done


@dataclass(frozen=True)
class Groups:
    """The groups of a rank for the data-parallel lane.

    Attributes:
        shard: ranks with the shards of one copy of the stages.
        copies: ranks with the same shard of all copies.
        tensor: tensor-parallel ranks of the same stages.
    """

    shard: Group
    copies: Group
    tensor: Group = field(default_factory=Alone)


def already_done() -> bool:
    """The ``Finish`` of an operation that is finished already."""
    return True


def noted(finish: Finish, activity: Activity) -> Finish:
    """The same, with its end noted; on CUDA, the end of the wait, which only the stream does."""

    def finish_and_note() -> bool:
        is_done = finish()
        activity.end()
        return is_done

    return finish_and_note
