"""Measured costs: how long this machine takes for each stage, alone and when all ranks compute at once."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

import numpy as np
import torch
from torch import Tensor

from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.cost.slices import SliceCosts
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.transport import Transfer, Transport, finish
from pipeloom.execute.lanes import JobUnderWay
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage import Objective, Stage
from pipeloom.measure.rehearsal import Run, Times, stage_runner
from pipeloom.measure.stopwatch import now
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import OUT_OF
from pipeloom.workload.layout import Layout

_REPEATS = 5
_MOST_HELD = 4
_CROWD_S = 0.6
_MESSAGES = 24


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        costs: seconds of each stage, computing alone; of a transfer, while the ranks that have no part in it compute;
            of each stage's collectives, while all ranks compute.
        host_by_rank: for each pipeline rank its host, by name; ranks of the same name share one.
        capacity_by_host: ranks of one pipeline that the host serves at full speed when all its ranks compute at once;
            below their number where they share cores, caches or memory, with each other or with other replicas.
        slices: for each token slice its seconds in each stage, behind the ones before it; empty where micro-batches are
            not cut.
    """

    costs: StageCosts
    host_by_rank: tuple[str, ...]
    capacity_by_host: dict[str, float]
    slices: tuple[StageCosts, ...] = ()

    @property
    def action_costs(self) -> Costs:
        """Of the actions of the schedule."""
        return SliceCosts(self.costs, self.slices) if self.slices else self.costs


@dataclass(frozen=True)
class Collectives:
    """What a stage's collectives are timed with.

    Attributes:
        schedule: contains them.
        data_parallel: runs them.
        clock: of its lane.
    """

    schedule: Schedule
    data_parallel: DataParallel
    clock: Clock

    def has(self, kind: Kind) -> bool:
        """Whether the schedule has such an action."""
        return any(row.is_kind(kind).any() for row in self.schedule.rows)


def timed(costs: StageCosts, times: Sequence[Times]) -> StageCosts:
    """The costs with the measured seconds of each stage."""
    forward_s, first_s, weight_s = zip(*times, strict=True)
    backward_s = tuple(first + second for first, second in zip(first_s, weight_s, strict=True))
    split_s = weight_s if any(weight_s) else ()
    return replace(costs, forward_s=forward_s, backward_s=backward_s, weight_s=split_s)


@dataclass(frozen=True)
class _Part:
    """What one rank measured.

    Attributes:
        host: its name.
        alone: by stage its times.
        slowdown: in the crowd.
        transfer_s: seconds of a transfer.
        collective_s: by stage seconds of gather and reduction.
    """

    host: str
    alone: dict[int, Times]
    slowdown: float
    transfer_s: float
    collective_s: dict[int, tuple[float, float]]


