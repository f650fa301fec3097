"""The bubble account: why each rank stood still, from a trace and the schedule's dependency relation.

It does not matter whether the trace was simulated or measured.
"""

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from pipeloom.analysis.matching import match_spans
from pipeloom.errors import UserError
from pipeloom.schedule import Schedule
from pipeloom.schedule.kinds import (
    COLLECTIVE_KINDS,
    COMPUTE_LANE_KINDS,
    OUT_OF,
    RECEIVE_KINDS,
    STAGE_SWAP_KINDS,
    TIED_RECEIVE_KINDS,
)
from pipeloom.trace import Trace
from pipeloom.trace.spans import Seconds, Spans

_CAUSES = ("imbalance_s", "exposed_p2p_s", "exposed_data_parallel_s", "host_s")
_STARTUP = ("startup_s", "startup_s", "exposed_data_parallel_s", "startup_s")


@dataclass(frozen=True)
class BubbleAccount:
    """Where one rank's makespan went; the parts add up to it.

    A rank stands still between two of its compute actions, before its first and after its last. While it stands
    still before a compute action, the cause at each moment is the first of these that holds:

    - *imbalance*: the compute action on another rank whose result it uses has not ended;
    - *exposed p2p*: that has ended, and its result has not arrived, or what was evicted has not been loaded, or the
      matrix that embedding and head share, or the whole stage, is under way;
    - *exposed data-parallel*: the stage's weights are not gathered, or no buffer is free for its gradient;
    - *host*: nothing is missing, and the rank has not started yet.

    Before the first compute action there is *start-up* in place of all but the exposed data-parallel time. After
    the last one there is *exposed p2p* until the gradient of a shared matrix has arrived and the last stage is swapped
    out, *exposed data-parallel* while the rank's collectives run, and *drain*.

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
        return BubbleAccount(**{cause: value + getattr(other, cause) for cause, value in vars(self).items()})


def account_bubble(schedule: Schedule, trace: Trace) -> tuple[BubbleAccount, ...]:
    """For each rank its account.

    Args:
        schedule: what was run or simulated, at the level at which it was.
        trace: of one step of it.

    Raises:
        UserError: the trace is not one of the schedule.
    """
    spans = match_spans(schedule, trace)
    needs = _Needs(schedule, spans)
    return tuple(_account(rank, needs, trace) for rank in range(schedule.num_ranks))


class _Needs:
    """For each action when its tensor was computed on another rank, when it arrived, when collectives were done."""

    def __init__(self, schedule: Schedule, spans: Spans) -> None:
        self.spans, self.first = spans, schedule.facts.columns.first
        self.computes = spans.row.is_kind(*COMPUTE_LANE_KINDS)
        self.collects = spans.row.is_kind(*COLLECTIVE_KINDS)
        self.borrows = spans.row.is_kind(*TIED_RECEIVE_KINDS, *STAGE_SWAP_KINDS)
        waits, ends = schedule.graph.waits, spans.end_s
        is_receive, is_load = spans.row.is_kind(*RECEIVE_KINDS), spans.row.is_kind(*OUT_OF)
        self.computed, self.arrived, self.collected = (np.full(len(spans), -np.inf) for _ in range(3))
        for needed in waits.T:
            exists = needed >= 0
            is_taken = exists & is_receive[needed]
            is_elsewhere = exists & ~is_taken & (spans.rank[needed] != spans.rank)
            producer = waits[waits[needed, 0], 0]  # of the send of the receive
            _raise(self.collected, exists & self.collects[needed], ends[needed])
            _raise(self.computed, is_taken, ends[producer])
            _raise(self.computed, is_elsewhere, ends[needed])
            brought = is_load | self.borrows
            _raise(self.arrived, is_taken | is_elsewhere | (exists & brought[needed]), ends[needed])


def _raise(values: Seconds, where: NDArray[np.bool_], to: Seconds) -> None:
    values[where] = np.maximum(values[where], to[where])


def _account(rank: int, needs: _Needs, trace: Trace) -> BubbleAccount:
    own = slice(int(needs.first[rank]), int(needs.first[rank + 1]))
    index = np.flatnonzero(needs.computes[own]) + own.start
    starts, ends = needs.spans.start_s[index], needs.spans.end_s[index]
    begins = np.concatenate([[trace.start_s], ends])
    # Compute actions of one rank cannot overlap; a trace where they do is of another schedule.
    early = np.flatnonzero((starts < begins[:-1]) | (ends < starts))
    if early.size:
        action = needs.spans.row[int(index[early[0]])]
        raise UserError(f"the trace is not one of this schedule: on rank {rank}, {action} begins too early")
    # In the order of the causes: each takes what is left of the gap up to its own point.
    gaps = _cut(begins[:-1], starts, [array[index] for array in (needs.computed, needs.arrived, needs.collected)])
    parts = dict.fromkeys(BubbleAccount.__dataclass_fields__, 0.0)
    parts["compute_s"] = float((ends - starts).sum())
    for startup, cause, lengths in zip(_STARTUP, _CAUSES, gaps, strict=True):
        # The first gap is the one before the first compute action.
        parts[startup] += float(lengths[:1].sum())
        parts[cause] += float(lengths[1:].sum())
    reduced = needs.spans.end_s[own][needs.collects[own]].max(initial=-np.inf)
    returned = needs.spans.end_s[own][needs.borrows[own]].max(initial=-np.inf)
    ends_at = [np.array([returned]), np.array([reduced])]
    p2p, exposed, drain = _cut(begins[-1:], np.array([trace.end_s]), ends_at)
    parts["exposed_p2p_s"] += float(p2p[0])
    parts["exposed_data_parallel_s"] += float(exposed[0])
    return BubbleAccount(**parts | {"drain_s": float(drain[0])})


def _cut(begin: Seconds, end: Seconds, points: list[Seconds]) -> list[Seconds]:
    """Lengths into which the points cut stretches of time, each beginning where the one before ended; then the rest."""
    lengths: list[Seconds] = []
    for point in points:
        reached = np.minimum(np.maximum(point, begin), end)
        lengths.append(reached - begin)
        begin = reached
    return [*lengths, end - begin]
