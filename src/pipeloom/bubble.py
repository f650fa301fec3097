"""The bubble account: why each rank stood still, from a trace and the schedule's dependency relation.

It does not matter whether the trace was simulated or measured.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from pipeloom.errors import UserError
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.action import COMPUTE_KINDS, RECEIVE_KINDS, STAGE_KINDS
from pipeloom.schedule.depend import data_dependencies
from pipeloom.trace import Span, Trace

_CAUSES = ("imbalance_s", "exposed_p2p_s", "exposed_data_parallel_s", "host_s")
_STARTUP = ("startup_s", "startup_s", "exposed_data_parallel_s", "startup_s")


@dataclass(frozen=True)
class BubbleAccount:
    """Where one rank's makespan went; the parts add up to it.

    A rank stands still between two of its compute actions, before its first and after its last. While it stands
    still before a compute action, the cause at each moment is the first of these that holds:

    - *imbalance*: the compute action on another rank whose result it uses has not ended;
    - *exposed p2p*: that has ended, and its result has not arrived;
    - *exposed data-parallel*: the stage's weights are not gathered, or no buffer is free for its gradient;
    - *host*: nothing is missing, and the rank has not started yet.

    Before the first compute action there is *start-up* in place of all but the exposed data-parallel time. After
    the last one there is *exposed data-parallel* while the rank's collectives run, and *drain*.

    Attributes:
        compute_s: the rank computes.
        startup_s: until the first compute action, the filling of the pipeline.
        imbalance_s: waiting for other ranks' compute.
        exposed_p2p_s: waiting for a tensor under way.
        exposed_data_parallel_s: waiting for collectives.
        host_s: waiting for nothing but the machine that starts the action.
        drain_s: from the last compute action on, until the last rank is done.
    """

    compute_s: float = 0.0
    startup_s: float = 0.0
    imbalance_s: float = 0.0
    exposed_p2p_s: float = 0.0
    exposed_data_parallel_s: float = 0.0
    host_s: float = 0.0
    drain_s: float = 0.0

    @property
    def idle_s(self) -> float:
        """All but compute."""
        return sum(astuple(self)[1:])

    def __add__(self, other: "BubbleAccount") -> "BubbleAccount":
        """Part by part, such as over ranks."""
        return BubbleAccount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def account_bubble(schedule: Schedule, trace: Trace) -> tuple[BubbleAccount, ...]:
    """For each rank its account.

    Args:
        schedule: what was run or simulated, at the level at which it was.
        trace: of one step of it.

    Raises:
        UserError: the trace is not one of the schedule.
    """
    graph = schedule.graph
    spans = _match(schedule, trace)
    rows: list[list[int]] = [[] for _ in schedule.rows]
    reduced_s = [float("-inf")] * schedule.num_ranks
    for node, (action, rank) in enumerate(zip(graph.actions, graph.ranks, strict=True)):
        if action.kind in COMPUTE_KINDS:
            rows[rank].append(node)
        elif action.kind in STAGE_KINDS:
            reduced_s[rank] = max(reduced_s[rank], spans[node].end_s)
    ends = {span.action: span.end_s for span in spans}
    return tuple(
        _account(
            rank,
            [(spans[node], _needs(node, schedule, spans, ends)) for node in row],
            trace,
            reduced_s[rank],
        )
        for rank, row in enumerate(rows)
    )


def _match(schedule: Schedule, trace: Trace) -> list[Span]:
    """The span of each node; where an action recurs, in the order of time."""
    graph = schedule.graph
    found: dict[tuple[int, Action], deque[Span]] = defaultdict(deque)
    for span in sorted(trace.spans, key=lambda span: span.start_s):
        found[span.rank, span.action].append(span)
    spans: list[Span] = []
    for action, rank in zip(graph.actions, graph.ranks, strict=True):
        if not found[rank, action]:
            raise UserError(f"the trace is not one of this schedule: it lacks {action} on rank {rank}")
        spans.append(found[rank, action].popleft())
    left = [f"{action} on rank {rank}" for (rank, action), more in found.items() if more]
    if left or trace.num_ranks != schedule.num_ranks:
        what = left[0] if left else f"{trace.num_ranks} ranks"
        raise UserError(f"the trace is not one of this schedule: the trace has {what}, the schedule does not")
    return spans


def _needs(node: int, schedule: Schedule, spans: Sequence[Span], ends: dict[Action, float]) -> tuple[float, ...]:
    """When a compute action's tensor was computed on another rank, when it arrived, when the collectives were done."""
    graph = schedule.graph
    computed = arrived = collected = float("-inf")
    for needed in graph.waits[node]:
        action, end_s = graph.actions[needed], spans[needed].end_s
        if action.kind in STAGE_KINDS:
            collected = max(collected, end_s)
        elif action.kind in RECEIVE_KINDS:
            (send,) = data_dependencies(action, schedule)
            (producer,) = data_dependencies(send, schedule)
            computed, arrived = max(computed, ends[producer]), max(arrived, end_s)
        elif graph.ranks[needed] != graph.ranks[node]:
            computed, arrived = max(computed, end_s), max(arrived, end_s)
    return computed, arrived, collected


def _account(rank: int, row: Sequence[tuple[Span, Sequence[float]]], trace: Trace, reduced_s: float) -> BubbleAccount:
    parts: dict[str, float] = defaultdict(float)
    now = trace.start_s
    for number, (span, needs) in enumerate(row):
        if span.start_s < now or span.end_s < span.start_s:
            raise UserError(f"the trace is not one of this schedule: on rank {rank}, {span.action} begins too early")
        causes = _STARTUP if number == 0 else _CAUSES
        for cause, seconds in zip(causes, _cut(now, span.start_s, needs), strict=True):
            parts[cause] += seconds
        parts["compute_s"] += span.end_s - span.start_s
        now = span.end_s
    exposed, drain = _cut(now, trace.end_s, [reduced_s])
    parts["exposed_data_parallel_s"] += exposed
    return BubbleAccount(**parts, drain_s=drain)


def _cut(begin: float, end: float, points: Sequence[float]) -> list[float]:
    """Lengths into which the points cut a stretch of time, each beginning where the one before ended; then the rest."""
    lengths: list[float] = []
    for point in points:
        reached = min(max(point, begin), end)
        lengths.append(reached - begin)
        begin = reached
    return [*lengths, end - begin]
