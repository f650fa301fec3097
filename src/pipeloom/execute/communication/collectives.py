"""The groups of a rank: shared memory within a host on CPUs, or ``torch.distributed``."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.communication.group import Alone, Finish, Group, Groups
from pipeloom.execute.communication.shared_groups import SharedGroup, links_of
from pipeloom.execute.communication.torch_groups import GlooGroup, NcclGroup
from pipeloom.execute.processes.world import World
from pipeloom.model.tensor_parallel import TensorGroup
from pipeloom.runs.action_log import NOTHING, ActionLog, Activity
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE
from pipeloom.workload.layout import Layout


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
    exchanges = (
        (layout.shard_groups(), "exchange of replicas"),
        (layout.copy_groups(), "exchange of copies"),
        (layout.tensor_groups(), "exchange of tensor-parallel gradients"),
    )
    return Groups(*(own_group(ranks, world, Note(log, name, DATA_PARALLEL_LANE.name)) for ranks, name in exchanges))


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
    patience = timeout or world.timeout
    own: Group = Alone()
    shared = links_of(groups, world) if backend == "gloo" else {}
    for number, ranks in enumerate(groups):
        if len(ranks) == 1:
            continue
        # Every process of the world takes part in each group of torch.distributed, and so decides alike.
        group = None if number in shared else dist.new_group(list(ranks), timeout=patience, backend=backend)
        if world.rank in ranks:
            place = ranks, ranks.index(world.rank), note.activity(ranks)
            if number in shared:
                own = SharedGroup(shared[number], *place, timeout_s=patience.total_seconds())
            else:
                assert isinstance(group, dist.ProcessGroup)
                own = (NcclGroup if backend == "nccl" else GlooGroup)(group, *place)
    # Connections are made now, in the same order on all ranks, not in the first step.
    own.all_reduce(torch.zeros(1, device=world.device))()
    return own
