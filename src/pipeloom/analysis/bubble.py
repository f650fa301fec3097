"""The bubble account: each rank's idle time by cause, from a trace and the schedule's dependency relation.

The trace may be simulated or measured.
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
    RECEIVE_KINDS,
    STAGE_SWAP_KINDS,
    TIED_RECEIVE_KINDS,
    Kind,
)
from pipeloom.trace import Trace
from pipeloom.trace.spans import Seconds, Spans

_CAUSES = ("imbalance_s", "exposed_p2p_s", "exposed_swaps_s", "exposed_data_parallel_s", "host_s")
_STARTUP = ("startup_s", "startup_s", "startup_s", "exposed_data_parallel_s", "startup_s")
WAITING = "waiting for other ranks"
"""Name of start-up, imbalance and drain together: the bubble without communication and host."""


@dataclass(frozen=True)
class BubbleAccount:
    """One rank's makespan by cause; the parts add up to it.

    While a rank is idle before a compute action, the cause at each moment is the first of these that holds:

    - *imbalance*: a compute action on another rank, whose result it needs, has not ended;
    - *exposed p2p*: it has ended but its result has not arrived; or a load of evicted activations, or a message of a
      tied matrix, has not ended;
    - *exposed swaps*: the stage, or activations that were offloaded, have not come from the host;
    - *exposed data-parallel*: the stage's weights are not gathered, or no buffer is free for its gradient;
    - *host*: all inputs are there, but the rank has not started the action.

    Before the first compute action, all but *exposed data-parallel* count as *start-up*. After the last one, the rank
    has *exposed p2p* until the gradient of a tied matrix has arrived, then *exposed swaps* until the last stage is
    swapped out, then *exposed data-parallel* while its collectives run, then *drain*.

    Attributes:
        compute_s: compute.
        startup_s: filling of the pipeline, before the first compute action.
        imbalance_s: waiting for compute of other ranks.
        exposed_p2p_s: waiting for a tensor in transit.
        exposed_swaps_s: waiting for transfers between device and host.
        exposed_data_parallel_s: waiting for collectives.
        host_s: waiting for the host to start the action.
        drain_s: from the last compute action until the last rank has ended.
    """

    compute_s: float = 0.0
    startup_s: float = 0.0
    imbalance_s: float = 0.0
    exposed_p2p_s: float = 0.0
    exposed_swaps_s: float = 0.0
    exposed_data_parallel_s: float = 0.0
    host_s: float = 0.0
    drain_s: float = 0.0

    @property
    def idle_s(self) -> float:
        """The sum of all parts except compute."""
        return sum(astuple(self)[1:])

    def __add__(self, other: "BubbleAccount") -> "BubbleAccount":
        """The sum of each part."""
        return BubbleAccount(**{cause: value + getattr(other, cause) for cause, value in vars(self).items()})


def account_bubble(schedule: Schedule, trace: Trace) -> tuple[BubbleAccount, ...]:
    """The bubble account of each rank.

    Args:
        schedule: the schedule that was run or simulated, with all of its actions.
        trace: of one step.

    Raises:
        UserError: the trace does not belong to the schedule.
    """
    spans = match_spans(schedule, trace)
    needs = _Needs(schedule, spans)
    return tuple(_account(rank, needs, trace) for rank in range(schedule.num_ranks))


class _Needs:
    """For each action, when its input was computed on another rank, when it arrived, and when collectives ended."""

    def __init__(self, schedule: Schedule, spans: Spans) -> None:
        self.spans, self.first = spans, schedule.facts.columns.first
        self.computes = spans.row.is_kind(*COMPUTE_LANE_KINDS)
        self.collects = spans.row.is_kind(*COLLECTIVE_KINDS)
        self.borrows, self.swaps = spans.row.is_kind(*TIED_RECEIVE_KINDS), spans.row.is_kind(*STAGE_SWAP_KINDS)
        waits, ends = schedule.graph.waits, spans.end_s
        is_receive = spans.row.is_kind(*RECEIVE_KINDS)
        is_brought = spans.row.is_kind(*TIED_RECEIVE_KINDS, Kind.LOAD)
        is_swapped = spans.row.is_kind(*STAGE_SWAP_KINDS, Kind.RELOAD)
        self.computed, self.arrived, self.swapped, self.collected = (np.full(len(spans), -np.inf) for _ in range(4))
        for needed in waits.T:
            exists = needed >= 0
            is_taken = exists & is_receive[needed]
            is_elsewhere = exists & ~is_taken & (spans.rank[needed] != spans.rank)
            producer = waits[waits[needed, 0], 0]  # of the send of the receive
            _raise(self.collected, exists & self.collects[needed], ends[needed])
            _raise(self.computed, is_taken, ends[producer])
            _raise(self.computed, is_elsewhere, ends[needed])
            _raise(self.arrived, is_taken | is_elsewhere | (exists & is_brought[needed]), ends[needed])
            _raise(self.swapped, exists & is_swapped[needed], ends[needed])


def _raise(values: Seconds, where: NDArray[np.bool_], to: Seconds) -> None:
    values[where] = np.maximum(values[where], to[where])


def _account(rank: int, needs: _Needs, trace: Trace) -> BubbleAccount:
    own = slice(int(needs.first[rank]), int(needs.first[rank + 1]))
    index = np.flatnonzero(needs.computes[own]) + own.start
    starts, ends = needs.spans.start_s[index], needs.spans.end_s[index]
    begins = np.concatenate([[trace.start_s], ends])
    # Compute actions of one rank cannot overlap; if they do, the trace belongs to another schedule.
    early = np.flatnonzero((starts < begins[:-1]) | (ends < starts))
    if early.size:
        action = needs.spans.row[int(index[early[0]])]
        raise UserError(f"the trace does not belong to this schedule: on rank {rank}, {action} begins too early")
    # In the order of the causes: each gets the rest of the gap up to its own end.
    reached = needs.computed, needs.arrived, needs.swapped, needs.collected
    gaps = _cut(begins[:-1], starts, [array[index] for array in reached])
    parts = dict.fromkeys(BubbleAccount.__dataclass_fields__, 0.0)
    parts["compute_s"] = float((ends - starts).sum())
    for startup, cause, lengths in zip(_STARTUP, _CAUSES, gaps, strict=True):
        # The first gap is before the first compute action.
        parts[startup] += float(lengths[:1].sum())
        parts[cause] += float(lengths[1:].sum())
    behind = needs.borrows, needs.swaps, needs.collects
    ends_at = [np.array([needs.spans.end_s[own][those[own]].max(initial=-np.inf)]) for those in behind]
    *exposed, drain = _cut(begins[-1:], np.array([trace.end_s]), ends_at)
    for cause, lengths in zip(_CAUSES[1:], exposed, strict=False):
        parts[cause] += float(lengths[0])
    return BubbleAccount(**parts | {"drain_s": float(drain[0])})


def _cut(begin: Seconds, end: Seconds, points: list[Seconds]) -> list[Seconds]:
    """Lengths of the parts into which points cut the intervals from ``begin`` to ``end``, in order; the rest last."""
    lengths: list[Seconds] = []
    for point in points:
        reached = np.minimum(np.maximum(point, begin), end)
        lengths.append(reached - begin)
        begin = reached
    return [*lengths, end - begin]
