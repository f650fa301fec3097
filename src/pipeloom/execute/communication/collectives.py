"""What ranks that hold the same stage do together: collectives over gloo on CPUs, over NCCL on CUDA devices.

A *job* is what one action of a lane beside compute does, a collective or a move: a generator that starts one thing
after the other and works on the results. It yields for each how to come to its end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.processes.world import World
from pipeloom.model.tensor_parallel import TensorGroup
from pipeloom.workload.layout import Layout

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""PyTorch 2.13 renamed both."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

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


class BlockingGroup(TensorGroup):
    """The ranks that share a stage's matrices, as ``model.tensor_parallel`` wants them.

    Args:
        group: the ranks. Nothing else uses it, since its collectives come in the order of the computation.
        processes: their numbers, for people.

    Attributes:
        busy_s: seconds that the host has spent in exchanges; on CUDA, where it does not wait for them, issuing them.
    """

    def __init__(self, group: Group, processes: Sequence[int] = ()) -> None:
        super().__init__(group.size, group.index)
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
            finish()
        except (PeerLostError, StallError) as error:
            raise type(error)(f"{self.position()}: {error}") from error
        self._exchange = ""
        self.busy_s += time.perf_counter() - begin_s


def make_groups(layout: Layout, world: World) -> Groups:
    """The process groups of this rank's data-parallel lane.

    Every rank makes all groups in the same order, then exercises its own, so that nothing is connected lazily.

    Raises:
        PeerLostError: another rank went away meanwhile.
    """
    return Groups(
        shard=_own_group(layout.shard_groups(), world),
        copies=_own_group(layout.copy_groups(), world),
        tensor=_own_group(layout.tensor_groups(), world),
    )


def make_tensor_group(layout: Layout, world: World, timeout: timedelta | None = None) -> BlockingGroup:
    """The process group of what this rank's stages exchange while they compute: not that of a lane beside them.

    Every rank calls it at the same place among those that make groups.

    Args:
        layout: has the groups.
        world: this process among the others.
        timeout: longest wait for the other ranks in the middle of a stage; ``None`` for the world's.

    Raises:
        PeerLostError: another rank went away meanwhile.
    """
    groups = layout.tensor_groups()
    own = next(ranks for ranks in groups if world.rank in ranks)
    return BlockingGroup(_own_group(groups, world, timeout), tuple(own))


def _own_group(groups: Sequence[Sequence[int]], world: World, timeout: timedelta | None = None) -> Group:
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    own: Group = Alone()
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timeout or world.timeout, backend=backend)
        if world.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            kind = NcclGroup if backend == "nccl" else GlooGroup
            own = kind(group, ranks, ranks.index(world.rank))
    # Connections are made now, in one order on all ranks, and not in the first step.
    own.all_reduce(torch.zeros(1, device=world.device))()
    return own


class NcclGroup:
    """A group on CUDA devices; the current stream waits.

    Args:
        group: of ``torch.distributed``.
        ranks: its processes.
        index: this rank's place among them.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], index: int) -> None:
        self.size = len(ranks)
        self.index = index
        self._group = group
        self._ranks = ranks
        self._peers = [rank for place, rank in enumerate(ranks) if place != index]

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        """All-gather."""
        return self._started(lambda: _all_gather(whole, shard, group=self._group, async_op=True))

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Reduce-scatter."""
        return self._started(lambda: _reduce_scatter(shard, whole, group=self._group, async_op=True))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Finish:
        """All-reduce."""
        return self._started(lambda: dist.all_reduce(tensor, _OPS[reduction], group=self._group, async_op=True))

    def _started(self, start: Callable[[], dist.Work | None]) -> Finish:
        with _peer_errors(self._peers):
            return _end_of(start(), self._peers)


class GlooGroup(NcclGroup):
    """A group on CPUs: gathers and reductions are messages between every two ranks.

    Every rank posts its receives before its sends. Gloo's own collectives send first: where one rank comes later than
    another, the word that it can receive is stuck behind what it sends on the same connection, and the two directions
    run one after the other. A reduction is an exchange of parts and a sum here: half of the bytes of gloo's
    reduce-scatter, which sends what an all-reduce sends.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], index: int) -> None:
        super().__init__(group, ranks, index)
        self._received: Tensor | None = None
        # Each begins with its own neighbor, so that not all send to the same rank first.
        self._others = [(index + step) % self.size for step in range(1, self.size)]

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        """Send the shard to every other rank."""
        parts = whole.view(self.size, -1)
        finish = self._exchange(parts, [shard] * self.size)
        parts[self.index].copy_(shard)
        return finish

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Send every other rank its part, and sum what came, in the order of the ranks."""
        received, parts = self._room_for(whole).view(self.size, -1), whole.view(self.size, -1)
        arrive = self._exchange(received, list(parts))
        received[self.index].copy_(parts[self.index])

        def finish() -> bool:
            arrive()
            # In one call and one order, so that the sum has the same bits in every run.
            torch.sum(received, 0, out=shard)
            return True

        return finish

    def _exchange(self, received: Tensor, sent: Sequence[Tensor]) -> Finish:
        """Start to receive a part from each other rank, then to send it one."""
        with _peer_errors(self._peers):
            works = [dist.irecv(received[other], group=self._group, group_src=other) for other in self._others]
            works += [dist.isend(sent[other], group=self._group, group_dst=other) for other in self._others]
        finishes = [_end_of(work, [self._ranks[other]]) for work, other in zip(works, 2 * self._others, strict=True)]
        return lambda: all(finish() for finish in finishes)

    def _room_for(self, whole: Tensor) -> Tensor:
        """A buffer like the tensor; one for all that this group ever receives, since it does one thing at a time."""
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
    """Errors of a collective, as ours: gloo has one type for all of them.

    Args:
        peers: the processes of which one is missing.
    """
    try:
        yield
    except RuntimeError as error:
        one = f"process {peers[0]}" if len(peers) == 1 else f"one of processes {', '.join(map(str, peers))}"
        # gloo has no type for a timeout; its texts begin with a file and a line in brackets.
        if "timed out" in str(error).lower():
            raise StallError(f"{one} did not come in time: {str(error).rpartition('] ')[2]}") from error
        raise PeerLostError(f"{one} went away: {error}") from error
