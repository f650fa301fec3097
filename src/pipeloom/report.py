"""Numbers from a trace. It does not matter whether the trace was simulated or measured."""

from collections import defaultdict
from dataclasses import dataclass

from pipeloom.schedule.action import Kind
from pipeloom.trace import Trace


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
