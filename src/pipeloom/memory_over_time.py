"""Bytes that each rank holds over time, from a schedule, a trace of it, and the bytes of each thing.

It does not matter whether the trace was simulated or measured.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.action import COMPUTE_KINDS, RECEIVE_KINDS, Kind
from pipeloom.schedule.depend import HOST_LANE, consumer_of
from pipeloom.trace import Span, Trace

Change = tuple[float, float, str]
"""Seconds, bytes more or fewer, of what."""


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """How large the things are that a rank holds.

    Attributes:
        always_bytes: for each rank what it holds all the time: its weights, gradients, optimizer state, reserve.
        input_bytes: for each stage what a micro-batch keeps from the start of its forward to the end of its backward.
        working_bytes: for each stage what a compute action needs while it runs, beside that.
        gathered_bytes: for each stage its weights from the start of a gather until they are dropped; 0 where they are
            among ``always_bytes``.
        gradient_bytes: for each stage its gradient from the start of the first backward that adds to it to the end of
            its reduction; 0 where it is among ``always_bytes``.
        message_bytes: a received tensor, from the moment its receive is posted to the end of the action that uses it.
    """

    always_bytes: tuple[float, ...]
    input_bytes: tuple[float, ...]
    working_bytes: tuple[float, ...]
    gathered_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    message_bytes: float


PARTS = ("always", "stage inputs", "working", "gathered weights", "gradients", "receive buffers")
"""What the bytes of a curve are made of."""


@dataclass(frozen=True)
class MemoryCurve:
    """What one rank holds over time.

    Attributes:
        points: (seconds from the start of the step, bytes held from then on), ascending, from 0 on; each holds other
            bytes than the one before.
        peak_bytes: the most.
        peak_s: when it is first held.
        peak_parts: what it is then made of, by ``PARTS``.
    """

    points: tuple[tuple[float, float], ...]
    peak_bytes: float
    peak_s: float
    peak_parts: dict[str, float]


def memory_over_time(schedule: Schedule, trace: Trace, held: HeldBytes) -> tuple[MemoryCurve, ...]:
    """For each rank its bytes over time.

    Args:
        schedule: what was run or simulated, at the level at which it was.
        trace: of one step of it.
        held: how large things are.
    """
    by_rank: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
    for span in trace.spans:
        if span.lane != HOST_LANE:
            by_rank[span.rank].append(span)
    return tuple(
        _curve(always, _changes(schedule, row, spans, held, trace), trace.start_s)
        for always, row, spans in zip(held.always_bytes, schedule.rows, by_rank, strict=True)
    )


def _curve(always: float, changes: Iterable[Change], origin_s: float) -> MemoryCurve:
    parts = dict.fromkeys(PARTS, 0.0) | {"always": always}
    total, peak = always, (always, origin_s, dict(parts))
    points: list[tuple[float, float]] = [(0.0, always)]
    for time_s, more, part in sorted(changes):  # at one time, what goes comes before what is added
        parts[part] += more
        total += more
        if total > peak[0]:
            peak = (total, time_s, dict(parts))
        if points[-1][0] == time_s - origin_s:
            points[-1] = (points[-1][0], total)
        else:
            points.append((time_s - origin_s, total))
    differing = [point for number, point in enumerate(points) if number == 0 or point[1] != points[number - 1][1]]
    return MemoryCurve(tuple(differing), peak[0], peak[1] - origin_s, peak[2])


def _changes(
    schedule: Schedule, row: Sequence[Action], spans: Sequence[Span], held: HeldBytes, trace: Trace
) -> Iterator[Change]:
    """What a rank takes and gives back, when."""
    times: dict[Action, list[tuple[float, float]]] = defaultdict(list)  # where an action recurs, in the order of time
    for span in sorted(spans, key=lambda span: span.start_s, reverse=True):
        times[span.action].append((span.start_s, span.end_s))
    placed = [(action, *times[action].pop()) for action in row]
    ends = {action: end_s for action, _, end_s in placed}
    slices = schedule.num_slices
    yield from _compute_changes(schedule, placed, held)
    yield from _swaps(placed, held, slices)
    yield from _whole_stages(placed, held, trace.end_s)
    posted_s = trace.start_s
    for action, _, end_s in placed:
        if action.kind in COMPUTE_KINDS:
            posted_s = end_s
        elif action.kind in RECEIVE_KINDS and held.message_bytes:
            yield posted_s, held.message_bytes / slices, "receive buffers"
            yield ends[consumer_of(action, schedule)], -held.message_bytes / slices, "receive buffers"


def _compute_changes(
    schedule: Schedule, placed: Sequence[tuple[Action, float, float]], held: HeldBytes
) -> Iterator[Change]:
    slices = schedule.num_slices
    for action, start_s, end_s in placed:
        if action.kind not in COMPUTE_KINDS:
            continue
        kept, working = held.input_bytes[action.stage] / slices, held.working_bytes[action.stage]
        if kept and action.kind is Kind.FORWARD:
            yield start_s, kept, "stage inputs"
        is_last = action.kind is Kind.FORWARD and action.stage < schedule.first_backward_stage
        if kept and (is_last or action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)):
            yield end_s, -kept, "stage inputs"
        if working:
            yield start_s, working, "working"
            yield end_s, -working, "working"


def _swaps(placed: Sequence[tuple[Action, float, float]], held: HeldBytes, slices: int) -> Iterator[Change]:
    """What is evicted is gone when that has ended, and is there again from the start of its load."""
    for action, start_s, end_s in placed:
        kept = held.input_bytes[action.stage] / slices
        if action.kind is Kind.EVICT and kept:
            yield end_s, -kept, "stage inputs"
        elif action.kind is Kind.LOAD and kept:
            yield start_s, kept, "stage inputs"


def _whole_stages(placed: Sequence[tuple[Action, float, float]], held: HeldBytes, end_s: float) -> Iterator[Change]:
    """Gathered weights and unreduced gradients, each of a whole stage."""
    gathered: set[int] = set()
    unreduced: set[int] = set()
    for action, start_s, action_end_s in placed:
        stage = action.stage
        if action.kind is Kind.UNSHARD and stage not in gathered:
            gathered.add(stage)
            yield start_s, held.gathered_bytes[stage], "gathered weights"
        elif action.kind is Kind.RESHARD and stage in gathered:
            gathered.remove(stage)
            yield action_end_s, -held.gathered_bytes[stage], "gathered weights"
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) and stage not in unreduced:
            unreduced.add(stage)
            yield start_s, held.gradient_bytes[stage], "gradients"
        elif action.kind is Kind.REDUCE_GRAD and stage in unreduced:
            unreduced.remove(stage)
            yield action_end_s, -held.gradient_bytes[stage], "gradients"
    yield from ((end_s, -held.gathered_bytes[stage], "gathered weights") for stage in gathered)
    yield from ((end_s, -held.gradient_bytes[stage], "gradients") for stage in unreduced)
