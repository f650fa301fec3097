"""Collectives of ranks of one host on CPUs, through memory that they share (``shared_memory``)."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import StallError
from pipeloom.execute.communication.group import Finish, Reduction, noted
from pipeloom.execute.communication.shared_memory import Listener, Receipt, SharedReceiver, SharedSender, connect
from pipeloom.execute.processes.world import World, peer_errors
from pipeloom.runs.action_log import NOTHING, Activity

_MOST_RANKS = 16
"""Of a group: each rank has six file descriptors for each other one."""
_WHOLE_BYTES = 64 * 1024
"""Up to this size ranks exchange whole tensors and all of them sum; above, each sums a part of the tensor for all."""
_PIECE_BYTES = 4 * 2**20
"""Largest message of gathers and reductions: between two ranks there are at most two in each direction at any time."""
_OPS: Mapping[Reduction, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


class Link(NamedTuple):
    """Both directions between this rank and another one."""

    sender: SharedSender
    receiver: SharedReceiver


def links_of(groups: Sequence[Sequence[int]], world: World) -> dict[int, Mapping[int, Link]]:
    """Which of the groups consist of ranks that share memory. Collective: every process of the world calls it alike.

    Args:
        groups: ranks of each; a rank is in one of them at most.
        world: this process among the others.

    Returns:
        Number of such a group -> rank -> this process' link to it; no links for groups without this process.

    Raises:
        PeerLostError: another process ended.
    """
    possible = {number: ranks for number, ranks in enumerate(groups) if 1 < len(ranks) <= _MOST_RANKS}
    if not possible:
        return {}
    mine = next((number for number, ranks in possible.items() if world.rank in ranks), None)
    peers = [rank for rank in ((world.rank,) if mine is None else possible[mine]) if rank != world.rank]
    with closing(Listener(is_open=bool(peers), senders=len(peers))) as listener:
        names = _of_all(listener.name, world)
        ends = {rank: found for rank in peers if (found := connect(names[rank], world.rank)) is not None}
        # One pair without shared memory is enough for its group to use gloo; all processes have to decide alike.
        shares = [bool(one) for one in _of_all(torch.tensor([len(ends) == len(peers)]), world)]
        links = {number: dict[int, Link]() for number, ranks in possible.items() if all(shares[one] for one in ranks)}
        if mine not in links:
            for one in ends.values():
                one.close()
            return dict(links)
        for _ in peers:
            rank, accepted = listener.accept(world.timeout.total_seconds())
            name = f"process {rank}"
            links[mine][rank] = Link(SharedSender(ends[rank], name), SharedReceiver(accepted, name))
    return dict(links)


def _pieces(tensor: Tensor, num_parts: int = 1) -> list[slice]:
    """A flat tensor in pieces, each of which is sent in so many parts; at least one piece."""
    step = num_parts * _PIECE_BYTES // tensor.element_size()
    return [slice(begin, begin + step) for begin in range(0, max(1, tensor.numel()), step)]


def _of_all(tensor: Tensor, world: World) -> list[Tensor]:
    """A tensor of each process, by rank."""
    found = [torch.empty_like(tensor) for _ in range(world.size)]
    with peer_errors("a process ended while ranks of a host connected"):
        dist.all_gather(found, tensor, group=world.control)
    return found


class SharedGroup:
    """A group whose ranks share memory. A rank copies what it sends, and computes on what it receives where that is.

    Nothing runs beside the calling thread: an operation has sent its tensors when it returns, and takes those of the
    others when its end is waited for. Sums are in the order of the ranks, so that they have the same bits on all of
    them and in every run.

    Args:
        links: to each other rank of the group.
        ranks: its processes.
        index: of this rank in the group.
        activity: what its collectives are noted as.
        timeout_s: longest wait for another rank.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        ranks: Sequence[int],
        index: int,
        activity: Activity = NOTHING,
        *,
        timeout_s: float,
    ) -> None:
        self.size, self.index = len(ranks), index
        self._ranks, self._activity, self._timeout_s = ranks, activity, timeout_s
        # Each rank begins with its own neighbor, so that they do not all wait for the same rank first.
        self._others = [(index + step) % self.size for step in range(1, self.size)]
        self._links = {other: links[ranks[other]] for other in self._others}
        for sender, receiver in self._links.values():
            weakref.finalize(self, sender.end)
            weakref.finalize(self, receiver.end)

    def gather(self, whole: Tensor, part: Tensor) -> Finish:
        """All-gather."""
        parts, own = whole.view(self.size, -1), part.view(-1)
        return self._one_by_one(
            self._exchanging(list(parts[:, piece]), [own[piece]] * self.size) for piece in _pieces(own)
        )

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        """Sum, each rank its part."""
        parts, own = whole.view(self.size, -1), part.view(-1)
        return self._one_by_one(self._reducing(list(parts[:, piece]), own[piece], "sum") for piece in _pieces(own))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:
        """All-reduce."""
        flat = tensor.view(-1)
        if tensor.nbytes <= _WHOLE_BYTES:
            return self._one_by_one(iter([self._reducing([flat] * self.size, flat, reduction)]))
        return self._one_by_one(self._sharing(flat[piece], reduction) for piece in _pieces(flat, self.size))

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Send to the next rank and receive from the one before."""
        before, after = (self.index - 1) % self.size, (self.index + 1) % self.size
        for one in sent:
            self._links[after].sender.send(one)
        receipts = [self._links[before].receiver.receive_like(one) for one in received]

        def copy() -> None:
            for tensor, receipt in zip(received, receipts, strict=True):
                self._copy({before: tensor}, {before: receipt})

        return self._finish(copy)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """All-to-all."""
        return self._one_by_one(iter([self._exchanging(received, sent)]))

    def _sharing(self, tensor: Tensor, reduction: Reduction) -> Callable[[], None]:
        """Start an all-reduce in which each rank reduces a part; returns what does the rest."""
        parts = tensor.tensor_split(self.size)
        own = parts[self.index]
        reduce = self._reducing(parts, own, reduction)

        def reduce_and_gather() -> None:
            reduce()
            self._copy(parts, self._start([own] * self.size, parts))

        return reduce_and_gather

    def _reducing(self, parts: Sequence[Tensor], result: Tensor, reduction: Reduction) -> Callable[[], None]:
        """Send each other rank its part; returns what combines this rank's part with those of the others."""
        own = parts[self.index]
        receipts = self._start(parts, [own] * self.size)
        return lambda: self._reduce(own, receipts, result, reduction)

    def _exchanging(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Callable[[], None]:
        """Send each other rank its tensor; returns what takes those of the others."""
        receipts = self._start(sent, received)
        received[self.index].copy_(sent[self.index])
        return lambda: self._copy(received, receipts)

    def _one_by_one(self, begun: Iterator[Callable[[], None]]) -> Finish:
        """Finish operations, of which the first begins now, and each other one when the one before it has ended."""
        first = next(begun)

        def work() -> None:
            first()
            for finish in begun:
                finish()

        return self._finish(work)

    def _start(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> dict[int, Receipt]:
        """Send each other rank its tensor, and expect one like these from each; empty ones are not sent."""
        for other in self._others:
            if sent[other].numel():
                self._links[other].sender.send(sent[other])
        return {
            other: self._links[other].receiver.receive_like(received[other])
            for other in self._others
            if received[other].numel()
        }

    def _finish(self, work: Callable[[], None]) -> Finish:
        self._activity.begin()

        def finish() -> bool:
            work()
            return True

        return noted(finish, self._activity)

    def _reduce(self, own: Tensor, receipts: Mapping[int, Receipt], result: Tensor, reduction: Reduction) -> None:
        """Combine this rank's tensor with those of the others; it may be the result's memory, and stays otherwise."""
        for other, receipt in receipts.items():
            self._wait(other, receipt)
        parts = [receipts[rank].view() if rank in receipts else own for rank in range(self.size)]
        if own.dtype.itemsize < torch.float32.itemsize and reduction == "sum":
            torch.sum(torch.stack(parts), 0, out=result)  # which rounds once
        else:
            total = parts[0]
            for rank, part in enumerate(parts[1:], start=1):
                # Memory of the first rank's message, until this rank's own tensor is in the sum.
                total = _OPS[reduction](total, part, out=result if rank >= self.index else parts[0])
        for receipt in receipts.values():
            receipt.give_back()

    def _copy(self, received: Sequence[Tensor] | Mapping[int, Tensor], receipts: Mapping[int, Receipt]) -> None:
        for other, receipt in receipts.items():
            self._wait(other, receipt)
            received[other].copy_(receipt.view())
            receipt.give_back()

    def _wait(self, other: int, receipt: Receipt) -> None:
        if not receipt.is_done() and not receipt.wait(self._timeout_s):
            raise StallError(
                f"process {self._ranks[other]} did not come in time: Timed out after {self._timeout_s:g} s"
            )