def profile_stages(
    world: World,
    stages: Mapping[int, Stage],
    transport: Transport,
    *,
    outputs: Sequence[TensorSpec],
    tokens: Tensor,
    objective: Objective,
    layout: Layout,
    collectives: Collectives,
) -> Profile | None:
    """Time forward and backward of one micro-batch for every stage of the pipeline, its gather and its reduction.

    The halves of a backward are timed each where the stage splits it.

    For one stage of each rank after the other: its weights are gathered; the ranks take turns, so that each is timed
    alone, or with the tensor-parallel ranks that it computes with, while it holds micro-batches as in a step; then two
    exchange tensors while the others compute; then all compute and exchange at once, which shows how much they slow
    each other down. Last the stage's collectives are timed while all compute, as in a step. Gradients that this leaves
    behind are dropped. Every rank calls it.

    Args:
        world: this process among the others.
        stages: this rank's; every rank has equally many.
        transport: to the other ranks.
        outputs: the agreed spec of every stage's output.
        tokens: stage 0's input.
        objective: applied to the last stage's output.
        layout: of the ranks; the profile is of the first pipeline.
        collectives: times gathers and reductions.

    Returns:
        The profile on rank 0, ``None`` elsewhere.
    """
    timeout_s = world.timeout.total_seconds()
    collective_s: dict[int, tuple[float, float]] = {}
    exchange = _Exchange(world, transport, outputs[0], layout)
    alone: dict[int, Times] = {}
    transfer_s = expected = found = 0.0
    for number, (index, stage) in enumerate(stages.items()):
        make = partial(stage_runner, stage, outputs, tokens, objective, world.device)
        run, run_s = make(), 0.0
        with collectives.data_parallel.gathered(index, timeout_s):
            for team in layout.tensor_groups():
                if world.rank in team:
                    one, held = _time(run, _REPEATS), most_held(collectives.schedule, index)
                    run_s = sum(one)  # of more that are held at once, fewer runs are as many measurements
                    alone[index] = one if held == 1 else _time(make(held=held), -(-_REPEATS // held))
                world.wait_for_all()
            if number == 0:  # every boundary has the shape of the first one
                transfer_s = exchange.seconds(run, run_s)
            times = _crowd(exchange, run, run_s, _CROWD_S / len(stages))
            collective_s[index] = _time_collectives(collectives, index, _Load(world, run, run_s), timeout_s)
        expected += len(times) * run_s
        found += sum(times)
        for parameter in stage.module.parameters():
            parameter.grad = None
    part = _Part(socket.gethostname(), alone, found / expected, transfer_s, collective_s)
    parts: list[_Part] | None = world.gather(part)
    return None if parts is None else _joined(parts, layout.pipelines()[0], world.device.type == "cuda")


def _joined(parts: Sequence[_Part], pipeline: Sequence[int], has_own_device: bool) -> Profile:
    own = [parts[rank] for rank in pipeline]
    by_stage = {index: (times, part.collective_s[index]) for part in own for index, times in part.alone.items()}
    times, collective_s = zip(*(by_stage[index] for index in sorted(by_stage)), strict=True)
    unshard_s, reduce_s = zip(*collective_s, strict=True)
    hosts = [part.host for part in own]
    capacity: dict[str, float] = {}
    for host in set(hosts):
        slowdowns = [part.slowdown for part in parts if part.host == host]
        num_ranks = len(slowdowns)
        # n ranks that slow each other down by a mean factor do the work of n / factor.
        served = num_ranks if has_own_device else min(num_ranks, num_ranks * num_ranks / sum(slowdowns))
        capacity[host] = served * hosts.count(host) / num_ranks  # replicas do the same at the same time
    around = StageCosts((), (), own[0].transfer_s, unshard_s, reduce_s)
    return Profile(timed(around, times), tuple(hosts), capacity)


@dataclass(frozen=True)
class _Load:
    """What a rank computes meanwhile.

    Attributes:
        world: the ranks, all of which do.
        run: one forward and backward.
        run_s: seconds of it, alone.
    """

    world: World
    run: "Run"
    run_s: float

    def num_runs(self, seconds: float) -> int:
        """How many fill at least twice a time, the same number on all ranks, which call it together."""
        return 1 + round(2 * _mean(self.world, seconds) / _mean(self.world, self.run_s))


def _time_collectives(collectives: Collectives, stage: int, load: _Load, timeout_s: float) -> tuple[float, float]:
    """Seconds of gathering a stage's weights and of reducing its gradient; 0 for what the schedule does not do.

    All ranks do it at once, each with its own group, and compute meanwhile. The stage's weights are here, and what a
    gather brings is what they are.
    """
    parallel = collectives.data_parallel
    gather_s = reduce_s = 0.0
    if collectives.has(Kind.UNSHARD):
        gather_s = _time_under_load(collectives.clock, lambda: parallel.unshard(stage), load, timeout_s)
    if collectives.has(Kind.REDUCE_GRAD):

        def reduce() -> JobUnderWay:
            parallel.reset(trains=True)
            parallel.before_backward(stage)
            return parallel.reduce(stage)

        reduce_s = _time_under_load(collectives.clock, reduce, load, timeout_s)
    return gather_s, reduce_s


def _time_under_load(clock: Clock, start: Callable[[], JobUnderWay], load: _Load, timeout_s: float) -> float:
    """Median seconds of a collective on its lane, while the rank computes for longer than it takes without."""

    def seconds(num_runs: int) -> float:
        load.world.wait_for_all()
        collective = start()
        for _ in range(num_runs):
            load.run()
        finish(collective, timeout_s)
        clock.settle()
        return clock.seconds(collective.end) - clock.seconds(collective.begin)

    seconds(0)  # connects, and allocates
    num_runs = load.num_runs(seconds(0))
    return median(seconds(num_runs) for _ in range(_REPEATS))


def most_held(schedule: Schedule, stage: int) -> int:
    """The most micro-batches whose activations a stage holds at once in a schedule, up to those that are timed at once.

    One where any are moved or recomputed: memory is short then.
    """
    row = schedule.rows[schedule.placement.rank_by_stage[stage]]
    if schedule.facts.row.is_kind(Kind.RECOMPUTE, *OUT_OF).any():
        return 1
    begins, ends = row.is_kind(Kind.FORWARD), row.is_kind(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    held = np.cumsum(np.where(row.stage == stage, begins.astype(np.int64) - ends, 0)).max(initial=1)
    return max(1, min(_MOST_HELD, int(held) // schedule.num_slices))


def _time(run: Run, repeats: int) -> Times:
    run()  # allocates, and fills caches
    return Times.medians([run() for _ in range(repeats)])


class _Exchange:
    """Tensors between this rank and its neighbors in the pipeline.

    Args:
        world: this process among the others.
        transport: to the pipeline's other ranks.
        spec: of each tensor.
        layout: of the ranks.
    """

    def __init__(self, world: World, transport: Transport, spec: TensorSpec, layout: Layout) -> None:
        self._place = layout.coordinates(world.rank).pipeline
        self._is_first_replica = layout.coordinates(world.rank).data == 0
        self._num_ranks = layout.pp
        self.world = world
        self._transport = transport
        self._spec = spec
        self._tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=world.device)
        self._peers = [peer for peer in (self._place - 1, self._place + 1) if 0 <= peer < self._num_ranks]

    def receive_all(self) -> list[Transfer]:
        """Post a receive from each neighbor."""
        return [self._transport.receive(self._spec, peer) for peer in self._peers]

    def send_all(self) -> list[Transfer]:
        """Send a tensor to each neighbor."""
        return [self._transport.send(self._tensor, peer) for peer in self._peers]

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer."""
        finish(transfer, self.world.timeout.total_seconds())

    def seconds(self, run: Run, alone_s: float) -> float:
        """Seconds of one tensor between the first two ranks, half of there and back, while all other ranks compute.

        0 on other ranks, or with one rank. On a host whose cores are all busy a message is taken up late, so the time
        on an idle host would be too short.
        """
        if self._num_ranks == 1:
            return 0.0
        num_runs = max(1, round(_CROWD_S / 2 / _mean(self.world, alone_s)))  # tensor-parallel ranks run together
        if self._place > 1 or not self._is_first_replica:
            for _ in range(num_runs):
                run()
            return 0.0
        times: list[float] = []
        for _ in range(_MESSAGES):
            begin = now(self.world.device)
            for is_send in (self._place == 0, self._place != 0):
                self.finish(self._one_way(is_send=is_send))
            times.append((now(self.world.device) - begin) / 2)
        # The first ones find connections and caches cold.
        return mean(times[_MESSAGES // 4 :])

    def _one_way(self, *, is_send: bool) -> Transfer:
        peer = 1 - self._place
        return self._transport.send(self._tensor, peer) if is_send else self._transport.receive(self._spec, peer)


def _mean(world: World, seconds: float) -> float:
    """The mean over all ranks, which call it together."""
    return world.sum([seconds])[0] / world.size


def _crowd(exchange: _Exchange, run: Run, alone_s: float, seconds: float) -> list[float]:
    """Seconds of each run of this rank's stage, and of asking for its messages, while all ranks do the same.

    A tensor goes to the next rank for each forward and back for each backward, as in a step; what the threads
    that move them take from the cores is part of the slowdown, and so is what the rank itself does to post them.
    """
    world = exchange.world
    mean_s = _mean(world, alone_s)
    times: list[float] = []
    under_way: list[Transfer] = []
    world.wait_for_all()
    # Ranks that share cores slow each other down by up to their number; half of it is taken as the likely factor.
    for _ in range(max(1, round(seconds / (mean_s * max(1, world.size / 2))))):
        begin = time.perf_counter()
        exchanged = exchange.receive_all()
        run()
        exchanged += exchange.send_all()
        times.append(now(world.device) - begin)
        # A run later, as in a step, where a message is on its way while the next micro-batch computes.
        for transfer in under_way:
            exchange.finish(transfer)
        under_way = exchanged
    for transfer in under_way:
        exchange.finish(transfer)
    return times
