"""The interpreter of one rank's row. It contains no name of a schedule or of a kind of action.

It takes the schedule that the simulator takes, follows the same dependency relation, and returns the same type of
trace. The parts (``parts/``) implement the kinds of actions.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from torch import Tensor

from pipeloom.errors import ActionError, BoundaryError, PeerLostError, RunError, StallError, UserError
from pipeloom.execute.clock import Clock, Mark
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.stages.stage import Objective, StepDocuments
from pipeloom.runs.action_log import NOTHING, RowLog
from pipeloom.schedule import Action, Level, Schedule
from pipeloom.schedule.lanes import COMPUTE_LANE
from pipeloom.schedule.window import window
from pipeloom.trace import Span, Spans, Trace


@dataclass(frozen=True)
class StepResult:
    """Result of a step on one rank.

    Attributes:
        outputs: for each micro-batch the objective's result, summed over slices; empty on ranks without the last stage.
        held: peaks of gathered weights, unreduced gradients, stage inputs and activation bytes.
        record: makes the trace, which only few steps need.
    """

    outputs: dict[int, Tensor]
    held: Held
    record: Callable[[], Trace]

    @cached_property
    def trace(self) -> Trace:
        """Start and end of each of the rank's actions."""
        return self.record()


Steps = Generator[UnderWay, None, StepResult]
"""A step in progress: yields operations that it waits for, returns the result."""
_now = time.monotonic_ns


