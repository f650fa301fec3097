"""Groups of ``torch.distributed``: NCCL on CUDA devices, gloo on CPUs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.communication.group import Finish, Reduction, noted
from pipeloom.execute.processes.world import network_reason
from pipeloom.runs.action_log import NOTHING, Activity

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""PyTorch 2.13 renamed both."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class NcclGroup:
    """A group on CUDA devices; the current stream waits.

    Args:
        group: of ``torch.distributed``.
        ranks: its processes.
        index: of this rank in the group.
        activity: what its collectives are noted as.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], index: int, activity: Activity = NOTHING
    ) -> None:
        self.size = len(ranks)
        self.index = index
        self._group = group
        self._ranks = ranks
        self._activity = activity
        self._peers = [rank for place, rank in enumerate(ranks) if place != index]

    def gather(self, whole: Tensor, part: Tensor) -> Finish:
        """All-gather."""
        return self._started(lambda: _all_gather(whole, part, group=self._group, async_op=True))

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        """Reduce-scatter."""
        return self._started(lambda: _reduce_scatter(part, whole, group=self._group, async_op=True))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:
        """All-reduce."""
        return self._started(lambda: dist.all_reduce(tensor, _OPS[reduction], group=self._group, async_op=True))

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Send to the next rank and receive from the one before, in one call: alone, each could wait for the other."""
        before, after = (self.index - 1) % self.size, (self.index + 1) % self.size
        both = [(dist.irecv, one, before) for one in received] + [(dist.isend, one, after) for one in sent]
        messages = [dist.P2POp(act, one, group=self._group, group_peer=peer) for act, one, peer in both]
        self._activity.begin()
        with _peer_errors(self._peers):
            works = dist.batch_isend_irecv(messages)
        finishes = [_end_of(work, self._peers) for work in works]
        return noted(lambda: all(finish() for finish in finishes), self._activity)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """All-to-all."""
        return self._started(lambda: dist.all_to_all(list(received), list(sent), group=self._group, async_op=True))

    def _started(self, start: Callable[[], dist.Work | None]) -> Finish:
        self._activity.begin()
        with _peer_errors(self._peers):
            return noted(_end_of(start(), self._peers), self._activity)


class GlooGroup(NcclGroup):
    """A group on CPUs of several hosts, whose collectives are messages between all pairs of ranks.

    Every rank posts its receives before its sends. Gloo's own collectives send first: if one rank is later than
    another, its ready message queues behind its data on the same connection, and the two directions run one after the
    other. A reduction exchanges parts and sums them locally: half the bytes of gloo's reduce-scatter, which sends as
    much as an all-reduce.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], index: int, activity: Activity = NOTHING
    ) -> None:
        super().__init__(group, ranks, index, activity)
        self._received: Tensor | None = None
        # Each rank begins with its own neighbor, so that they do not all send to the same rank first.
        self._others = [(index + step) % self.size for step in range(1, self.size)]

    def gather(self, whole: Tensor, part: Tensor) -> Finish:
        """Send the shard to every other rank."""
        parts = whole.view(self.size, -1)
        finish = self._exchange(parts, [part] * self.size)
        parts[self.index].copy_(part)
        return finish

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        """Send every other rank its part, and sum the received parts in the order of the ranks."""
        received, parts = self._room_for(whole).view(self.size, -1), whole.view(self.size, -1)
        arrive = self._exchange(received, list(parts))
        received[self.index].copy_(parts[self.index])

        def finish() -> bool:
            arrive()
            # In one call and a fixed order, so that the sum has the same bits in every run.
            torch.sum(received, 0, out=part)
            return True

        return finish

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """All-to-all."""
        finish = self._exchange(received, sent)
        received[self.index].copy_(sent[self.index])
        return finish

    def _exchange(self, received: Sequence[Tensor] | Tensor, sent: Sequence[Tensor]) -> Finish:
        """Start to receive a part from each other rank, then to send it one; empty ones are not sent."""
        sources = [other for other in self._others if received[other].numel()]
        targets = [other for other in self._others if sent[other].numel()]
        self._activity.begin()
        with _peer_errors(self._peers):
            works = [dist.irecv(received[other], group=self._group, group_src=other) for other in sources]
            works += [dist.isend(sent[other], group=self._group, group_dst=other) for other in targets]
        peers = [self._ranks[other] for other in (*sources, *targets)]
        finishes = [_end_of(work, [peer]) for work, peer in zip(works, peers, strict=True)]
        return noted(lambda: all(finish() for finish in finishes), self._activity)

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Send to the next rank and receive from the one before; receives are posted first."""
        before, after = (self.index - 1) % self.size, (self.index + 1) % self.size
        self._activity.begin()
        with _peer_errors(self._peers):
            works = [dist.irecv(one, group=self._group, group_src=before) for one in received]
            works += [dist.isend(one, group=self._group, group_dst=after) for one in sent]
        peers = [before] * len(received) + [after] * len(sent)
        finishes = [_end_of(work, [self._ranks[peer]]) for work, peer in zip(works, peers, strict=True)]
        return noted(lambda: all(finish() for finish in finishes), self._activity)

    def _room_for(self, whole: Tensor) -> Tensor:
        """The group's receive buffer; one is enough, since the group runs one collective at a time."""
        if self._received is None or self._received.numel() < whole.numel() or self._received.dtype != whole.dtype:
            self._received = torch.empty_like(whole)
        return self._received[: whole.numel()]


def _end_of(work: dist.Work | None, peers: Sequence[int]) -> Finish:
    assert work is not None, "this rank is not in the group"

    def finish() -> bool:
        with _peer_errors(peers):
            work.wait()
        return True

    return finish


@contextmanager
def _peer_errors(peers: Sequence[int]) -> Iterator[None]:
    """Context that converts errors of collectives; gloo has one type for all of them.

    Args:
        peers: processes of which one is missing.
    """
    try:
        yield
    except RuntimeError as error:
        one = f"process {peers[0]}" if len(peers) == 1 else f"one of processes {', '.join(map(str, peers))}"
        # gloo has no type for a timeout.
        if "timed out" in str(error).lower():
            raise StallError(f"{one} did not come in time: {network_reason(error)}") from error
        raise PeerLostError(f"{one} closed the connection: {network_reason(error)}") from error
