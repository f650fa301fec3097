"""The interpreter: one rank's row, action by action. It knows no schedule's name.

It runs the same schedule value that the simulator runs, by the same dependency relation, and returns the
same kind of trace.
"""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from pipeloom.errors import UserError
from pipeloom.execute.boundary import TensorSpec, TokenSlices
from pipeloom.execute.clock import Clock, Mark
from pipeloom.execute.data_parallel import DataParallel, Held
from pipeloom.execute.explain import explained
from pipeloom.execute.lanes import JobUnderWay
from pipeloom.execute.moves import ActivationMoves
from pipeloom.execute.needs import awaited_slots, source_of
from pipeloom.execute.partner import Service
from pipeloom.execute.saved import Parcel
from pipeloom.execute.stage import Objective, Part, Stage
from pipeloom.execute.stage_swaps import StageSwaps
from pipeloom.execute.tied import Handover, Tied, handover
from pipeloom.execute.transport import Pending, Transfer, Transport
from pipeloom.schedule import Action, Kind, Level, Schedule
from pipeloom.schedule.kinds import (
    ADDS_TO_GRADIENT,
    COLLECTIVE_KINDS,
    COMPUTE_LANE_KINDS,
    MOVE_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
    STAGE_SWAP_KINDS,
    TIED_RECEIVE_KINDS,
    TIED_SEND_KINDS,
)
from pipeloom.schedule.lanes import COMPUTE_LANE, lane_of
from pipeloom.trace import Span, Spans, Trace


@dataclass(frozen=True)
class StepResult:
    """What one rank has from a step.

    Attributes:
        outputs: by micro-batch what the objective returned, added up over its slices; empty on ranks without the last
            stage.
        held: most gathered weights, unreduced gradients and stage inputs of the step, and bytes for backwards.
        record: makes the trace. Most steps' traces are never asked for.
    """

    outputs: dict[int, Tensor]
    held: Held
    record: Callable[[], Trace]

    @cached_property
    def trace(self) -> Trace:
        """What this rank did and when."""
        return self.record()


def _part(action: Action) -> Part:
    assert action.microbatch is not None
    return Part(action.microbatch, action.slice)


Steps = Generator[Pending, None, StepResult]
"""A rank under way: yields what it waits for, returns what came of it."""


