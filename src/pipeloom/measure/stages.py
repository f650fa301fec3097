"""Profiles the stages of a run: seconds of each stage, alone and while all ranks compute."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np

from pipeloom.cost.costs import ActionCosts, StageCosts
from pipeloom.cost.slices import SliceCosts
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.communication.under_way import UnderWay, finish
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage import Portion
from pipeloom.measure.rehearsal import Exchange, Rehearsal, StageRun, Times, Together
from pipeloom.measure.stopwatch import Now, now
from pipeloom.measure.turns import turns_of
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import OUT_OF
from pipeloom.system.cores import own_cores
from pipeloom.workload.layout import Layout

_REPEATS, _COLLECTIVES = 2, 5
"""Measurements of a stage, in CPU time where that is possible, and of a collective, which others disturb more."""
_MOST_HELD = 2
_ALONE_S, _TOGETHER_S, _MESSAGES_S = 0.12, 0.12, 0.1
"""Compute of a rank alone, while all ranks compute, once of two times, and beside messages."""
_MESSAGES = 24
_LEAST_ONE_WAY = 6
_TURNS_S = 0.1


@dataclass(frozen=True)
class Profile:
    """Measured costs of a run.

    Attributes:
        costs: seconds of each stage, computing alone; of a transfer without its posting, while all ranks but the
            receiving one compute; of each stage's collectives, while all ranks compute.
        host_by_rank: host name of each pipeline rank.
        capacity_by_host: by host name, the number of ranks of one pipeline that the host could serve at full speed:
            below their number if ranks share cores, caches or memory, also with other replicas.
        turn_s_by_host: by host name, seconds for which a rank has a core while others wait for one; without an entry,
            no rank waits.
        slices: for each token slice its seconds in each stage; empty without token slices.
        receive_s: to post a receive, on the thread that computes; 0 where the device computes.
        send_s: to post a send, in the same way.
        others: profiles of the replicas behind the first one, where each has its own number of micro-batches.
    """

    costs: StageCosts
    host_by_rank: tuple[str, ...]
    capacity_by_host: dict[str, float]
    turn_s_by_host: dict[str, float] = field(default_factory=dict[str, float])
    slices: tuple[StageCosts, ...] = ()
    receive_s: float = 0.0
    send_s: float = 0.0
    others: "tuple[Profile, ...]" = ()

    def with_costs(self, **costs: Any) -> "Profile":
        """The profile, of all replicas, with some costs."""
        others = tuple(one.with_costs(**costs) for one in self.others)
        return replace(self, costs=replace(self.costs, **costs), others=others)

    @property
    def action_costs(self) -> ActionCosts:
        """Costs for the simulator."""
        return SliceCosts(self.costs, self.slices) if self.slices else self.costs


def timed(costs: StageCosts, times: Sequence[Times]) -> StageCosts:
    """The costs with the measured seconds of each stage."""
    forward_s, first_s, weight_s = zip(*times, strict=True)
    backward_s = tuple(first + second for first, second in zip(first_s, weight_s, strict=True))
    split_s = weight_s if any(weight_s) else ()
    return replace(costs, forward_s=forward_s, backward_s=backward_s, weight_s=split_s)


def profile_stages(rehearsal: Rehearsal, transport: Transport, clock: Clock) -> Profile | None:
    """Time forward, backward, weight gather and gradient reduction of every stage of the pipeline. Collective.

    The halves of split backwards are timed separately. Repeated for each stage of a rank:

    1. its weights are all-gathered;
    2. all ranks compute and exchange messages at once, which shows how much they slow each other down, how long the
       computing thread takes to post a message, and what share of the cores the processes use for other work; ranks of
       one thread are timed in CPU time, which excludes other programs, here and in 3;
    3. one group of ranks in lockstep is timed alone on each host; ranks with their own devices all are. The other ranks
       are as much faster alone as those of their host that are timed;
    4. the second rank sends tensors to the first one, which waits for them, while it and all others compute forwards
       (only for the first stage);
    5. all ranks compute at once as in 2; the window with the shorter times counts, as the less disturbed one;
    6. the stage's collectives are timed while all ranks compute.

    In 2, 3 and 5 two micro-batches are in flight if the step has so many.
    Where ranks of one thread are more than their cores, the turns that the system gives them are timed at the end.

    Args:
        rehearsal: of whole micro-batches; the profile is of the first pipeline.
        transport: to the pipeline's other ranks.
        clock: of the lane of collectives.

    Returns:
        The profile on rank 0, ``None`` elsewhere.
    """
    world, layout = rehearsal.world, rehearsal.layout
    exchange = Exchange(world, transport, rehearsal.outputs[0], layout)
    collective_s: dict[int, tuple[float, float]] = {}
    times: dict[int, Times] = {}
    is_timed_alone = world.rank in rehearsal.teams[0]
    transfers: list[float] = []
    together: list[Together] = []
    alone_s = beside_s = 0.0
    for index, stage in rehearsal.visits():
        run, held = rehearsal.run_of(stage), most_held(rehearsal.schedule, index)
        warm = _shortest_times(run, rehearsal.clock, held)  # allocates, and warms caches
        load = _Load(world, partial(run, rehearsal.clock), sum(warm))
        # Ranks that share cores slow each other down by a factor of up to their number; half of it is assumed.
        count = max(1, load.num_runs(_TOGETHER_S / len(rehearsal.stages) / max(1, world.size / 2)))
        world.wait_for_all()
        before = exchange.together(run, rehearsal.clock, count, held)
        world.wait_for_all()
        least = load.num_runs(_ALONE_S / len(rehearsal.stages))
        alone = _shortest_times(run, rehearsal.clock, held, least) if is_timed_alone else None
        world.wait_for_all()
        if not times:  # messages have the same shape at every stage boundary
            transfers = _time_messages(rehearsal, exchange, run, warm.forward_s)
        world.wait_for_all()
        together += [before, exchange.together(run, rehearsal.clock, count, held)]
        beside = min((Times.medians(one.times) for one in together[-2:]), key=sum)
        # Where the stage was faster beside the others, something else disturbed it while it was alone.
        times[index] = beside if alone is None else Times.shortest([alone, beside])
        alone_s, beside_s = alone_s + sum(times[index]), beside_s + sum(beside)
        collective_s[index] = _time_collectives(rehearsal, clock, index, load)
    slowdown = beside_s / alone_s if is_timed_alone else None
    part = _Part.of(rehearsal, together, times, slowdown, transfers=transfers, collective_s=collective_s)
    parts: list[_Part] | None = world.gather(part)
    return None if parts is None else _joined_replicas(_all_alone(parts), layout, world.device.type == "cuda")


@dataclass(frozen=True)
class _Part:
    """Measurements of one rank.

    Attributes:
        host: its name.
        times: by stage, computing alone; while all ranks compute if the rank was not timed alone.
        slowdown: factor by which the seconds of stages are larger while all ranks compute, wall time or CPU time;
            ``None`` if the rank was not timed alone.
        cores: that the process may use, if its seconds are CPU time; else ``None``.
        beside: number of cores that the process uses meanwhile for neither stages nor posts.
        transfers: as ``_time_one_way`` returns them.
        posts: seconds to post a receive and a send.
        collective_s: by stage, seconds of weight gather and gradient reduction.
        turns_s: seconds for which the rank had a core while all wanted one; empty if each has its own.
    """

    host: str
    times: dict[int, Times]
    slowdown: float | None
    cores: frozenset[int] | None
    beside: float
    transfers: list[float]
    posts: tuple[float, float]
    collective_s: dict[int, tuple[float, float]]
    turns_s: list[float]

    @classmethod
    def of(
        cls,
        rehearsal: Rehearsal,
        together: Sequence[Together],
        times: dict[int, Times],
        slowdown: float | None,
        *,
        transfers: list[float],
        collective_s: dict[int, tuple[float, float]],
    ) -> "_Part":
        """What was measured while all ranks computed, and beside it; times the turns on shared cores. Collective."""
        cores = own_cores() if rehearsal.is_one_thread else None
        beside = sum(one.beside_s for one in together) / sum(one.wall_s for one in together)
        posts = median(one.receive_s for one in together), median(one.send_s for one in together)
        rehearsal.world.wait_for_all()  # all want a core at the same time
        turns_s = turns_of(time.perf_counter, _TURNS_S) if cores and len(cores) < rehearsal.world.size else []
        host = rehearsal.hosts[rehearsal.world.rank]
        return cls(host, times, slowdown, cores, beside, transfers, posts, collective_s, turns_s)


def _all_alone(parts: Sequence[_Part]) -> list[_Part]:
    """The measurements with a slowdown of every rank: the mean of those of its host, or of all if it has none."""
    by_host: dict[str, list[float]] = {}
    for part in parts:
        if part.slowdown is not None:
            by_host.setdefault(part.host, []).append(part.slowdown)
    every = [slowdown for here in by_host.values() for slowdown in here]

    def alone(part: _Part) -> _Part:
        if part.slowdown is not None:
            return part
        slowdown = mean(by_host.get(part.host, every))
        times = {stage: Times(*(seconds / slowdown for seconds in one)) for stage, one in part.times.items()}
        return replace(part, times=times, slowdown=slowdown)

    return [alone(part) for part in parts]


def _joined_replicas(parts: Sequence[_Part], layout: Layout, has_own_device: bool) -> Profile:
    """The profile of the first pipeline, with those of the others if replicas are not equal."""
    first, *others = layout.replicas()
    profile = _joined(parts, first, has_own_device)
    if layout.has_equal_replicas:  # replicas are taken to be equally fast
        return profile
    # Messages are timed in the first replica.
    own = [_joined(parts, other, has_own_device, profile.costs.transfer_s) for other in others]
    return replace(profile, others=tuple(own))


def _joined(
    parts: Sequence[_Part], pipeline: Sequence[int], has_own_device: bool, transfer_s: float | None = None
) -> Profile:
    """The profile of a pipeline; ``transfer_s`` of another one's messages, ``None`` if it timed its own."""
    own = [parts[rank] for rank in pipeline]
    by_stage = {index: (times, part.collective_s[index]) for part in own for index, times in part.times.items()}
    times, collective_s = zip(*(by_stage[index] for index in sorted(by_stage)), strict=True)
    unshard_s, reduce_s = zip(*collective_s, strict=True)
    hosts = [part.host for part in own]
    capacity: dict[str, float] = {}
    turn_s: dict[str, float] = {}
    for host in set(hosts):
        here = [part for part in parts if part.host == host]
        columns = ([part.slowdown, part.cores, part.beside] for part in here)
        served = len(here) if has_own_device else num_served(*zip(*columns, strict=True))
        capacity[host] = served * hosts.count(host) / len(here)  # this pipeline's share among the replicas
        if turns := [seconds for part in here for seconds in part.turns_s]:
            # Threads that wake for a moment cut turns short.
            turn_s[host] = float(np.percentile(turns, 75))
    # Only on a CPU does the thread that posts messages also compute.
    has_posts = len(own) > 1 and not has_own_device
    receive_s, send_s = map(mean, zip(*(part.posts for part in own), strict=True)) if has_posts else (0.0, 0.0)
    if transfer_s is None:
        transfer_s = message_s(own[0].transfers, own[1].transfers, send_s) if len(own) > 1 else 0.0
    around = StageCosts((), (), transfer_s, unshard_s, reduce_s)
    costs = timed(around, times)
    return Profile(costs, tuple(hosts), capacity, turn_s, receive_s=receive_s, send_s=send_s)


