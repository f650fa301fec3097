"""The groups of ranks that share experts, and of those that hold the same ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch import Tensor

from pipeloom.execute.communication.collectives import Note, located, own_group
from pipeloom.execute.communication.group import Alone, Group, Groups
from pipeloom.execute.processes.world import World
from pipeloom.model.expert_parallel import ExpertGroup
from pipeloom.runs.action_log import ActionLog
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE
from pipeloom.workload.layout import Layout


class TravelGroup(ExpertGroup):
    """The ranks that share experts, for ``model.expert_parallel``.

    Args:
        group: process group that is used for nothing else, since its exchanges are in the order of the computation.
        processes: its ranks, for messages.
    """

    def __init__(self, group: Group, processes: Sequence[int] = ()) -> None:
        super().__init__(group.size, group.index)
        self._group = group
        self._processes = processes
        self._is_waiting = False

    def start(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Callable[[], None]:
        """All-to-all of slices."""
        with self._waiting():
            end = self._group.exchange(received.split(list(received_sizes)), sent.split(list(sent_sizes)))

        def finish() -> None:
            with self._waiting():
                end()

        return finish

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._is_waiting = True
        with located(self.position):
            yield
        self._is_waiting = False

    def position(self) -> str:
        """The exchange in progress as text; empty without one."""
        processes = ", ".join(map(str, self._processes))
        return f"in an exchange of expert-parallel processes {processes}" if self._is_waiting else ""


def make_expert_group(
    layout: Layout, world: World, timeout: timedelta | None = None, log: ActionLog | None = None
) -> TravelGroup:
    """The group of ranks that share experts; arguments, errors and the order of calls as ``make_tensor_group``."""
    groups = layout.expert_groups()
    own = next(ranks for ranks in groups if world.rank in ranks)
    return TravelGroup(own_group(groups, world, Note(log, "expert-parallel exchange"), timeout), tuple(own))


def make_same_experts_groups(layout: Layout, world: World, log: ActionLog | None = None) -> Groups:
    """As ``make_groups``, of the ranks that hold the same experts, for their gradients and shards."""
    note = Note(log, "exchange of ranks with the same experts", DATA_PARALLEL_LANE.name)
    own = own_group(layout.same_expert_groups(), world, note)
    return Groups(Alone(), own) if layout.expert_shard == "none" else Groups(own, Alone())


def make_load_group(
    layout: Layout, world: World, timeout: timedelta | None = None, log: ActionLog | None = None
) -> Group:
    """The ranks that sum the loads of their experts; arguments, errors and the order of calls as for a tensor group."""
    return own_group(layout.data_groups(), world, Note(log, "sum of the loads of experts"), timeout)
