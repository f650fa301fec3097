"""Statistics of a trace, simulated or measured."""

from dataclasses import dataclass

import numpy as np

from pipeloom.calls import checked
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.lanes import COMPUTE_LANE, HOST_LANE, Lane
from pipeloom.trace import Trace
from pipeloom.trace.spans import Seconds, Spans


@dataclass(frozen=True)
class Summary:
    """Statistics of a step.

    Attributes:
        makespan_s: from the start of the first action to the end of the last.
        busy_s: for each rank the seconds of compute.
        bubble_overhead: idle / busy time of the ranks' compute, summed over all ranks.
        bubble_fraction: idle / (ranks x makespan).
        gradients_final_s: stage -> seconds from the start of the step to the end of the last backward that adds to its
            gradient.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    bubble_overhead: float
    bubble_fraction: float
    gradients_final_s: dict[int, float]


@checked
def summarize(trace: Trace) -> Summary:
    """Makespan, bubble and gradient times of a step.

    With P ranks, V stages on each and M >= P micro-batches, the bubble overhead is (P - 1) / (M V) for every looped
    schedule (arXiv 2104.04473, section 2.2; arXiv 2211.05953, section 3).

    Examples:
        >>> from pipeloom import Costs, make_schedule, simulate, summarize
        >>> summary = summarize(simulate(make_schedule("1f1b", pp=4, num_microbatches=8), Costs(1.0, 2.0)))
        >>> summary.makespan_s, summary.bubble_overhead
        (33.0, 0.375)
    """
    makespan = trace.end_s - trace.start_s
    compute = trace.compute()
    busy = np.bincount(compute.rank, compute.duration_s, trace.num_ranks)
    total, ideal = makespan * trace.num_ranks, float(busy.sum())
    adds = compute.row.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    stages = compute.row.stage[adds]
    final = np.full(stages.max(initial=-1) + 1, -np.inf)
    # `at` handles repeated stages; plain indexing would keep only the last value.
    np.maximum.at(final, stages, compute.end_s[adds] - trace.start_s)
    return Summary(
        makespan_s=makespan,
        busy_s=tuple(busy.tolist()),
        bubble_overhead=(total - ideal) / ideal if ideal else 0.0,
        bubble_fraction=(total - ideal) / total if total else 0.0,
        gradients_final_s={stage: float(final[stage]) for stage in np.flatnonzero(np.isfinite(final)).tolist()},
    )


def longest_rank_s(trace: Trace) -> float:
    """The longest time from a rank's first compute action to the end of its last, in seconds.

    That is the step time if ranks begin the next step without waiting for each other (arXiv 2401.10241, section 4,
    which also defines bubbles by it).
    """
    spans = map(trace.compute, range(trace.num_ranks))
    return max(float(own.end_s.max() - own.start_s.min()) for own in spans if len(own))


@dataclass(frozen=True)
class LaneUse:
    """Use of a communication lane of a rank.

    Attributes:
        rank: the pipeline rank.
        lane: its lane.
        num_actions: number of actions on it.
        busy_s: seconds in which an action ran on it.
        hidden_s: seconds of these in which the rank computed.
    """

    rank: int
    lane: Lane
    num_actions: int
    busy_s: float
    hidden_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds in which an action ran on the lane and the rank did not compute."""
        return self.busy_s - self.hidden_s


def communication(trace: Trace) -> list[LaneUse]:
    """Use of every communication lane of every rank, with the share that overlaps with compute."""
    spans = trace.spans
    uses: list[LaneUse] = []
    for rank in range(trace.num_ranks):
        computing = _union(trace.compute(rank))
        for lane in trace.lanes(rank):
            if lane in (COMPUTE_LANE, HOST_LANE):
                continue
            here = spans.take(spans.by_lane[rank, lane])
            begins, ends = _union(here)
            hidden = _covered(computing, ends) - _covered(computing, begins)
            uses.append(LaneUse(rank, lane, len(here), float((ends - begins).sum()), float(hidden.sum())))
    return uses


def exposed_s(trace: Trace, rank: int) -> float:
    """Seconds in which a rank communicates on any lane and does not compute."""
    spans = trace.spans
    lanes = [spans.by_lane[rank, lane] for lane in trace.lanes(rank) if lane not in (COMPUTE_LANE, HOST_LANE)]
    if not lanes:
        return 0.0
    begins, ends = _union(spans.take(np.concatenate(lanes)))
    computing = _union(trace.compute(rank))
    return float((ends - begins - _covered(computing, ends) + _covered(computing, begins)).sum())


Stretches = tuple[Seconds, Seconds]
"""Begins and ends of time intervals, disjoint and ascending."""


def _union(spans: Spans) -> Stretches:
    """The union of the spans as intervals."""
    order = np.argsort(spans.start_s, kind="stable")
    # Spans of a measured lane may overlap.
    begins, ends = spans.start_s[order], np.maximum.accumulate(spans.end_s[order])
    is_first = np.concatenate([[True], begins[1:] > ends[:-1]])[: len(begins)]
    return begins[is_first], ends[np.append(is_first[1:], True)[: len(begins)]]


def _covered(stretches: Stretches, times: Seconds) -> Seconds:
    """For each time the total length of the intervals before it."""
    begins, ends = stretches
    if not len(begins):
        return np.zeros_like(times)
    done = np.concatenate([[0.0], np.cumsum(ends - begins)])
    edges = np.stack([begins, ends], axis=1).reshape(-1)
    # The covered length grows inside an interval and is constant between intervals.
    return np.interp(times, edges, np.repeat(done, 2)[1:-1])
