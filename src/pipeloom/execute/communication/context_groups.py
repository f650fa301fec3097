"""The group of ranks that share the tokens of sequences."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor

from pipeloom.execute.communication.collectives import Note, located, own_group
from pipeloom.execute.communication.group import Group
from pipeloom.execute.processes.world import World
from pipeloom.model.context_parallel import ContextGroup
from pipeloom.runs.action_log import ActionLog
from pipeloom.workload.layout import Layout


class RingGroup(ContextGroup):
    """The ranks of a context axis, for ``model.context_parallel``.

    Args:
        group: process group that is used for nothing else, since its messages are in the order of the computation.
        processes: its ranks, for messages.
    """

    def __init__(self, group: Group, processes: Sequence[int] = ()) -> None:
        super().__init__(group.size, group.index)
        self._group = group
        self._processes = processes
        self._is_waiting = False

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Callable[[], object]:
        """Start to send to the next rank and to receive from the one before."""
        kept = [one.contiguous() for one in sent]  # until they have left
        with located(self.position):
            finish = self._group.pass_on(received, kept)

        def wait() -> None:
            self._is_waiting = True
            with located(self.position):
                finish()
            self._is_waiting = False
            kept.clear()

        return wait

    def position(self) -> str:
        """The exchange that is waited for as text; empty without one."""
        processes = ", ".join(map(str, self._processes))
        return f"in an exchange of context-parallel processes {processes}" if self._is_waiting else ""


def make_context_group(
    layout: Layout, world: World, timeout: timedelta | None = None, log: ActionLog | None = None
) -> RingGroup:
    """The context-parallel group; arguments, errors and the order of calls are those of ``make_tensor_group``."""
    groups = layout.context_groups()
    own = next(ranks for ranks in groups if world.rank in ranks)
    return RingGroup(own_group(groups, world, Note(log, "context-parallel exchange"), timeout), tuple(own))
