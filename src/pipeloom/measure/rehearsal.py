"""Runs stages outside a step, to time them or to compile them."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from statistics import median
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


Around = Callable[[], AbstractContextManager[None]]
"""Returns the context of a forward or a backward."""


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

    @classmethod
    def shortest(cls, times: Sequence["Times"]) -> "Times":
        """Shortest of several measurements, field by field."""
        return cls(*map(min, zip(*times, strict=True)))


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

    def __call__(self, clock: Now, held: int = 1, around: Around = nullcontext) -> list[Times]:
        """Seconds of each micro-batch.

        Args:
            clock: of the measurement.
            held: number of micro-batches: all forwards, then all backwards. A single one reuses memory that is still in
                a cache, which on CPUs is faster than in a step.
            around: context of each forward and each backward, which is not timed.
        """
        forward_s: list[float] = []
        backward_s: list[tuple[float, float]] = []
        for number in range(held):
            with around():
                begin = clock()
                self.forward(Portion(number))
                forward_s.append(clock() - begin)
        for number in range(held):
            with around():
                backward_s.append(self.backward(Portion(number), clock))
        return [Times(one, *both) for one, both in zip(forward_s, backward_s, strict=True)]

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


def teams_of(groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> list[list[int]]:
    """Join groups of ranks that have no host in common: each joins the first team that none of its hosts is in.

    Examples:
        >>> teams_of([[0], [1], [2], [3]], ["a", "a", "b", "b"])
        [[0, 2], [1, 3]]
    """
    teams: list[list[int]] = []
    places: list[set[str]] = []
    for group in groups:
        own = {hosts[rank] for rank in group}
        free = next((number for number, place in enumerate(places) if not own & place), len(teams))
        if free == len(teams):
            teams.append([])
            places.append(set())
        teams[free] += group
        places[free] |= own
    return teams


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

    @cached_property
    def hosts(self) -> list[str]:
        """By rank the name of its host. Collective at the first use."""
        return self.world.from_first(self.world.gather(socket.gethostname()))

    @cached_property
    def teams(self) -> list[list[int]]:
        """Ranks that compute at the same time without slowing each other down. Collective at the first use.

        All ranks where each has its own device; else one group in lockstep on each host.
        """
        if self.world.device.type == "cuda":
            return [list(range(self.world.size))]
        return teams_of(self.layout.lockstep_groups(), self.hosts)

    def in_turns(self, work: Callable[[], Found], teams: Sequence[Sequence[int]] = ()) -> Found:
        """Call ``work`` once on each rank, one team after the other; returns this rank's result.

        Args:
            work: the call.
            teams: disjoint groups of ranks that cover all ranks; by default ``teams`` of the rehearsal.
        """
        found: list[Found] = []
        for team in teams or self.teams:
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


class Together(NamedTuple):
    """What a rank measures while all ranks compute and exchange messages.

    Attributes:
        times: of each micro-batch, with the slowdown by other ranks and by the threads that move messages.
        receive_s: median CPU seconds of the computing thread to post a receive; 0 without neighbors.
        send_s: the same of a send.
        beside_s: CPU seconds of the whole process, other threads included, for neither runs nor posts.
        wall_s: seconds in which all this was done.
    """

    times: list[Times]
    receive_s: float
    send_s: float
    beside_s: float
    wall_s: float


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

    def together(self, run: StageRun, clock: Now, count: int, held: int = 1) -> Together:
        """Run micro-batches while all ranks do, with the messages of a step between them. Collective.

        Forwards and backwards pass tensors on in turns to the next and to the previous rank, whichever of them they
        are: ranks may hold different numbers of micro-batches, and must not wait for each other.

        Args:
            run: of this rank's stage.
            clock: of the run.
            count: of micro-batches, the same on all ranks.
            held: of them, forwards before the first backward.
        """
        posts_s: dict[bool, list[float]] = {True: [], False: []}
        under_way: list[UnderWay] = []
        ways = cycle((1, -1))

        def post(act: Callable[[int], UnderWay], peer: int, *, sends: bool) -> list[UnderWay]:
            if peer not in self.peers:
                return []
            # CPU time: waiting for a core is simulated, so it must not be in the cost.
            begin_s = time.thread_time()
            posted = act(peer)
            posts_s[sends].append(time.thread_time() - begin_s)
            return [posted]

        @contextmanager
        def messages() -> Iterator[None]:
            way = next(ways)
            posted = post(self.receive, self.place - way, sends=False)
            yield
            posted += post(self.send, self.place + way, sends=True)
            # One action later: in a step a message is under way while the next action computes.
            self.finish(*under_way)
            under_way[:] = posted

        times: list[Times] = []
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        while len(times) < count:
            times += run(clock, min(held, count - len(times)), messages)
        self.finish(*under_way)
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        receive_s, send_s = (median(posts_s[sends]) if posts_s[sends] else 0.0 for sends in (False, True))
        beside_s = max(0.0, cpu_s - sum(map(sum, times)) - sum(map(sum, posts_s.values())))
        return Together(times, receive_s, send_s, beside_s, wall_s)
