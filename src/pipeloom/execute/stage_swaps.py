"""What SWAP_IN, SWAP_OUT and UPDATE do on a rank: stages between host and device, on a lane for each direction."""

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from pipeloom.errors import StallError
from pipeloom.execute.clock import Clock
from pipeloom.execute.collectives import Job
from pipeloom.execute.lanes import JobUnderWay, Lane
from pipeloom.execute.stage_store import StageStore
from pipeloom.execute.tied import Tied
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT
from pipeloom.schedule.stage_swaps import stage_stays


class Updates(Protocol):
    """The optimizer of a rank, stage by stage."""

    def complete(self, stage: int) -> None:
        """A stage's gradient is complete, and the stage on the device."""
        ...

    def update(self, stage: int) -> None:
        """Update the stage's weights, which are on the device with its gradient and its optimizer state."""
        ...


class HostLanes:
    """The two lanes between device and host.

    Args:
        to_host: runs its jobs in order.
        from_host: as well; its jobs may wait on the host.
        clock: what the spans of both are measured with.
    """

    def __init__(self, to_host: Lane, from_host: Lane, clock: Clock) -> None:
        self.to_host, self.from_host, self.clock = to_host, from_host, clock

    def close(self) -> None:
        """Let go of the lanes."""
        self.to_host.close()
        self.from_host.close()


class StageSwaps:
    """One rank's stages on their way, in the steps of one schedule.

    Args:
        schedule: whose rows swap stages.
        rank: the pipeline rank.
        store: has the stages.
        lanes: move them.
        timeout_s: longest that a stage waits for room.

    Attributes:
        updates: does the updates; ``None`` for schedules without.
        waits: slot of a ``SWAP_IN`` -> slots of the ``SWAP_OUT``s that have to end first.
    """

    def __init__(self, schedule: Schedule, rank: int, store: StageStore, lanes: HostLanes, timeout_s: float) -> None:
        row = schedule.rows[rank]
        self.store = store
        self.updates: Updates | None = None
        self._lanes, self._timeout_s = lanes, timeout_s
        stays = stage_stays(row)
        self._comes = {stay.first: stay for stay in stays}
        self._goes = {stay.last: stay for stay in stays}
        self._completes = _completes(schedule, rank)
        self._tied: Tied | None = None
        first, graph = int(schedule.facts.columns.first[rank]), schedule.graph
        self.waits: Mapping[int, list[int]] = {
            slot: [needed - first for needed in graph.needed(first + slot) if needed - first in self._goes]
            for slot in self._comes
        }
        self._under_way: dict[int, JobUnderWay] = {}

    def begin(self, tied: Tied | None) -> None:
        """Before a step, with the matrix that embedding and head share if they do."""
        self._tied = tied
        self._under_way.clear()
        self.store.begin()

    def update(self, action: Action) -> None:
        """Update the weights of an action's stage."""
        assert self.updates is not None, "nothing updates the stages"
        self.updates.update(action.stage)

    def after(self, slot: int) -> None:
        """After a compute action: a gradient that has all that micro-batches add is complete."""
        stage = self._completes.get(slot)
        if stage is None:
            return
        assert self.updates is not None, "nothing updates the stages"
        if self._tied is not None and stage == 0:
            self.settle()
            self._tied.return_gradient()
        self.updates.complete(stage)

    def start(self, slot: int) -> JobUnderWay:
        """Start the swap that stands in a slot."""
        if slot in self._comes:
            job = self._lanes.from_host.start(self._come(slot))
        else:
            job = self._lanes.to_host.start(self._go(slot))
        self._under_way[slot] = job
        return job

    def _come(self, slot: int) -> Job:
        for out in self.waits[slot]:
            yield partial(self._until, out)
        stay = self._comes[slot]
        self.store.bring(stay.stage, stay.held, stay.brought)

    def _go(self, slot: int) -> Job:
        stay = self._goes[slot]
        self.store.leave(stay.stage, stay.taken)
        yield from ()

    def settle(self) -> None:
        """Wait for the stages that are on their way out; who asks needs none of those that are on their way in."""
        for slot in self._under_way:
            if slot in self._goes:
                self._until(slot)

    def _until(self, slot: int) -> bool:
        """Wait on the host until a stage has left the device.

        On CUDA its memory is free for others no earlier: who takes memory before gets more than the budget says.
        """
        out = self._under_way[slot]
        if not out.wait(self._timeout_s):
            raise StallError(
                f"waited {self._timeout_s:g} s in vain for stage {self._goes[slot].stage} to leave the device; where "
                "writing it takes longer, as in files on a slow disk, raise training.stall_timeout_s"
            )
        out.take()
        self._lanes.clock.wait(out.end)
        return True

    def forget(self) -> None:
        """After a step that failed: wait for what is under way, and let every stage rest."""
        for job in self._under_way.values():
            job.wait(self._timeout_s)
        self._under_way.clear()
        self.store.forget()


def _completes(schedule: Schedule, rank: int) -> dict[int, int]:
    """Slot of what adds to a stage's gradient for the last time -> the stage, where updates follow."""
    row = schedule.rows[rank]
    if not row.is_kind(Kind.UPDATE).any():
        return {}
    last = {action.stage: slot for slot, action in enumerate(row) if action.kind in ADDS_TO_GRADIENT}
    return {slot: stage for stage, slot in last.items()}
