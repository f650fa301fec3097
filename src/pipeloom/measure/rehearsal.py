"""Runs stages outside a step, to time them or to compile them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.communication.under_way import UnderWay, finish
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage import Objective, Portion, Stage, StepDocuments
from pipeloom.measure.stopwatch import Now, now
from pipeloom.model import Documents
from pipeloom.schedule import Schedule
from pipeloom.workload.layout import Layout

Found = TypeVar("Found")


class Times(NamedTuple):
    """Seconds of one micro-batch, or of a slice of it, on a stage.

    Attributes:
        forward_s: of the forward.
        backward_s: of the backward, or of the first half of a split one (input gradient).
        weight_s: of the second half of a split backward (weight gradients), else 0.
    """

    forward_s: float
    backward_s: float
    weight_s: float

    @classmethod
    def medians(cls, times: Sequence["Times"]) -> "Times":
        """Medians of several measurements, field by field."""
        return cls(*map(median, zip(*times, strict=True)))


@dataclass(frozen=True)
class StageRun:
    """Runs micro-batches, or slices, through a single stage.

    Attributes:
        stage: the stage.
        tensor: its input.
        gradient: of its output; ``None`` on the last stage.
        objective: the loss, on the last stage; ``None`` on others.
        trains: whether it has a backward.
    """

    stage: Stage
    tensor: Tensor
    gradient: Tensor | None
    objective: Objective | None
    trains: bool = True

    def __call__(self, clock: Now, held: int = 1) -> Times:
        """Mean seconds of a micro-batch.

        Args:
            clock: of the measurement.
            held: number of forwards before the first backward. A single micro-batch reuses memory that is still in a
                cache, which on CPUs is faster than in a step.
        """
        begin = clock()
        for number in range(held):
            self.forward(Portion(number))
        forward_s = clock() - begin
        backward_s = [self.backward(Portion(number), clock) for number in range(held)]
        return Times(forward_s / held, *map(mean, zip(*backward_s, strict=True)))

    def forward(self, part: Portion) -> None:
        """Run the forward of a part."""
        self.stage.forward(part, self.tensor, self.objective, trains=self.trains)

    def backward(self, part: Portion, clock: Now) -> tuple[float, float]:
        """Run and time the backward of a part; returns seconds of both halves, the second 0 if it is not split."""
        if not self.trains:
            return 0.0, 0.0
        begin = clock()
        if not self.stage.splits:
            self.stage.backward(part, self.gradient)
            return clock() - begin, 0.0
        self.stage.backward_input(part, self.gradient)
        middle = clock()
        self.stage.backward_weight(part)
        return middle - begin, clock() - middle


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The stages of one rank outside a step. Every rank has the same number of stages; methods are collective.

    Attributes:
        world: this process and the others.
        layout: of the ranks.
        schedule: of a step.
        stages: this rank's.
        data_parallel: all-gathers their weights.
        outputs: spec of every stage's output for a whole micro-batch.
        tokens: inputs of stage 0: a micro-batch, or the slices of one.
        objective: the loss of the last stage's outputs.
        slices: of the micro-batch; ``None`` for a whole one.
        firsts: of ``Batch``, for ``tokens``; ``None`` where attention has no borders.
    """

    world: World
    layout: Layout
    schedule: Schedule
    stages: Mapping[int, Stage]
    data_parallel: DataParallel
    outputs: Sequence[TensorSpec]
    tokens: Sequence[Tensor]
    objective: Objective
    slices: TokenSlices | None = None
    firsts: Sequence[Tensor] | None = None

    @property
    def is_one_thread(self) -> bool:
        """Whether a stage's seconds are those of one thread of this process, which waits for nothing."""
        is_alone = all(len(group) == 1 for group in self.layout.lockstep_groups())
        return self.world.device.type == "cpu" and torch.get_num_threads() == 1 and is_alone

    @property
    def clock(self) -> Now:
        """A clock that synchronizes this rank's device, or the CPU time of the only thread, without other programs."""
        return time.thread_time if self.is_one_thread else partial(now, self.world.device)

    def visits(self) -> Iterator[tuple[int, Stage]]:
        """Iterate over the stages; each has its whole weights meanwhile. Gradients are dropped afterwards."""
        for index, stage in self.stages.items():
            with self.data_parallel.gathered(index, self.world.timeout.total_seconds()):
                yield index, stage
            for parameter in stage.module.parameters():
                parameter.grad = None

    def in_turns(self, work: Callable[[], Found], teams: Sequence[Sequence[int]] = ()) -> Found:
        """Call ``work`` once on each rank, one team after the other; returns this rank's result.

        Args:
            work: the call.
            teams: disjoint groups of ranks that cover all ranks; by default those in lockstep.
        """
        found: list[Found] = []
        for team in teams or self.layout.lockstep_groups():
            if self.world.rank in team:
                found.append(work())
            self.world.wait_for_all()
        return found[0]

    def run_of(self, stage: Stage, number: int = 0) -> StageRun:
        """A run of a micro-batch, or of one of its slices, with random stage input and output gradient."""

        def random(index: int, size: float) -> Tensor:
            spec = self.outputs[index] if self.slices is None else self.slices.spec(self.outputs[index], number)
            return torch.randn(spec.shape, dtype=spec.dtype, device=self.world.device) * size

        stage.documents = None if self.firsts is None else _Alike(self.firsts, len(self.firsts))
        tensor = self.tokens[number] if stage.index == 0 else random(stage.index - 1, 1.0)
        if stage.index == len(self.outputs) - 1:
            return StageRun(stage, tensor, None, self.objective)
        trains = stage.index >= self.schedule.first_backward_stage
        # A small output gradient, since all runs accumulate weight gradients.
        return StageRun(stage, tensor, random(stage.index, 1e-6), None, trains)