class Executor:
    """Runs one rank's row of a schedule.

    Args:
        schedule: with communication.
        rank: the pipeline rank.
        parts: implement its actions; several parts at one slot run in this order.
        transport: to the other ranks.
        clock: of the trace.
        run_ahead: most compute actions that the host may issue before the device has finished them, at least 1.
        log: where the begin and the end of each action are noted; ``None`` for nowhere.

    Raises:
        UserError: the schedule is compute-only, has kinds of actions that no part implements, or a part refuses it.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        parts: Sequence[Part],
        *,
        transport: Transport,
        clock: Clock,
        run_ahead: int = sys.maxsize,
        log: RowLog | None = None,
    ) -> None:
        if schedule.level is Level.COMPUTE:
            raise UserError("the executor runs schedules with communication; call pipeloom.passes.lower first")
        part_of = {kind: part for part in parts for kind in part.kinds}
        unknown = sorted({action.kind.value for _, _, action in schedule.actions() if action.kind not in part_of})
        if unknown:
            raise UserError(f"the executor has nothing to run {', '.join(unknown)} with")
        self.schedule = schedule
        self.rank = rank
        self.parts = parts
        self._clock = clock
        self._run_ahead = run_ahead
        self._row = RankRow(schedule, rank, transport)
        self._log = log or RowLog(NOTHING, memoryview(bytearray(16 * len(self._row.actions))).cast("q"))
        self._actions = self._row.actions
        assert len(part_of) == sum(len(part.kinds) for part in parts), "two parts run one kind"
        self._part_at = [part_of[action.kind] for action in self._actions]
        for part in parts:
            part.bind(self._row)
        self._program = _program(self._row, self._part_at)
        self._begin((), None)

    def steps(
        self, inputs: Sequence[Tensor], objective: Objective | None, documents: StepDocuments | None = None
    ) -> Steps:
        """Run the row once.

        Args:
            inputs: the first stage's input for each micro-batch, or for each of its slices, micro-batch by micro-batch;
                empty on other ranks.
            objective: applied to the last stage's output; ``None`` on other ranks.
            documents: what the tokens see, on all ranks; ``None`` where attention has no borders.

        Yields:
            An unfinished operation that the next action waits for. The caller resumes the generator when it is
            finished: it may block, or run another rank in the meantime.

        Returns:
            Outputs and trace.

        Raises:
            RunError: an action failed; contains its text and the rows around it.
        """
        self._begin(inputs, objective, documents)
        self._log.run.begin()
        for part in self.parts:
            self._services += part.begin(self._row)
        under_way = self._under_way
        for slot, job in enumerate(self._program):
            self._slot = slot
            if self._services:
                self.check_services()
            for other in job.awaited:
                pending = under_way[other]
                if not pending.is_done():
                    self._waits_for = other
                    yield pending
                    self._waits_for = None
            try:
                self._run(slot, job)
            except Exception as error:
                raise self._explained(f"action {self._actions[slot]}", error) from error
        self._slot = len(self._actions)
        yield from self._rest()
        self._clock.settle()
        held = Held()
        for part in self.parts:
            held = held.most(part.held())
        for part in self.parts:
            part.end(self._row)
        self._log.run.end()
        result = StepResult(self._row.outputs, held, partial(self._trace, self._marks, self._done))
        self._begin((), None)
        self._slot = len(self._actions)
        return result

    def run(
        self,
        inputs: Sequence[Tensor],
        objective: Objective | None,
        timeout_s: float = 60.0,
        positions: Callable[[], str] | None = None,
        documents: StepDocuments | None = None,
    ) -> StepResult:
        """Run ``steps`` and block wherever it waits for another rank.

        Args:
            inputs: as of ``steps``.
            objective: as of ``steps``.
            timeout_s: longest wait for one tensor.
            positions: returns the positions of all ranks, for the message of a stall.
            documents: as of ``steps``.

        Raises:
            StallError: a tensor did not arrive within ``timeout_s``.
            RunError: an action failed.
        """
        try:
            return self._wait_through(self.steps(inputs, objective, documents), timeout_s, positions)
        except BaseException as error:
            try:
                if isinstance(error, PeerLostError | StallError):  # a failed service may be the cause
                    self.check_services()
                raise
            finally:
                # Tensors of a failed step must not be received in the next one.
                self.forget()

    def _wait_through(self, steps: Steps, timeout_s: float, positions: Callable[[], str] | None) -> StepResult:
        def everyone() -> str:
            return "" if positions is None else f"\nevery rank's position:\n{positions()}"

        while True:
            try:
                under_way = next(steps)
            except StopIteration as end:
                return end.value
            except StallError as error:  # in the middle of an action
                raise StallError(f"{error}{everyone()}") from error
            if not under_way.wait(timeout_s):
                raise StallError(f"timed out after {timeout_s:g} s: {self.position()}{everyone()}")

    def _begin(
        self, inputs: Sequence[Tensor], objective: Objective | None, documents: StepDocuments | None = None
    ) -> None:
        self._row.begin(inputs, objective, documents)
        self._slot = 0
        self._waits_for: int | str | None = None
        self._under_way: dict[int, UnderWay] = {}
        self._done: dict[int, UnderWay] = {}
        self._services: list[Service] = []
        self._marks: list[tuple[Action, Mark, Mark]] = []

    def _run(self, slot: int, job: "_Job") -> None:
        cells, computes = self._log.cells, job.computes
        for other in job.awaited:
            self._take(other)
        cells[2 * slot] = -_now()
        if computes is not None and len(self._marks) >= self._run_ahead:
            # Each issued action holds memory of the device: without a limit a
            # host that is far ahead would fill it.
            self._clock.wait(self._marks[-self._run_ahead][2])
        # Behind this mark, so that what parts do for an action, such as to clear
        # the buffer of a gradient, is part of its span.
        begin = None if computes is None else self._clock.mark()
        for do in job.before:
            do()
        started = job.start()
        if started is not None:
            self._under_way[slot] = started
        for do in job.after:
            do()
        if computes is not None:
            self._marks.append((computes, begin, self._clock.mark()))
        cells[2 * slot] = -cells[2 * slot]
        if started is None and (self._clock.is_host or computes is None):
            cells[2 * slot + 1] = _now()

    def note_ended(self) -> None:
        """Note in the log what has ended without a waiting action; another thread calls it while the run hangs."""
        cells, now_ns = self._log.cells, _now()
        # Copies: the rank's thread may continue meanwhile.
        for slot, pending in [*self._under_way.items(), *self._done.items()]:
            if cells[2 * slot + 1] < abs(cells[2 * slot]) and pending.has_passed():
                cells[2 * slot + 1] = now_ns
        if self._clock.is_host:
            return
        computes = (slot for slot, job in enumerate(self._program) if job.computes is not None)
        for slot, (_, _, end) in zip(computes, list(self._marks), strict=False):
            if cells[2 * slot + 1] < cells[2 * slot] and self._clock.has_passed(end):
                cells[2 * slot + 1] = now_ns

    def _take(self, slot: int) -> None:
        """Pass the result of an action that has ended to its part."""
        # The operation is kept for its times, without its tensor: most traces are
        # never made, so nothing is recorded here.
        ended = self._done[slot] = self._under_way.pop(slot)
        self._part_at[slot].take(self._row, slot, ended.take())
        if self._clock.is_host:
            self._log.cells[2 * slot + 1] = _now()

    def _rest(self) -> Iterator[UnderWay]:
        """Wait for operations that no action has waited for."""
        # A copy: taking a result removes it.
        for slot, pending in list(self._under_way.items()):
            if not pending.is_done():
                yield from self._until_done(slot, pending)
            self._take(slot)
        for service in self._services:
            yield from self._until_done(service.what, service.job)
        self.check_services()

    def _until_done(self, what: int | str, pending: UnderWay) -> Iterator[UnderWay]:
        if not pending.is_done():
            self._waits_for = what
            yield pending
            self._waits_for = None

    def check_services(self) -> None:
        """Raise the error of a failed service, which is work for other ranks beside the row.

        Raises:
            RunError: names the service.
        """
        for service in self._services:
            try:
                if service.job.is_done():
                    service.job.take()
            except Exception as error:
                raise self._explained(service.what, error) from error

    def _explained(self, what: str, error: Exception) -> RunError:
        """An error with the action and the rows around it; errors that callers handle keep their type."""
        place = f"rank {self.rank}, slot {self._slot}, {what}"
        rows = window(self.schedule.rows, self.rank, self._slot)
        if isinstance(error, (PeerLostError, StallError, BoundaryError)):
            return type(error)(f"{place}: {error}\n{rows}")
        return ActionError(f"{place} failed: {type(error).__name__}: {error}\n{rows}")

    def position(self) -> str:
        """The rank's position as text: slot, action, and what it waits for."""
        slot, waits_for = self._slot, self._waits_for  # read once: other threads call this
        if slot >= len(self._actions):
            place = f"at the end of its {len(self._actions)} actions"
        else:
            place = f"at slot {slot} of {len(self._actions)}, {self._actions[slot]}"
        if waits_for is None:
            return f"rank {self.rank} is {place}"
        if isinstance(waits_for, str):
            return f"rank {self.rank} is {place}, {waits_for}"
        others = self._part_at[waits_for].other_end(self._row, waits_for)
        return f"rank {self.rank} is {place}, waiting for {self._actions[waits_for]} with {others}"

    def forget(self) -> None:
        """Reset after a failed step. Lanes with threads stay failed: between processes no further step is possible."""
        for part in self.parts:
            part.forget()
        # Inputs and outputs of the step must not live until the next one.
        self._begin((), None)

    def _trace(self, marks: Sequence[tuple[Action, Mark, Mark]], done: Mapping[int, UnderWay]) -> Trace:
        seconds = self._clock.seconds
        spans = [Span(a, self.rank, COMPUTE_LANE, seconds(begin), seconds(end)) for a, begin, end in marks]
        for slot in done:
            start_s, end_s = self._part_at[slot].span(slot, done, seconds)
            spans.append(Span(self._actions[slot], self.rank, self._row.lanes[slot], start_s, end_s))
        return Trace(Spans.of(spans), self.schedule.num_ranks)


