"""The simulator: schedule and costs -> trace."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.calls import checked
from pipeloom.cost.costs import ActionCosts, StageCosts
from pipeloom.errors import UserError
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.clock import example, occurring, seconds_of_all
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.facts import Facts, Graph, Seconds, followers_of
from pipeloom.schedule.kernels.types import Ints
from pipeloom.schedule.kernels.walk import walk
from pipeloom.schedule.kernels.walk_sharing import walk_sharing
from pipeloom.schedule.kinds import COMPUTE_KINDS, KINDS, STAGE_SWAP_KINDS, Kind
from pipeloom.schedule.lanes import HOST_LANE
from pipeloom.schedule.stage_swaps import stage_moves
from pipeloom.trace import Spans, Trace


@dataclass(frozen=True)
class Sharing:
    """Resources that several ranks use at the same time: the cores of a host, the network card of a node.

    While ``n`` actions use a resource of capacity ``c``, each runs at the speed ``min(1, c / n)``; costs are the
    seconds of an action that runs alone. A resource with turns runs at most ``c`` actions at a time, rounded up, and
    the others wait: an operating system lets a process have a core for some milliseconds. Before its first turn an
    action has not started.

    Attributes:
        resource_of: (action, rank) -> the resource that the action uses, or ``None``; the same for all micro-batches.
        capacity: resource -> number of actions that it serves at full speed.
        turn_s: resource -> seconds of a turn, above 0, after which an action waits behind all others. A rank that
            continues with another action keeps the rest. Without an entry all actions run at once.
        at_once: kinds of actions that wait for no turn: what moves messages sleeps until there is something to move,
            and an operating system lets it in at once.
        onward_of: (action, rank) -> the resource through which the action goes behind the first, such as the downlink
            of the receiver behind the uplink of the sender, or ``None``; the same for all micro-batches. It serves the
            action at the rate at which the first one passes it on, or at its max-min fair share, if that is lower, and
            buffers the difference; the action ends when both have served all of it. Such a resource is in no
            ``resource_of``.
    """

    resource_of: Callable[[Action, int], Hashable | None]
    capacity: Mapping[Any, float]
    turn_s: Mapping[Any, float] = field(default_factory=dict[Any, float])
    at_once: frozenset[Kind] = frozenset()
    onward_of: Callable[[Action, int], Hashable | None] | None = None


@dataclass(frozen=True)
class Host:
    """The processor of each rank, which launches the rank's actions one by one in the order of its row.

    Attributes:
        launch_s: action -> seconds of the launch; the same for all micro-batches. The action starts after its launch.
        run_ahead: most compute actions of a rank that are launched and have not ended; at the limit the host waits.
            ``None`` for no limit. 1 where the thread that launches also computes, as on a CPU.
        resource_of: rank -> the shared resource that its launches use; ``None`` for none. Only with ``Sharing``.

    Raises:
        UserError: ``run_ahead`` is below 1.
    """

    launch_s: Callable[[Action], float]
    run_ahead: int | None = None
    resource_of: Callable[[int], Hashable | None] | None = None

    def __post_init__(self) -> None:
        """Check ``run_ahead``."""
        if self.run_ahead is not None and self.run_ahead < 1:
            raise UserError(f"run_ahead must be at least 1, found {self.run_ahead}")


@checked
def simulate(schedule: Schedule, costs: ActionCosts, sharing: Sharing | None = None, host: Host | None = None) -> Trace:
    """Simulate a step: start and end of every action of a schedule. Deterministic.

    An action starts when all actions that it waits for have ended: those whose results it uses, the one before it on
    its lane, and, for communication, the compute action before it in its row (``pipeloom.schedule.facts``).

    Examples:
        >>> from pipeloom import Costs, make_schedule, simulate, summarize
        >>> schedule = make_schedule("breadth-first", pp=4, loops=4, num_microbatches=8)
        >>> trace = simulate(schedule, Costs(forward_s=1.0, backward_s=2.0))
        >>> trace.end_s, summarize(trace).bubble_overhead
        (105.0, 0.09375)

    Args:
        schedule: at any level. In a compute-only schedule tensors arrive at once.
        costs: seconds of each action, such as ``Costs`` or ``StageCosts``.
        sharing: resources that several ranks share; ``None`` for none.
        host: launches of actions; ``None`` if they take no time.

    Returns:
        A trace that begins at 0, spans in row order. With ``host``, behind them a span of the host's lane for each
        action, in the same order.

    Raises:
        UserError: costs have another number of stages, an action takes less than 0 seconds, or infinitely many with
            ``sharing``, launches use shared resources that ``sharing`` does not describe, or a resource has no
            capacity, or is the first one of an action and the second one of an action.
    """
    if isinstance(costs, StageCosts):
        costs.check(schedule.num_stages)
    facts, graph = schedule.facts, schedule.graph
    seconds = seconds_of_all(facts, costs.seconds, ignores_microbatch=costs.ignores_microbatch)
    _price_stage_swaps(facts, costs, seconds)
    _refuse_negative(facts, seconds)
    if host is not None and host.resource_of is not None and sharing is None:
        raise UserError("expected sharing with the capacity of what launches use (host.resource_of), found none")
    row, rank, lane = facts.row, facts.ranks, facts.lane
    waits, count = graph.waits, len(facts.lanes)
    if host is not None:
        waits, seconds = _with_launches(graph, seconds, host)
        row, rank, lane = row + row, np.tile(rank, 2), np.concatenate([lane, rank + np.int32(count)])
        count += schedule.num_ranks
    if sharing is not None:
        starts, ends = _times_sharing(graph, waits, seconds, sharing, host)
    else:
        starts, ends = kernel(walk, len(seconds))(waits, lane, count, seconds)
    every = [*(lane for _, lane in facts.lanes), *([HOST_LANE] * schedule.num_ranks)]
    lanes = tuple(dict.fromkeys(every))
    place = {lane: number for number, lane in enumerate(lanes)}
    number = np.array([place[one] for one in every], np.int32)
    return Trace(Spans(row, rank, number[lane], lanes, starts, ends), schedule.num_ranks)


def _refuse_negative(facts: Facts, seconds: Seconds) -> None:
    # Not `< 0`, which is false for NaN.
    wrong = np.flatnonzero(~(seconds >= 0))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"every action must take at least 0 seconds, found {seconds[first]:g} for {facts.action(first)} on rank "
            f"{facts.ranks[first]}, the first of {len(wrong):,} such actions; correct the costs"
        )


def _price_stage_swaps(facts: Facts, costs: ActionCosts, seconds: Seconds) -> None:
    """Write the seconds of swaps of whole stages, which depend on the contents that change between the swaps."""
    if facts.row.is_kind(*STAGE_SWAP_KINDS).any():
        for row, first in zip(facts.rows, facts.columns.first.tolist(), strict=False):
            for slot, content in stage_moves(row).items():
                seconds[first + slot] = costs.move_s(int(row.stage[slot]), content)


def _with_launches(graph: Graph, seconds: Seconds, host: Host) -> tuple[Ints, Seconds]:
    """Waits and seconds of the actions, then of their launches.

    Launches are nodes of the graph: each waits for the launch before it in the row and for the compute action
    ``run_ahead`` places before; the action waits for its launch.
    """
    facts, size = graph.facts, graph.num_nodes
    nodes, first = np.arange(size), facts.columns.first
    waits = np.full((2 * size, graph.waits.shape[1] + 1), -1, np.int32)
    waits[:size, :-1], waits[:size, -1] = graph.waits, nodes + size
    # The host launches in the order of the row, one action after the other.
    waits[size:, 0] = np.where(nodes > first[facts.ranks], nodes + size - 1, -1)
    if host.run_ahead is not None:
        waits[size:, 1] = _throttled_by(facts, host.run_ahead)
    # Launches behind the actions, so that the first half of the times is that of the actions.
    return waits, np.concatenate([seconds, seconds_of_all(facts, host.launch_s)])


def _throttled_by(facts: Facts, run_ahead: int) -> NDArray[np.int64]:
    """For each action the compute action that must end before its launch; -1 for none."""
    is_compute = facts.row.is_kind(*COMPUTE_KINDS)
    computes = np.append(np.flatnonzero(is_compute), -1)
    num_before = np.cumsum(is_compute) - is_compute
    own = num_before - num_before[facts.columns.first[facts.ranks]]
    return computes[np.where(own >= run_ahead, num_before - run_ahead, -1)]


def _times_sharing(
    graph: Graph, waits: Ints, seconds: Seconds, sharing: Sharing, host: Host | None
) -> tuple[Seconds, Seconds]:
    """Starts and ends with shared resources, of the actions and, with ``host``, of their launches."""
    facts = graph.facts
    # Resource 0 has no limit: for actions that share nothing.
    resources: dict[Hashable, int] = {None: 0}
    used, onward = _used(facts, sharing, resources)
    if host is not None:
        names = [host.resource_of(rank) if host.resource_of else None for rank in range(facts.placement.num_ranks)]
        by_rank = np.array([resources.setdefault(name, len(resources)) for name in names], np.int32)
        used = np.concatenate([used, by_rank[facts.ranks]])
        onward = np.concatenate([onward, np.zeros_like(onward)])
    _refuse_wrong(sharing, used, onward, list(resources), seconds)
    capacity = [np.inf if name is None else sharing.capacity[name] for name in resources]
    # The graph keeps its followers for the next simulation; launches are nodes of this one alone.
    begin, followers = graph.followers if host is None else followers_of(waits)
    turn_s = np.array([sharing.turn_s.get(name, np.inf) for name in resources], np.float64)[used]
    turn_s[: len(facts.row)][facts.row.is_kind(*sharing.at_once)] = np.inf
    thread = np.resize(facts.ranks, len(seconds))
    walk = kernel(walk_sharing, len(seconds))
    shared = used, onward, thread, np.array(capacity, np.float64), turn_s
    return walk((waits >= 0).sum(axis=1), begin, followers, *shared, seconds)


def _used(facts: Facts, sharing: Sharing, resources: dict[Hashable, int]) -> tuple[Ints, Ints]:
    """For each action the numbers of its first and its second resource, which are added to the resources if new."""
    kind, stage = facts.columns[:2]
    first, second = np.zeros((2, len(KINDS), facts.shape[0]), np.int32)
    for code, place in np.argwhere(occurring(facts).any(axis=2)).tolist():
        action, rank = example(code, place, 0), int(facts.owner[place])
        first[code, place] = resources.setdefault(sharing.resource_of(action, rank), len(resources))
        if sharing.onward_of is not None:
            second[code, place] = resources.setdefault(sharing.onward_of(action, rank), len(resources))
    return first[kind, stage], second[kind, stage]


def _refuse_wrong(sharing: Sharing, used: Ints, onward: Ints, names: Sequence[Hashable], seconds: Seconds) -> None:
    """Refuse resources and seconds with which actions would not end, or would use a resource in both roles."""
    # Counted in arrays: a step may have some 100,000 actions.
    is_both = (np.bincount(used, minlength=len(names)) > 0) & (np.bincount(onward, minlength=len(names)) > 0)
    both = [name for name, is_wrong in zip(names[1:], is_both[1:].tolist(), strict=True) if is_wrong]
    if both:
        raise UserError(
            f"expected other resources in onward_of than in resource_of, found {both[0]!r} in both; "
            "describe the two directions of a link as two resources"
        )
    for name in names[1:]:
        if not sharing.capacity[name] > 0:
            raise UserError(f"the capacity of a resource must be above 0, found {sharing.capacity[name]} for {name!r}")
    if not np.isfinite(seconds).all():
        raise UserError("with shared resources every action must take finite seconds, found inf; correct the costs")
