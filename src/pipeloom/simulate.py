"""Schedule + costs -> trace: the schedule, run on a clock of costs."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeloom.cost.costs import Costs
from pipeloom.schedule import Action, Kind, Row, Schedule
from pipeloom.schedule.action import STAGE_KINDS
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.facts import Facts
from pipeloom.schedule.graph import Graph, Seconds
from pipeloom.schedule.kernels.walk import walk_sharing
from pipeloom.schedule.row import KINDS
from pipeloom.trace import Spans, Trace


@dataclass(frozen=True)
class Sharing:
    """What several ranks draw on at once: the cores of a host, the network card of a node.

    While ``n`` actions draw on a resource of capacity ``c``, each runs at the speed ``min(1, c / n)``: its seconds
    from the costs are those it takes alone.

    Attributes:
        resource_of: (action, rank) -> the resource that the action draws on, or ``None``; the same for all micro-batches.
        capacity: resource -> actions that it serves at full speed.
    """

    resource_of: Callable[[Action, int], Hashable | None]
    capacity: Mapping[Any, float]


def simulate(schedule: Schedule, costs: Costs, sharing: Sharing | None = None) -> Trace:
    """Run a schedule on a clock.

    An action starts when everything it waits for has ended: the actions whose results it uses, the action
    before it on its lane, and, for communication, the compute action before it in its row
    (``pipeloom.schedule.depend``). The same input gives the same trace.

    Args:
        schedule: at any level. Without communication, tensors arrive at once.
        costs: seconds of each action.
        sharing: resources that slow actions down when several draw on them; ``None`` if there are none.

    Returns:
        A trace that begins at 0, spans in row order.
    """
    facts, graph = schedule.facts, schedule.graph
    seconds = _seconds(facts, costs)
    starts, ends = graph.times(seconds) if sharing is None else _times_sharing(graph, seconds, sharing)
    lanes = tuple(dict.fromkeys(lane for _, lane in facts.lanes))
    number = np.array([lanes.index(lane) for _, lane in facts.lanes], np.int32)
    spans = Spans(Row(*facts.columns[:4]), facts.ranks, number[facts.lane], lanes, starts, ends)
    return Trace(spans, schedule.num_ranks)


def _seconds(facts: Facts, costs: Costs) -> Seconds:
    """Seconds of every action."""
    if not costs.ignores_microbatch:
        return np.array([costs.seconds(action) for row in facts.rows for action in row], np.float64)
    kind, stage, _, part = facts.columns[:4]
    table = np.zeros((len(KINDS), facts.shape[0], facts.shape[2]))
    for where in np.argwhere(_occurs(facts, table.shape)).tolist():
        table[tuple(where)] = costs.seconds(_example(*where))
    return table[kind, stage, part]


def _occurs(facts: Facts, shape: tuple[int, ...]) -> np.ndarray:
    kind, stage, _, part = facts.columns[:4]
    occurs = np.zeros(shape, np.bool_)
    occurs[kind, stage, part] = True
    return occurs


def _example(code: int, stage: int, part: int) -> Action:
    kind: Kind = KINDS[code]
    return Action(kind, stage, None if kind in STAGE_KINDS else 0, part)


def _times_sharing(graph: Graph, seconds: Seconds, sharing: Sharing) -> tuple[Seconds, Seconds]:
    """Starts and ends where actions slow each other down."""
    facts = graph.facts
    kind, stage = facts.columns[:2]
    resources: dict[Hashable, int] = {None: 0}
    table = np.zeros((len(KINDS), facts.shape[0]), np.int32)
    for code, place in np.argwhere(_occurs(facts, (*table.shape, facts.shape[2])).any(axis=2)).tolist():
        resource = sharing.resource_of(_example(code, place, 0), int(facts.owner[place]))
        table[code, place] = resources.setdefault(resource, len(resources))
    capacity = [np.inf if name is None else sharing.capacity[name] for name in resources]
    begin, followers = graph.followers
    num_open = (graph.waits >= 0).sum(axis=1)
    walk = kernel(walk_sharing, graph.num_nodes)
    return walk(num_open, begin, followers, table[kind, stage], np.array(capacity, np.float64), seconds)