class _Job(NamedTuple):
    """What a slot needs in every step, looked up once.

    Attributes:
        awaited: earlier slots of other lanes whose end its action waits for.
        before, after: hooks of parts.
        start: of its part.
        computes: its action, if that is on the compute lane.
    """

    awaited: tuple[int, ...]
    before: Sequence[Callable[[], None]]
    start: Callable[[], UnderWay | None]
    after: Sequence[Callable[[], None]]
    computes: Action | None


def _program(row: RankRow, part_at: Sequence[Part]) -> list[_Job]:
    """A job for each slot, after all parts are bound."""
    starters = [part.starter(row, slot) for slot, part in enumerate(part_at)]
    computes = [action if lane == COMPUTE_LANE else None for action, lane in zip(row.actions, row.lanes, strict=True)]
    return [_Job(*job) for job in zip(_awaited(row, part_at), row.before, starters, row.after, computes, strict=True)]


def _awaited(row: RankRow, part_at: Sequence[Part]) -> list[tuple[int, ...]]:
    """For each slot the earlier slots of other lanes whose end its action waits for, by the dependency relation.

    Each is listed once, at the first action that waits for it, since later ones are issued later. Actions of one lane
    are in order anyway, and jobs that wait for each other on their lanes need no wait before they start.
    """
    seen: set[int] = set()
    awaited: list[tuple[int, ...]] = []
    for slot, lane in enumerate(row.lanes):
        found: list[int] = []
        if not part_at[slot].waits_by_itself:
            others = (other for other in row.needed(slot) if other not in seen)
            found = [other for other in others if row.lanes[other] not in (lane, COMPUTE_LANE)]
            seen.update(found)
        awaited.append(tuple(found))
    return awaited
