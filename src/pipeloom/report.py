"""Numbers from a trace. It does not matter whether the trace was simulated or measured."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pipeloom.schedule.action import Kind
from pipeloom.schedule.depend import COMPUTE_LANE, Lane
from pipeloom.trace import Span, Trace


@dataclass(frozen=True)
class Summary:
    """What a trace says about a step.

    Attributes:
        makespan_s: from the first action's start to the last one's end.
        busy_s: for each rank the seconds of compute.
        bubble_overhead: idle / ideal: idle compute time over all ranks, by the time in which they compute.
        bubble_fraction: idle / (ranks x makespan).
        gradients_final_s: for each stage that trains, when the last addition to its gradient ended,
            from the start of the step.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    bubble_overhead: float
    bubble_fraction: float
    gradients_final_s: dict[int, float]


def summarize(trace: Trace) -> Summary:
    """Makespan, bubble and gradient times of a step.

    The bubble of a pipeline of P ranks, V stages on each and M >= P micro-batches has the overhead
    (P - 1) / (M V) for every looped order (arXiv 2104.04473, section 2.2; arXiv 2211.05953, section 3).
    """
    makespan = trace.end_s - trace.start_s
    busy = [sum(s.end_s - s.start_s for s in trace.compute(rank)) for rank in range(trace.num_ranks)]
    total, ideal = makespan * trace.num_ranks, sum(busy)
    final: dict[int, float] = defaultdict(float)
    for span in trace.spans:
        if span.action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            stage = span.action.stage
            final[stage] = max(final[stage], span.end_s - trace.start_s)
    return Summary(
        makespan_s=makespan,
        busy_s=tuple(busy),
        bubble_overhead=(total - ideal) / ideal if ideal else 0.0,
        bubble_fraction=(total - ideal) / total if total else 0.0,
        gradients_final_s=dict(sorted(final.items())),
    )


@dataclass(frozen=True)
class LaneUse:
    """How a rank used a lane of communication.

    Attributes:
        rank: the pipeline rank.
        lane: one of its lanes.
        num_actions: what ran there.
        busy_s: seconds in which something was under way.
        hidden_s: those of them in which the rank computed.
    """

    rank: int
    lane: Lane
    num_actions: int
    busy_s: float
    hidden_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds in which something was under way and the rank did not compute."""
        return self.busy_s - self.hidden_s


def communication(trace: Trace) -> list[LaneUse]:
    """Every lane of communication of every rank: how long it was busy, and how much of that compute hid."""
    by_lane: dict[tuple[int, Lane], list[Span]] = defaultdict(list)
    for span in trace.spans:
        by_lane[span.rank, span.lane].append(span)
    uses: list[LaneUse] = []
    for rank in range(trace.num_ranks):
        computing = _union(by_lane[rank, COMPUTE_LANE])
        for lane in trace.lanes(rank):
            if lane == COMPUTE_LANE:
                continue
            spans = by_lane[rank, lane]
            busy = _union(spans)
            uses.append(LaneUse(rank, lane, len(spans), _length(busy), _length(_common(busy, computing))))
    return uses


def stage_inputs(trace: Trace) -> list[list[tuple[float, float]]]:
    """For each rank the stage inputs that it holds over time.

    An input is held from the start of its forward to the end of its backward; where no backward follows, to
    the end of the forward. A token slice counts as its share of a micro-batch.

    Returns:
        For each rank (seconds from the start of the step, inputs held from then on), in ascending order, from
        (0, 0) if nothing is held there; each point differs from the one before.
    """
    slices = 1 + max((span.action.slice for span in trace.spans), default=0)
    return [_held(trace.compute(rank), trace.start_s, slices) for rank in range(trace.num_ranks)]


def _held(spans: Iterable[Span], origin_s: float, slices: int) -> list[tuple[float, float]]:
    begins = {span.action[1:]: span for span in spans if span.action.kind is Kind.FORWARD}
    ends = {part: span.end_s for part, span in begins.items()}
    done = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    ends |= {span.action[1:]: span.end_s for span in spans if span.action.kind in done}
    changes: dict[float, int] = defaultdict(int)
    for part, span in begins.items():
        changes[span.start_s] += 1
        changes[ends[part]] -= 1
    points, held = [(0.0, 0.0)], 0
    for time_s, change in sorted(changes.items()):
        held += change
        point = (time_s - origin_s, held / slices)
        if point[0] == points[-1][0]:
            points[-1] = point
        elif point[1] != points[-1][1]:
            points.append(point)
    return points


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The stretches of time that the spans cover, disjoint and ascending."""
    stretches: list[tuple[float, float]] = []
    for begin, end in sorted((span.start_s, span.end_s) for span in spans):
        if stretches and begin <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        else:
            stretches.append((begin, end))
    return stretches


def _common(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What two disjoint, ascending lists of stretches share."""
    common: list[tuple[float, float]] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        begin, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if begin < end:
            common.append((begin, end))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(stretches: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in stretches)
