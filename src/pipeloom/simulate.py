"""Schedule + costs -> trace: the schedule, run on a clock of costs."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeloom.cost.costs import Costs
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.depend import Graph, lane_of
from pipeloom.trace import Span, Trace


@dataclass(frozen=True)
class Sharing:
    """What several ranks draw on at once: the cores of a host, the network card of a node.

    While ``n`` actions draw on a resource of capacity ``c``, each runs at the speed ``min(1, c / n)``: its seconds
    from the costs are those it takes alone.

    Attributes:
        resource_of: (action, rank) -> the resource that the action draws on, or ``None``.
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
    graph = schedule.graph
    seconds = [costs.seconds(action) for action in graph.actions]
    starts, ends = _walk(graph, seconds) if sharing is None else _Clock(graph, seconds, sharing).run()
    spans = [
        Span(action, rank, lane_of(action, schedule.placement), start, end)
        for action, rank, start, end in zip(graph.actions, graph.ranks, starts, ends, strict=True)
    ]
    return Trace(tuple(spans), schedule.num_ranks)


def _walk(graph: Graph, seconds: list[float]) -> tuple[list[float], list[float]]:
    """Starts and ends where nothing is shared: every start is the latest of some ends, found in one walk."""
    starts = [0.0] * len(seconds)
    ends = [0.0] * len(seconds)
    for node in graph.order:
        starts[node] = max((ends[needed] for needed in graph.waits[node]), default=0.0)
        ends[node] = starts[node] + seconds[node]
    return starts, ends


class _Clock:
    """Discrete events: the next action that ends, at the speed that the shared resources allow until then.

    Actions on one resource progress alike, so each resource keeps its own time, the work that it has done
    for each of its actions; an action ends when that has grown by its seconds.
    """

    def __init__(self, graph: Graph, seconds: list[float], sharing: Sharing) -> None:
        self._graph = graph
        self._seconds = seconds
        self._sharing = sharing
        self._resource = [sharing.resource_of(a, r) for a, r in zip(graph.actions, graph.ranks, strict=True)]
        self._starts = [0.0] * len(seconds)
        self._ends = [0.0] * len(seconds)
        self._num_open = [len(nodes) for nodes in graph.waits]
        self._now = 0.0
        self._work: dict[Hashable, float] = defaultdict(float)
        self._running: dict[Hashable, list[tuple[float, int]]] = defaultdict(list)  # heaps of (work at the end, node)

    def run(self) -> tuple[list[float], list[float]]:
        """Starts and ends of all nodes."""
        followers = self._graph.followers
        for node, num_open in enumerate(self._num_open):
            if num_open == 0:
                self._start(node)
        while any(self._running.values()):
            node = self._advance()
            self._ends[node] = self._now
            for follower in followers[node]:
                self._num_open[follower] -= 1
                if self._num_open[follower] == 0:
                    self._start(follower)
        return self._starts, self._ends

    def _start(self, node: int) -> None:
        resource = self._resource[node]
        self._starts[node] = self._now
        heapq.heappush(self._running[resource], (self._work[resource] + self._seconds[node], node))

    def _advance(self) -> int:
        """Move the time on to the next end; the node that ends then. Ties go to the smaller node."""
        candidates = [
            (self._now + (heap[0][0] - self._work[resource]) / self._speed(resource), heap[0][1], resource)
            for resource, heap in self._running.items()
            if heap
        ]
        end_s, node, first = min(candidates, key=lambda candidate: candidate[:2])
        for resource, heap in self._running.items():
            if heap:
                self._work[resource] += (end_s - self._now) * self._speed(resource)
        self._work[first] = heapq.heappop(self._running[first])[0]
        self._now = end_s
        return node

    def _speed(self, resource: Hashable) -> float:
        if resource is None:
            return 1.0
        return min(1.0, self._sharing.capacity[resource] / len(self._running[resource]))