class _Alike(StepDocuments):
    """Every micro-batch of a rehearsal sees what the first one does, with a mask of its own as in a step."""

    def of(self, part: Portion) -> Documents:
        return Documents(self._firsts[part.slice])


def warm_up(rehearsal: Rehearsal) -> None:
    """Run every stage forward and backward once, first on the ranks in lockstep with rank 0, then on the others.

    The others find the compiled code in the compiler's cache on disk. They wait at most ``World.timeout``, not the
    shorter stall timeout of a step.
    """
    first = rehearsal.layout.lockstep_groups()[0]
    others = [rank for rank in range(rehearsal.world.size) if rank not in first]
    for _, stage in rehearsal.visits():
        run = rehearsal.run_of(stage)
        rehearsal.in_turns(partial(run, rehearsal.clock), [first, others])


class Turn(NamedTuple):
    """Seconds of a run with messages around it, on the thread that computes.

    Attributes:
        run_s: of the run, with the slowdown by the threads that move messages.
        receive_s: CPU seconds of the thread to post a receive; 0 without neighbors.
        send_s: the same of a send.
    """

    run_s: float
    receive_s: float
    send_s: float


class Exchange:
    """Messages between this rank and its neighbors in the pipeline.

    Args:
        world: this process and the others.
        transport: to the pipeline's other ranks.
        spec: of each tensor.
        layout: of the ranks.

    Attributes:
        place: this rank's pipeline rank.
        peers: pipeline ranks of its neighbors; empty in a pipeline of one rank.
    """

    def __init__(self, world: World, transport: Transport, spec: TensorSpec, layout: Layout) -> None:
        self.place = layout.coordinates(world.rank).pipeline
        self._world, self._transport, self._spec = world, transport, spec
        self._tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=world.device)
        self.peers = [peer for peer in (self.place - 1, self.place + 1) if 0 <= peer < layout.pp]

    def send(self, peer: int) -> UnderWay:
        """Send a tensor to a rank."""
        return self._transport.send(self._tensor, peer)

    def receive(self, peer: int) -> UnderWay:
        """Receive a tensor from a rank."""
        return self._transport.receive(self._spec, peer)

    def finish(self, *transfers: UnderWay) -> None:
        """Wait for transfers."""
        for transfer in transfers:
            finish(transfer, self._world.timeout.total_seconds())

    def around(self, run: Callable[[], object], count: int, clock: Now | None = None) -> list[Turn]:
        """Time ``count`` runs, each with one message from and one to each neighbor, as in the steady phase of 1F1B.

        Args:
            run: the run.
            count: number of runs.
            clock: of the runs; by default wall time.
        """
        clock = clock or partial(now, self._world.device)
        turns: list[Turn] = []
        under_way: list[UnderWay] = []
        num_peers = max(1, len(self.peers))
        for _ in range(count):
            # CPU time: waiting for a core is simulated, so it must not be in the cost.
            posting = [time.thread_time()]
            posted = [self.receive(peer) for peer in self.peers]
            posting.append(time.thread_time())
            begin = clock()
            run()
            run_s = clock() - begin
            posting.append(time.thread_time())
            posted += [self.send(peer) for peer in self.peers]
            posting.append(time.thread_time())
            turns.append(Turn(run_s, (posting[1] - posting[0]) / num_peers, (posting[3] - posting[2]) / num_peers))
            # One run later: in a step a message is under way while the next micro-batch computes.
            self.finish(*under_way)
            under_way = posted
        self.finish(*under_way)
        return turns
