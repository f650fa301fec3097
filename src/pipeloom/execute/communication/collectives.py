"""Collectives of ranks with the same stages: gloo on CPUs, NCCL on CUDA devices.

A *job* is the work of one action of a lane: a generator that starts asynchronous operations one by one. It yields a
``Finish`` for each, and uses the result after that.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.processes.world import World, network_reason
from pipeloom.model.tensor_parallel import TensorGroup
from pipeloom.runs.action_log import NOTHING, ActionLog, Activity
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE
from pipeloom.workload.layout import Layout

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""PyTorch 2.13 renamed both."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

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

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        """All-gather the shards into ``whole``, in the order of the ranks: ``[size * n]`` from ``[n]``."""
        ...

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Sum ``whole`` over the ranks; write this rank's part to ``shard``: ``[n]`` from ``[size * n]``."""
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


@contextmanager
def located(position: Callable[[], str]) -> Iterator[None]:
    """Context in which an error about another rank begins with where this one was."""
    try:
        yield
    except (PeerLostError, StallError) as error:
        raise type(error)(f"{position()}: {error}") from error


class BlockingGroup(TensorGroup):
    """The tensor-parallel group, for ``model.tensor_parallel``.

    Args:
        group: process group that is used for nothing else, since its collectives are in the order of the computation.
        processes: its ranks, for messages.

    Attributes:
        busy_s: seconds of the host in collectives; on CUDA the time to issue them.
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
        """The collective in progress as text; empty between collectives."""
        exchange = self._exchange  # read once: other threads call this
        return exchange and f"in a {exchange} of tensor-parallel processes {', '.join(map(str, self._processes))}"

    def _run(self, exchange: str, start: Callable[[], Finish]) -> None:
        begin_s = time.perf_counter()
        self._exchange = exchange
        with located(self.position):
            finish = start()
            finish()
        self._exchange = ""
        self.busy_s += time.perf_counter() - begin_s


def make_groups(layout: Layout, world: World, log: ActionLog | None = None) -> Groups:
    """The process groups of this rank's data-parallel lane.

    Every rank makes all groups in the same order, then uses its own once, so that no connection is made lazily.

    Args:
        layout: contains the groups.
        world: this process among the others.
        log: where collectives are noted.

    Raises:
        PeerLostError: another rank ended.
    """
    return Groups(
        shard=own_group(layout.shard_groups(), world, Note(log, "exchange of replicas", DATA_PARALLEL_LANE.name)),
        copies=own_group(layout.copy_groups(), world, Note(log, "exchange of copies", DATA_PARALLEL_LANE.name)),
        tensor=own_group(
            layout.tensor_groups(), world, Note(log, "exchange of tensor-parallel gradients", DATA_PARALLEL_LANE.name)
        ),
    )


def make_tensor_group(
    layout: Layout, world: World, timeout: timedelta | None = None, log: ActionLog | None = None
) -> BlockingGroup:
    """The tensor-parallel group for collectives within stages, separate from that of the data-parallel lane.

    Every rank must call it at the same point of the sequence of calls that make groups.

    Args:
        layout: contains the groups.
        world: this process among the others.
        timeout: longest wait for the other ranks within a stage; ``None`` for the world's.
        log: where collectives are noted.

    Raises:
        PeerLostError: another rank ended.
    """
    groups = layout.tensor_groups()
    own = next(ranks for ranks in groups if world.rank in ranks)
    return BlockingGroup(own_group(groups, world, Note(log, "tensor-parallel exchange"), timeout), tuple(own))


def make_replica_group(layout: Layout, world: World) -> Group:
    """All ranks of a replica, for the norm of its gradient; errors and the order of calls as ``make_groups``."""
    return own_group(layout.replica_ranks(), world, Note(None, "norm of a replica"))


def make_shared_groups(
    layout: Layout, world: World, sets: Mapping[int, Sequence[int]], log: ActionLog | None = None
) -> dict[int, Group]:
    """The ranks with each set of weights that several stages share, of all replicas.

    Errors and the order of calls are those of ``make_groups``.

    Args:
        layout: of the ranks.
        world: this process among the others.
        sets: first layer of each set -> the pipeline ranks that have it.
        log: where sums are noted.

    Returns:
        First layer of each set that this rank has -> the group.
    """
    note, found = Note(log, "sum of shared layers", DATA_PARALLEL_LANE.name), dict[int, Group]()
    by_ranks: dict[tuple[int, ...], Group] = {}
    for owner, pipeline_ranks in sets.items():
        ranks = tuple(sorted(pipeline[one] for pipeline in layout.pipelines() for one in pipeline_ranks))
        if ranks not in by_ranks:
            by_ranks[ranks] = own_group([ranks], world, note)
        if world.rank in ranks:
            found[owner] = by_ranks[ranks]
    return found


def make_pipeline_group(layout: Layout, world: World, log: ActionLog | None = None) -> Group:
    """The ranks of a pipeline, for comparisons outside steps; errors and the order of calls as ``make_groups``."""
    return own_group(layout.pipelines(), world, Note(log, "exchange of a pipeline"))


class Note(NamedTuple):
    """Where and as what the collectives of a group are noted, and the lane that runs them."""

    log: ActionLog | None
    name: str
    lane: str = ""

    def activity(self, ranks: Sequence[int]) -> Activity:
        """The activity of a group of these ranks."""
        return NOTHING if self.log is None else self.log.activity(self.name, ranks, self.lane)


def own_group(groups: Sequence[Sequence[int]], world: World, note: Note, timeout: timedelta | None = None) -> Group:
    """This rank's of disjoint groups of ranks, all of which every rank makes, in the same order.

    Args:
        groups: ranks of each.
        world: this process among the others.
        note: where and as what the collectives are noted.
        timeout: longest wait for the other ranks; ``None`` for the world's.

    Raises:
        PeerLostError: another rank ended.
    """
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    own: Group = Alone()
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timeout or world.timeout, backend=backend)
        if world.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            kind = NcclGroup if backend == "nccl" else GlooGroup
            own = kind(group, ranks, ranks.index(world.rank), note.activity(ranks))
    # Connections are made now, in the same order on all ranks, not in the first step.
    own.all_reduce(torch.zeros(1, device=world.device))()
    return own


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

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        """All-gather."""
        return self._started(lambda: _all_gather(whole, shard, group=self._group, async_op=True))

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Reduce-scatter."""
        return self._started(lambda: _reduce_scatter(shard, whole, group=self._group, async_op=True))

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
        return _noted(lambda: all(finish() for finish in finishes), self._activity)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """All-to-all."""
        return self._started(lambda: dist.all_to_all(list(received), list(sent), group=self._group, async_op=True))

    def _started(self, start: Callable[[], dist.Work | None]) -> Finish:
        self._activity.begin()
        with _peer_errors(self._peers):
            return _noted(_end_of(start(), self._peers), self._activity)


