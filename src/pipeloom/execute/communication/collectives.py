"""What ranks that hold the same stage do together: the interface, one rank alone, and all ranks in one process.

A *job* is what one action of a lane beside compute does, a collective or a move: a generator that starts one thing
after the other and works on the results. It yields for each how to come to its end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

Finish = Callable[[], bool]
"""Waits for a collective or a move where that is possible, and says whether it is done. On CUDA the stream waits, not
the host; in one process nobody can wait, so it only looks."""

Job = Iterator[Finish]
"""Collectives or moves, one after the other."""

Reduction = Literal["sum", "max"]


class Group(Protocol):
    """Ranks that work together; each calls the same methods in the same order.

    Attributes:
        size: number of ranks.
        index: this rank's place among them.
    """

    size: int
    index: int

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        """Put every rank's shard into ``whole``, in the order of the ranks. ``[size * n]`` from ``[n]``."""
        ...

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Add up ``whole`` over the ranks and put this rank's part into ``shard``. ``[n]`` from ``[size * n]``."""
        ...

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:
        """Replace the tensor by its sum over the ranks, or by the largest of each element."""
        ...


class Alone:
    """A group of one: nothing to exchange."""

    size = 1
    index = 0

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        """Copy."""
        whole.copy_(shard)
        return already_done

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Copy."""
        shard.copy_(whole)
        return already_done

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:  # noqa: ARG002  it is its own
        """Nothing."""
        return already_done


@dataclass(frozen=True)
class Groups:
    """The groups of a rank whose collectives the data-parallel lane runs.

    Attributes:
        shard: holds the shards of one copy of the stages.
        copies: holds the same shard of every copy.
        tensor: holds the other slices of the same stages.
    """

    shard: Group
    copies: Group
    tensor: Group = field(default_factory=Alone)


def already_done() -> bool:
    """The end of what is over at once."""
    return True


@dataclass
class _Meeting:
    """One collective of the ranks of one process: what each brought, by its place in the group."""

    brought: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    is_done: bool = False


class InProcessGroups:
    """Groups whose ranks share one process and one thread: deterministic, for tests, debugging and teaching.

    Args:
        members: the ranks of the group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._meetings: dict[int, _Meeting] = {}

    def group(self, index: int) -> Group:
        """The group as one of its ranks sees it."""
        return _InProcessGroup(self, index) if self.size > 1 else Alone()

    def join(self, number: int, index: int, tensors: tuple[Tensor, Tensor], work: "_Work") -> Finish:
        """Bring tensors to collective ``number``; whoever comes last does the work for all."""
        meeting = self._meetings.setdefault(number, _Meeting())
        meeting.brought[index] = tensors
        if len(meeting.brought) == self.size:
            # It writes into tensors that may be parameters, which autograd forbids otherwise.
            with torch.no_grad():
                work([meeting.brought[member] for member in range(self.size)])
            meeting.is_done = True
            meeting.brought.clear()
            # Whoever waits has the meeting itself; kept here, they would add up over a run.
            del self._meetings[number]
        return lambda: meeting.is_done


_Work = Callable[[Sequence[tuple[Tensor, Tensor]]], None]


class _InProcessGroup:
    def __init__(self, shared: InProcessGroups, index: int) -> None:
        self.size = shared.size
        self.index = index
        self._shared = shared
        self._number = 0

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        return self._join(whole, shard, _gather)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        return self._join(shard, whole, _reduce_scatter)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:
        return self._join(tensor, tensor, partial(_all_reduce, reduction=reduction))

    def _join(self, result: Tensor, given: Tensor, work: _Work) -> Finish:
        # All ranks make the same calls in the same order, so its number names a collective.
        self._number += 1
        return self._shared.join(self._number, self.index, (result, given), work)


def _gather(brought: Sequence[tuple[Tensor, Tensor]]) -> None:
    joined = torch.cat([shard for _, shard in brought])
    for whole, _ in brought:
        whole.copy_(joined)


def _reduce_scatter(brought: Sequence[tuple[Tensor, Tensor]]) -> None:
    # One sum for all ranks, so that what they hold has the same bits.
    total = torch.stack([whole for _, whole in brought]).sum(0)
    for (shard, _), part in zip(brought, total.chunk(len(brought)), strict=True):
        shard.copy_(part)


def _all_reduce(brought: Sequence[tuple[Tensor, Tensor]], reduction: Reduction) -> None:
    everyone = torch.stack([tensor for tensor, _ in brought])
    result = everyone.sum(0) if reduction == "sum" else everyone.amax(0)
    for tensor, _ in brought:
        tensor.copy_(result)