class Executor:
    """Runs one rank's row of a schedule.

    Args:
        schedule: with communication.
        rank: the pipeline rank.
        stages: the rank's stages by global index.
        outputs: the agreed spec of every stage's output, for all stages.
        transport: to the other ranks.
        clock: what spans are measured with.
        data_parallel: gathers weights and reduces gradients; ``None`` runs schedules without such actions.
        tied: the matrix that embedding and head share; ``None`` where they share none, or are one stage.
        moves: moves what stages keep, and counts it; ``None`` runs schedules without such actions.
        stage_swaps: moves whole stages between device and host, and updates them; ``None`` as well.
        run_ahead: compute actions that the host may issue before the device has done them, at least 1.
        slices: how micro-batches are cut, where the schedule cuts them.

    Raises:
        UserError: the schedule is compute-only, has actions that nothing here can run, or lacks those of a tied matrix.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        *,
        outputs: Sequence[TensorSpec],
        transport: Transport,
        clock: Clock,
        data_parallel: DataParallel | None = None,
        tied: Tied | None = None,
        moves: ActivationMoves | None = None,
        stage_swaps: StageSwaps | None = None,
        run_ahead: int = sys.maxsize,
        slices: TokenSlices | None = None,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self._row = tuple(schedule.rows[rank])
        self._stages = stages
        self._outputs = outputs
        self._transport = transport
        self._clock = clock
        self._data_parallel = data_parallel
        self._tied = tied
        self._moves = moves
        self._stage_swaps = stage_swaps
        self._run_ahead = run_ahead
        self._slices = slices
        self._handover = Handover()
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            **dict.fromkeys(SEND_KINDS, self._send),
            **dict.fromkeys(RECEIVE_KINDS, self._receive),
        }
        if data_parallel is not None:
            self._handlers |= dict.fromkeys(COLLECTIVE_KINDS, self._collect)
            self._starts: dict[Kind, Callable[[int], JobUnderWay]] = {
                Kind.UNSHARD: data_parallel.unshard,
                Kind.RESHARD: data_parallel.reshard,
                Kind.REDUCE_GRAD: data_parallel.reduce,
            }
        if tied is not None:
            self._handlers |= dict.fromkeys(TIED_SEND_KINDS, self._send_tied)
            self._handlers |= dict.fromkeys(TIED_RECEIVE_KINDS, self._receive_tied)
        if moves is not None:
            self._handlers |= dict.fromkeys(MOVE_KINDS, self._move)
        if stage_swaps is not None:
            self._handlers |= {**dict.fromkeys(STAGE_SWAP_KINDS, self._swap_stage), Kind.UPDATE: stage_swaps.update}
        self._check()
        self._awaited = awaited_slots(schedule, rank)
        self._source = {action: source_of(action, schedule) for action in self._row}
        sources = [self._source[action] for action in self._row]
        self._received = [one if one is not None and one.kind in RECEIVE_KINDS else None for one in sources]
        self._lane = {action: lane_of(action, schedule.placement) for action in self._row}
        self._begin([], None)

    def steps(self, inputs: Sequence[Tensor], objective: Objective | None) -> Steps:
        """Run the row once.

        Args:
            inputs: the first stage's input for each micro-batch, or for each of its slices, micro-batch by micro-batch;
                other ranks may pass nothing.
            objective: applied to the last stage's output; other ranks may pass ``None``.

        Yields:
            Each transfer that the next action waits for and that is not done. Whoever drives the rank
            resumes it when the transfer is done: it may wait, or run another rank meanwhile.

        Returns:
            Outputs and trace.

        Raises:
            RunError: an action failed; names it and shows the rows around it.
        """
        self._begin(inputs, objective)
        if self._data_parallel is not None:
            self._data_parallel.begin(trains=any(action.kind in ADDS_TO_GRADIENT for action in self._row))
        if self._tied is not None:
            self._tied.begin(self._handover)
        self._services = [] if self._moves is None else self._moves.begin()
        if self._stage_swaps is not None:
            self._stage_swaps.begin(self._tied)
        for slot, action in enumerate(self._row):
            self._slot = slot
            if self._services:
                self.check_services()
            source = self._received[slot]
            if source is not None and not self._transfers[source].is_done():
                yield self._waiting(source, self._transfers[source])
            for awaited in self._awaited.get(slot, ()):
                receive = self._row[awaited]
                is_tied = receive.kind in TIED_RECEIVE_KINDS
                yield from self._until_done(receive, self._transfers[receive] if is_tied else self._jobs[awaited])
            self._run(action)
        self._slot = len(self._row)
        yield from self._rest()
        self._clock.settle()
        held = self._most_held()
        if self._tied is not None:
            self._tied.end()
        record = partial(self._trace, self._marks, self._transfer_times, self._jobs)
        result = StepResult(self._results_of_objective, held, record)
        self._begin([], None)
        self._slot = len(self._row)
        return result

    def _most_held(self) -> Held:
        held = self._held
        if self._data_parallel is not None:
            held = held.most(self._data_parallel.most_held)
        if self._moves is not None:
            held = held.most(Held(live_bytes=self._moves.most_bytes))
        if self._stage_swaps is not None:
            held = held.most(Held(swapped_bytes=self._stage_swaps.store.peak_bytes))
        return held

    def _rest(self) -> Iterator[Pending]:
        """Wait for what nothing has waited for."""
        for action, transfer in self._transfers.items():
            yield from self._until_done(action, transfer)
            self._take_tied(action, transfer.take())
            self._note(action, transfer)
        for slot, job in self._jobs.items():
            yield from self._until_done(self._row[slot], job)
            job.take()
        for service in self._services:
            yield from self._until_done(service.what, service.job)
        self.check_services()

    def check_services(self) -> None:
        """Raise what has gone wrong in what this rank does for others, beside its row.

        Raises:
            RunError: names it.
        """
        for service in self._services:
            try:
                if service.job.is_done():
                    service.job.take()
            except Exception as error:
                raise explained(self.schedule, self.rank, self._slot, service.what, error) from error

    def _until_done(self, what: Action | str, pending: Pending) -> Iterator[Pending]:
        if not pending.is_done():
            yield self._waiting(what, pending)
            self._waits_for = None

    def _waiting(self, what: Action | str, pending: Pending) -> Pending:
        """What the rank waits for, noted for ``position`` until the wait is over or the next action runs."""
        self._waits_for = what
        return pending

    def position(self) -> str:
        """Where the rank stands, for people: slot, action, and what it waits for."""
        slot, waits_for = self._slot, self._waits_for  # read once: another thread may ask meanwhile
        if slot >= len(self._row):
            place = f"at the end of its {len(self._row)} actions"
        else:
            place = f"at slot {slot} of {len(self._row)}, {self._row[slot]}"
        if waits_for is None:
            return f"rank {self.rank} is {place}"
        if isinstance(waits_for, str):
            return f"rank {self.rank} is {place}, {waits_for}"
        peer = self._lane[waits_for].peer
        others = f"rank {peer}" if peer is not None else "its data-parallel ranks"
        if waits_for.kind in MOVE_KINDS and self._moves is not None:
            others = self._moves.other_end(waits_for.kind)
        elif waits_for.kind in STAGE_SWAP_KINDS:
            others = "the host"
        return f"rank {self.rank} is {place}, waiting for {waits_for} with {others}"

    def forget(self) -> None:
        """Drop what a failed step left behind. Lanes with threads stay failed: over processes no step can follow."""
        for stage in self._stages.values():
            stage.forget()
        if self._data_parallel is not None:
            self._data_parallel.forget()
        if self._tied is not None:
            self._tied.forget()
        if self._moves is not None:
            self._moves.forget()
        if self._stage_swaps is not None:
            self._stage_swaps.forget()
        self._begin([], None)

    def _begin(self, inputs: Sequence[Tensor], objective: Objective | None) -> None:
        self._inputs = inputs
        self._objective = objective
        self._slot = 0
        self._waits_for: Action | str | None = None
        self._results: dict[Action, Tensor] = {}
        self._results_of_objective: dict[int, Tensor] = {}
        self._transfers: dict[Action, Transfer] = {}
        self._jobs: dict[int, JobUnderWay] = {}
        self._services: list[Service] = []
        self._held = Held()
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self._transfer_times: list[tuple[Action, float, float]] = []

    def _check(self) -> None:
        if self.schedule.level is Level.COMPUTE:
            raise UserError("the executor runs schedules with communication; call pipeloom.passes.lower first")
        wanted, found = self.schedule.num_slices, 1 if self._slices is None else len(self._slices.lengths)
        if wanted != found:
            raise UserError(f"the schedule cuts micro-batches into {wanted} token slices, found lengths for {found}")
        unknown = sorted(
            {action.kind.value for _, _, action in self.schedule.actions()} - {kind.value for kind in self._handlers}
        )
        if unknown:
            raise UserError(f"the executor has nothing to run {', '.join(unknown)} with")
        if self._tied is not None:
            self._handover = handover(self.schedule, self.rank)

    def _run(self, action: Action) -> None:
        self._waits_for = None
        try:
            if self._slot in self._awaited or self._tied is not None:
                self._take_awaited()
            handler = self._handlers[action.kind]
            if action.kind not in COMPUTE_LANE_KINDS:
                handler(action)
                return
            if len(self._marks) >= self._run_ahead:
                self._clock.wait(self._marks[-self._run_ahead][2])
            begin = self._clock.mark()
            handler(action)
            if self._stage_swaps is not None:
                self._stage_swaps.after(self._slot)
        except Exception as error:
            raise explained(self.schedule, self.rank, self._slot, f"action {action}", error) from error
        self._marks.append((action, begin, self._clock.mark()))

    def _take_awaited(self) -> None:
        """Take what the action at the current slot waited for."""
        for awaited in self._awaited.get(self._slot, ()):
            if awaited in self._jobs:
                self._jobs[awaited].take()
            else:
                receive = self._row[awaited]
                transfer = self._transfers.pop(receive)
                self._note(receive, transfer)
                self._take_tied(receive, transfer.take())
        if self._tied is not None:
            self._tied.hand_over(self._slot)

    def _input(self, action: Action) -> Tensor | None:
        source = self._source[action]
        if source is None:
            return None
        if source.kind in RECEIVE_KINDS:
            transfer = self._transfers.pop(source)
            self._note(source, transfer)
            return transfer.take()
        return self._results.pop(source)

    def _note(self, action: Action, transfer: Transfer) -> None:
        self._transfer_times.append((action, transfer.start_s, transfer.end_s))

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        tensor = self._input(action)
        if tensor is None:
            tensor = self._inputs[Part(microbatch, action.slice).number(self.schedule.num_slices)]
        is_last = stage == self.schedule.num_stages - 1
        trains = stage >= self.schedule.first_backward_stage
        objective = self._objective if is_last else None
        part = _part(action)
        again = bool(self.schedule.facts.is_recomputed[stage, part.microbatch, part.slice])
        if again:
            output = self._stages[stage].forward_once(part, tensor, objective, self._parcel(action))
        else:
            parcel = self._parcel(action) if trains else None
            output = self._stages[stage].forward(part, tensor, objective, trains=trains, parcel=parcel)
        if trains:
            self._count_held(action)
        if is_last:
            found = self._results_of_objective
            found[microbatch] = found[microbatch] + output if microbatch in found else output
        else:
            self._results[action] = output

    def _recompute(self, action: Action) -> None:
        objective = self._objective if action.stage == self.schedule.num_stages - 1 else None
        self._stages[action.stage].recompute(_part(action), objective, self._parcel(action))
        self._count_held(action)

    def _parcel(self, action: Action) -> Parcel | None:
        """What takes what autograd saves in a forward, if somebody has to know it."""
        if self._moves is None:
            return None
        forward = action._replace(kind=Kind.FORWARD)
        return self._moves.parcel(action, owns_input=self._source[forward] is not None)

    def _count_held(self, forward: Action | None = None) -> None:
        """Note what is held now, after a forward that keeps it or after the first half of a backward."""
        if forward is not None and self._moves is not None:
            self._moves.after_forward(forward)
        stages = self._stages.values()
        now = Held(
            stage_inputs=-(-sum(stage.num_held for stage in stages) // self.schedule.num_slices),
            stage_input_bytes=sum(stage.held_bytes for stage in stages),
            pending=sum(stage.num_pending for stage in stages),
            pending_bytes=sum(stage.pending_bytes for stage in stages),
        )
        self._held = self._held.most(now)

    def _backward(self, action: Action) -> None:
        self._before_gradients(action)
        self._use_kept(action, self._stages[action.stage].backward)

    def _backward_input(self, action: Action) -> None:
        stage = self._stages[action.stage]
        before = stage.pending_bytes
        self._use_kept(action, stage.backward_input)
        if self._moves is not None:
            self._moves.after_input_gradient(action, stage.pending_bytes - before)
        self._count_held()

    def _use_kept(self, action: Action, run: Callable[[Part, Tensor | None], Tensor | None]) -> None:
        """Run what needs what the forward kept, and keep the gradient that it makes."""
        part = _part(action)
        if self._moves is not None:
            self._moves.before_backward(action)
        gradient = run(part, self._input(action))
        if self._moves is not None:
            self._moves.after_backward(action)
        if gradient is not None:
            self._results[action] = gradient

    def _backward_weight(self, action: Action) -> None:
        self._before_gradients(action)
        self._stages[action.stage].backward_weight(_part(action))
        if self._moves is not None:
            self._moves.after_backward(action)

    def _before_gradients(self, action: Action) -> None:
        if self._data_parallel is not None:
            self._data_parallel.before_backward(action.stage)

    def _send(self, action: Action) -> None:
        self._start_send(action, self._input(action))

    def _receive(self, action: Action) -> None:
        spec = self._outputs[action.stage - 1 if action.kind is Kind.RECV_F else action.stage]
        self._start_receive(action, spec if self._slices is None else self._slices.spec(spec, action.slice))

    def _send_tied(self, action: Action) -> None:
        assert self._tied is not None
        self._start_send(action, self._tied.given(action.kind))

    def _receive_tied(self, action: Action) -> None:
        assert self._tied is not None
        self._start_receive(action, self._tied.specs[action.kind])

    def _start_send(self, action: Action, tensor: Tensor | None) -> None:
        peer = self._lane[action].peer
        assert tensor is not None
        assert peer is not None
        self._transfers[action] = self._transport.send(tensor, peer)

    def _start_receive(self, action: Action, spec: TensorSpec) -> None:
        peer = self._lane[action].peer
        assert peer is not None
        self._transfers[action] = self._transport.receive(spec, peer)

    def _take_tied(self, action: Action, tensor: Tensor | None) -> None:
        """Use what was received, if it is about the tied matrix and has not been used."""
        if self._tied is not None and action.kind in TIED_RECEIVE_KINDS:
            assert tensor is not None
            self._tied.take(action.kind, tensor)

    def _collect(self, action: Action) -> None:
        self._jobs[self._slot] = self._starts[action.kind](action.stage)

    def _move(self, action: Action) -> None:
        assert self._moves is not None
        self._jobs[self._slot] = self._moves.start(action)

    def _swap_stage(self, _: Action) -> None:
        assert self._stage_swaps is not None
        self._jobs[self._slot] = self._stage_swaps.start(self._slot)

    def _trace(
        self,
        marks: Sequence[tuple[Action, Mark, Mark]],
        transfers: Sequence[tuple[Action, float, float]],
        jobs: Mapping[int, JobUnderWay],
    ) -> Trace:
        seconds = self._clock.seconds
        spans = [Span(a, self.rank, COMPUTE_LANE, seconds(begin), seconds(end)) for a, begin, end in marks]
        for action, start_s, end_s in transfers:
            spans.append(Span(action, self.rank, self._lane[action], start_s, end_s))
        for slot, job in jobs.items():
            action, waits = self._row[slot], self._stage_swaps.waits.get(slot, ()) if self._stage_swaps else ()
            begin = max(seconds(mark) for mark in (job.begin, *(jobs[other].end for other in waits)))
            spans.append(Span(action, self.rank, self._lane[action], begin, seconds(job.end)))
        return Trace(Spans.of(spans), self.schedule.num_ranks)
