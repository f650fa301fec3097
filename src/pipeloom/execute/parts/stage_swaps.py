"""Implements SWAP_IN, SWAP_OUT and UPDATE: moves stages between host and device, on a lane for each direction."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from pipeloom.errors import StallError
from pipeloom.execute.clock import Mark
from pipeloom.execute.communication.group import Job
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.lanes import Lanes
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, STAGE_SWAP_KINDS
from pipeloom.schedule.stage_swaps import stage_stays


class Updates(Protocol):
    """The optimizer of a rank, stage by stage."""

    def complete(self, stage: int) -> None:
        """Called when a stage's gradient is complete; the stage is on the device."""
        ...

    def update(self, stage: int) -> None:
        """Update the stage's weights, which are on the device with its gradient and its optimizer state."""
        ...


class StageUpdates(Part):
    """Updates stages within the row.

    Attributes:
        does: the updates; must be set before the first training step.
    """

    kinds = frozenset({Kind.UPDATE})

    def __init__(self) -> None:
        self.does: Updates | None = None

    def bind(self, row: RankRow) -> None:
        """Add a hook after the last backward of each stage, when its gradient is complete."""
        if row.slots_of(*self.kinds):
            # Slots rise, so the last one of a stage stays.
            last = {row.actions[slot].stage: slot for slot in row.slots_of(*ADDS_TO_GRADIENT)}
            for stage, slot in last.items():
                row.after[slot].append(partial(self._complete, stage))

    def _complete(self, stage: int) -> None:
        assert self.does is not None, "nothing updates the stages"
        self.does.complete(stage)

    def start(self, row: RankRow, slot: int) -> None:
        """Update the weights of the action's stage."""
        assert self.does is not None, "nothing updates the stages"
        self.does.update(row.actions[slot].stage)


class StageSwaps(Part):
    """Swaps the stages of one rank in the steps of one schedule.

    Args:
        store: has the stages.
        lanes: of the rank; one for each direction.
        timeout_s: longest wait of a stage for memory on the device.
    """

    kinds = STAGE_SWAP_KINDS
    waits_by_itself = True

    def __init__(self, store: StageStore, lanes: Lanes, timeout_s: float) -> None:
        self._store, self._clock, self._timeout_s = store, lanes.clock, timeout_s
        # A stage that is swapped in waits on the host for the memory of another one.
        self._to_host, self._from_host = lanes.lane("to host"), lanes.lane("from host", waits_on_host=True)
        self._under_way: dict[int, UnderWay] = {}

    def bind(self, row: RankRow) -> None:
        """Find what each swap moves, and the ``SWAP_OUT``s that must end before each ``SWAP_IN``."""
        stays = stage_stays(row.schedule.rows[row.rank])
        self._comes = {stay.first: stay for stay in stays}
        self._goes = {stay.last: stay for stay in stays}
        self._outs = {slot: [other for other in row.needed(slot) if other in self._goes] for slot in self._comes}

    def begin(self, row: RankRow) -> Sequence[Service]:  # noqa: ARG002
        """Before a step, with every stage at rest."""
        self._under_way.clear()
        self._store.begin(self.settle)
        return ()

    def start(self, row: RankRow, slot: int) -> UnderWay:  # noqa: ARG002  the slot determines it
        """Start a swap."""
        comes = slot in self._comes
        lane, job = (self._from_host, self._come(slot)) if comes else (self._to_host, self._go(slot))
        under_way = self._under_way[slot] = lane.start(job)
        return under_way

    def _come(self, slot: int) -> Job:
        for out in self._outs[slot]:
            yield partial(self._until, out)
        stay = self._comes[slot]
        self._store.bring(stay.stage, stay.held, stay.brought)

    def _go(self, slot: int) -> Job:
        stay = self._goes[slot]
        self._store.leave(stay.stage, stay.taken)
        yield from ()  # a job is a generator; this one waits for nothing

    def span(self, slot: int, done: Mapping[int, Any], seconds: Callable[[Mark], float]) -> tuple[float, float]:
        """Start and end of a swap; a ``SWAP_IN`` starts when its memory is free, for which its job waits."""
        marks = (done[slot].begin, *(done[out].end for out in self._outs.get(slot, ())))
        return max(map(seconds, marks)), seconds(done[slot].end)

    def other_end(self, row: RankRow, slot: int) -> str:  # noqa: ARG002
        """The other end of a swap, for messages."""
        return "the host"

    def held(self) -> Held:
        """Bytes of stages on the device."""
        return Held(swapped_bytes=self._store.peak_bytes)

    def settle(self) -> None:
        """Wait for the stages that are being swapped out; the caller needs none of those that are swapped in."""
        for slot in self._under_way:
            if slot in self._goes:
                self._until(slot)

    def _until(self, slot: int) -> bool:
        """Wait on the host until a stage has left the device.

        On CUDA its memory is free only then: an earlier allocation would exceed the budget.
        """
        out = self._under_way[slot]
        if not out.wait(self._timeout_s):
            raise StallError(
                f"timed out after {self._timeout_s:g} s, while stage {self._goes[slot].stage} left the device; where "
                "writing it takes longer, as in files on a slow disk, raise training.stall_timeout_s"
            )
        out.take()
        self._clock.wait(out.end)
        return True

    def forget(self) -> None:
        """After a failed step: wait for swaps in progress, and discard what is on the device."""
        for job in self._under_way.values():
            job.wait(self._timeout_s)
        self._under_way.clear()
        self._store.forget()