class GlooGroup(NcclGroup):
    """A group on CPUs, whose collectives are messages between all pairs of ranks.

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

    def gather(self, whole: Tensor, shard: Tensor) -> Finish:
        """Send the shard to every other rank."""
        parts = whole.view(self.size, -1)
        finish = self._exchange(parts, [shard] * self.size)
        parts[self.index].copy_(shard)
        return finish

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Send every other rank its part, and sum the received parts in the order of the ranks."""
        received, parts = self._room_for(whole).view(self.size, -1), whole.view(self.size, -1)
        arrive = self._exchange(received, list(parts))
        received[self.index].copy_(parts[self.index])

        def finish() -> bool:
            arrive()
            # In one call and a fixed order, so that the sum has the same bits in every run.
            torch.sum(received, 0, out=shard)
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
        return _noted(lambda: all(finish() for finish in finishes), self._activity)

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Finish:
        """Send to the next rank and receive from the one before; receives are posted first."""
        before, after = (self.index - 1) % self.size, (self.index + 1) % self.size
        self._activity.begin()
        with _peer_errors(self._peers):
            works = [dist.irecv(one, group=self._group, group_src=before) for one in received]
            works += [dist.isend(one, group=self._group, group_dst=after) for one in sent]
        peers = [before] * len(received) + [after] * len(sent)
        finishes = [_end_of(work, [self._ranks[peer]]) for work, peer in zip(works, peers, strict=True)]
        return _noted(lambda: all(finish() for finish in finishes), self._activity)

    def _room_for(self, whole: Tensor) -> Tensor:
        """The group's receive buffer; one is enough, since the group runs one collective at a time."""
        if self._received is None or self._received.numel() < whole.numel() or self._received.dtype != whole.dtype:
            self._received = torch.empty_like(whole)
        return self._received[: whole.numel()]


def _noted(finish: Finish, activity: Activity) -> Finish:
    """The same, with its end noted; on CUDA, the end of the wait, which only the stream does."""

    def finish_and_note() -> bool:
        is_done = finish()
        activity.end()
        return is_done

    return finish_and_note


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