def num_served(slowdowns: Sequence[float], cores: Sequence[frozenset[int] | None], beside: Sequence[float]) -> float:
    """Number of ranks that a host could serve at full speed.

    Args:
        slowdowns: factor by which the seconds of each rank are larger while all compute.
        cores: that each rank may use, if its seconds are CPU time of one thread; ``None`` if they are wall time.
        beside: number of cores that each rank uses meanwhile for other work than stages and posts.
    """
    num_ranks = len(slowdowns)
    known = [own for own in cores if own is not None]
    # Wall time contains the waiting for a core: n ranks with a mean slowdown s do the work of n / s ranks. CPU time
    # does not, and other programs do not change it: c cores do the work of c / s ranks, without what threads of the
    # ranks use that move messages or wait for them.
    is_wall = len(known) < num_ranks
    at_once = num_ranks if is_wall else min(num_ranks, len(frozenset[int]().union(*known)) - sum(beside))
    return min(at_once, at_once * num_ranks / sum(slowdowns))


def message_s(arrived_s: Sequence[float], begun_s: Sequence[float], send_s: float) -> float:
    """Mean seconds of a message without those of posting it, which the simulator adds.

    Args:
        arrived_s: when the receiving rank had each message.
        begun_s: when the sending rank began to post it.
        send_s: CPU seconds of posting.
    """
    # Without the first ones, which warm up connections and caches.
    both = list(zip(arrived_s, begun_s, strict=True))[len(arrived_s) // 4 :]
    return max(0.0, mean(arrived - begun for arrived, begun in both) - send_s)


def _shortest_times(run: StageRun, clock: Now, held: int, least: int = 0) -> Times:
    """Shortest times of at least ``least`` and ``_REPEATS`` micro-batches, with ``held`` of them in flight."""
    times: list[Times] = []
    while len(times) < max(least, _REPEATS):
        times += run(clock, held)
    return Times.shortest(times)


@dataclass(frozen=True)
class _Load:
    """Background compute on all ranks: a run of a micro-batch, and its seconds."""

    world: World
    run: Callable[[], object]
    run_s: float

    def num_runs(self, seconds: float) -> int:
        """Number of runs that take so many seconds, averaged over the ranks. Collective."""
        total_s, run_s = self.world.sum([seconds, self.run_s])
        return round(total_s / run_s)


def _is_with_first(layout: Layout, rank: int) -> bool:
    """Whether a rank is of the first replica, or of one that computes in lockstep with it."""
    (own,) = [group for group in layout.lockstep_groups() if rank in group]
    return any(layout.replica_of(layout.coordinates(one)) == 0 for one in own)


def _time_messages(rehearsal: Rehearsal, exchange: Exchange, run: StageRun, forward_s: float) -> list[float]:
    """Time messages between the first two ranks beside forwards of the others; empty in a pipeline of one rank."""
    if not exchange.peers:
        return []
    world, layout = rehearsal.world, rehearsal.layout
    shares_clock = world.device.type == "cpu" and len(set(rehearsal.hosts)) == 1  # a host has one
    time_transfers = _time_one_way if shares_clock else _time_there_and_back
    forward = partial(replace(run, trains=False).forward, Portion(0))
    load = _Load(world, forward, forward_s)
    return time_transfers(exchange, load, takes_part=exchange.place <= 1 and _is_with_first(layout, world.rank))


def _time_one_way(exchange: Exchange, load: _Load, *, takes_part: bool) -> list[float]:
    """Time messages from the second rank, which computes on, to the first one, which only waits for them.

    As an exposed message of a step: its sender's core, and those of other ranks, are busy with compute.

    Returns:
        On the first rank when each message has arrived, on the second one when its posting begins, in seconds of the
        host's clock; on other ranks an empty list. The end of the posting would not do: the system may let the receiver
        run before the sender's call returns.
    """
    count = max(_LEAST_ONE_WAY, load.num_runs(_MESSAGES_S))  # the same on all ranks
    marks: list[float] = []
    under_way: list[UnderWay] = []
    for _ in range(count):
        if takes_part and exchange.place == 0:
            exchange.finish(exchange.receive(1))
            marks.append(time.perf_counter())
            continue
        load.run()
        if takes_part:
            exchange.finish(*under_way)
            marks.append(time.perf_counter())
            under_way = [exchange.send(0)]
    if under_way:
        load.run()  # beside the last message
        exchange.finish(*under_way)
    return marks


def _time_there_and_back(exchange: Exchange, load: _Load, *, takes_part: bool) -> list[float]:
    """Time messages between the first two ranks: half of a round trip, while all other ranks compute.

    Returns:
        Seconds of each message on the first rank, zeros on the second one, an empty list elsewhere.
    """
    num_runs = max(1, load.num_runs(_MESSAGES_S))  # the same on all ranks, since tensor-parallel ranks run together
    if not takes_part:
        for _ in range(num_runs):
            load.run()
        return []
    times: list[float] = []
    for _ in range(_MESSAGES):
        begin = now(load.world.device)
        for act in (exchange.send, exchange.receive) if exchange.place == 0 else (exchange.receive, exchange.send):
            exchange.finish(act(1 - exchange.place))
        times.append((now(load.world.device) - begin) / 2)
    return times if exchange.place == 0 else [0.0] * _MESSAGES


def _time_collectives(rehearsal: Rehearsal, clock: Clock, stage: int, load: _Load) -> tuple[float, float]:
    """Seconds of gathering a stage's weights and of reducing its gradient; 0 for actions that the schedule lacks.

    All ranks do it at once, each in its own group, while they compute. Weights stay unchanged.
    """
    parallel, row = rehearsal.data_parallel, rehearsal.schedule.facts.row

    def reduce() -> UnderWay:
        parallel.reset(trains=True)
        parallel.before_backward(stage, in_step=False)
        return parallel.reduce(stage)

    starts = {Kind.UNSHARD: partial(parallel.unshard, stage), Kind.REDUCE_GRAD: reduce}
    of_stage = row.stage == stage
    gather_s, reduce_s = (
        _time_under_load(clock, start, load) if (row.is_kind(kind) & of_stage).any() else 0.0
        for kind, start in starts.items()
    )
    return gather_s, reduce_s


def _time_under_load(clock: Clock, start: Callable[[], UnderWay], load: _Load) -> float:
    """Median seconds of a collective on its lane, while the rank computes for at least twice as long."""

    def seconds(num_runs: int) -> float:
        load.world.wait_for_all()
        collective = start()
        for _ in range(num_runs):
            load.run()
        finish(collective, load.world.timeout.total_seconds())
        clock.settle()
        return clock.seconds(collective.end) - clock.seconds(collective.begin)

    seconds(0)  # connects and allocates
    num_runs = 1 + load.num_runs(2 * seconds(0))
    return median(seconds(num_runs) for _ in range(_COLLECTIVES))


def most_held(schedule: Schedule, stage: int) -> int:
    """Peak number of micro-batches in flight on a stage, limited to ``_MOST_HELD``.

    1 if the schedule moves or recomputes activations, since memory is short then.
    """
    row = schedule.rows[schedule.placement.rank_by_stage[stage]]
    if schedule.facts.row.is_kind(Kind.RECOMPUTE, *OUT_OF).any():
        return 1
    begins, ends = row.is_kind(Kind.FORWARD), row.is_kind(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    held = np.cumsum(np.where(row.stage == stage, begins.astype(np.int64) - ends, 0)).max(initial=1)
    return max(1, min(_MOST_HELD, int(held) // schedule.num_slices))
