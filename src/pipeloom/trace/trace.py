"""The trace of a step: which rank ran which action on which lane, and when. Simulated or measured."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pipeloom.errors import UserError
from pipeloom.schedule import Action
from pipeloom.schedule.kinds import RECEIVE_KINDS, SEND_KINDS, TIED_RECEIVE_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.lanes import COMPUTE_LANE, HOST_LANE, Lane, other_end
from pipeloom.system.files import parse_json
from pipeloom.terminal.notebook import Pictured
from pipeloom.terminal.words import count, seconds
from pipeloom.trace.spans import Span, Spans


@dataclass(frozen=True, repr=False)
class Trace(Pictured):
    """All spans of one step: which rank ran which action on which lane, and when. A notebook shows its timeline.

    Examples:
        >>> from pipeloom import Costs, make_schedule, simulate
        >>> trace = simulate(make_schedule("1f1b", pp=2, num_microbatches=3), Costs(forward_s=0.01, backward_s=0.02))
        >>> trace
        Trace(12 spans on 2 ranks, 120 ms)
        >>> trace.spans[0].end_s, len(trace.compute(rank=1))
        (0.01, 6)

    Attributes:
        spans: in any order; the constructor takes any sequence of ``Span``.
        num_ranks: number of pipeline ranks, including those without a span.
    """

    spans: Spans
    num_ranks: int

    def __post_init__(self) -> None:
        """Convert the spans to arrays."""
        object.__setattr__(self, "spans", Spans.of(self.spans))

    def __repr__(self) -> str:
        """Numbers of spans and ranks, and the duration."""
        spans, ranks = count(len(self.spans), "span"), count(self.num_ranks, "rank")
        return f"Trace({spans} on {ranks}, {seconds(self.end_s - self.start_s)})"

    @cached_property
    def start_s(self) -> float:
        """When the first action starts, in seconds; 0 without actions."""
        return float(self.spans.start_s.min()) if len(self.spans) else 0.0

    @cached_property
    def end_s(self) -> float:
        """When the last action ends, in seconds; 0 without actions."""
        return float(self.spans.end_s.max()) if len(self.spans) else 0.0

    def compute(self, rank: int | None = None) -> Spans:
        """Spans of compute actions, of one rank or of all ranks."""
        if rank is None:
            return self.spans.take(self.spans.on(COMPUTE_LANE.name))
        return self.spans.take(self.spans.by_lane.get((rank, COMPUTE_LANE), slice(0)))

    def lanes(self, rank: int) -> list[Lane]:
        """Lanes of a rank that have spans: compute first, the others by name."""
        used = [lane for owner, lane in self.spans.by_lane if owner == rank]
        return sorted(used, key=lambda lane: (lane != COMPUTE_LANE, lane.name, lane.peer or 0))


def merge(traces: Iterable[Trace]) -> Trace:
    """Merge the traces that several ranks recorded of the same step.

    A rank records when it requested a transfer and when it noticed its end. When the tensor moved follows only from
    both ranks: not before the send was issued, the receive posted, and the previous tensor on the edge had arrived.
    """
    parts = list(traces)
    spans = [span for part in parts for span in part.spans]
    place_of = {span.action: number for number, span in enumerate(spans)}
    num_stages = 1 + max((span.action.stage for span in spans), default=0)
    receive_of = {span.action: other_end(span.action, num_stages) for span in spans if span.action.kind in _SENDS}
    sends = [span for span in spans if receive_of.get(span.action) in place_of]
    free_s: dict[tuple[int, int], float] = {}
    for send in sorted(sends, key=lambda span: span.start_s):
        arrival = place_of[receive_of[send.action]]
        receive = spans[arrival]
        edge = (send.rank, receive.rank)
        begin_s = min(max(send.start_s, free_s.get(edge, send.start_s)), receive.end_s)
        spans[place_of[send.action]] = send._replace(start_s=begin_s, end_s=max(begin_s, send.end_s))
        spans[arrival] = receive._replace(start_s=min(max(begin_s, receive.start_s), receive.end_s))
        free_s[edge] = receive.end_s
    return Trace(Spans.of(_one_at_a_time(spans)), max(part.num_ranks for part in parts))


_SENDS, _RECEIVES = SEND_KINDS | TIED_SEND_KINDS, RECEIVE_KINDS | TIED_RECEIVE_KINDS


def _one_at_a_time(spans: list[Span]) -> list[Span]:
    """The spans by rank and time; a span that overlaps the next one on its lane is cut where that starts."""
    ordered = sorted(spans, key=lambda s: (s.rank, s.lane.name, s.lane.peer or 0, s.start_s, s.end_s))
    # A lane runs one action at a time. Threads record ends up to some milliseconds late (docs/decisions/0010).
    for number, (span, following) in enumerate(pairwise(ordered)):
        if (span.rank, span.lane) == (following.rank, following.lane) and span.end_s > following.start_s:
            ordered[number] = span._replace(end_s=max(span.start_s, following.start_s))
    return sorted(ordered, key=lambda span: (span.rank, span.start_s, span.end_s))


def to_chrome(trace: Trace, label: str, step_s: float | None = None) -> str:
    """The trace in Chrome's JSON format, which ui.perfetto.dev opens.

    A process for each rank, a thread for each lane, an arrow from each send to its receive. Times are in microseconds
    from the first action, rounded to nanoseconds, so that adjacent slices never overlap.

    Args:
        trace: any trace.
        label: part of every process name, such as ``measured``.
        step_s: seconds of the whole step, with what follows the actions; ``None`` to leave it out.
    """
    tids = {(rank, lane): tid for rank in range(trace.num_ranks) for tid, lane in enumerate(trace.lanes(rank))}
    events: list[dict[str, Any]] = []
    for rank in range(trace.num_ranks):
        events.append(_meta("process_name", rank, 0, f"rank {rank} ({label})"))
        events += [_meta("thread_name", rank, tid, str(lane)) for tid, lane in enumerate(trace.lanes(rank))]
    events += [_slice(span, tids[span.rank, span.lane], trace.start_s) for span in trace.spans]
    events += _arrows(trace, tids)
    return json.dumps({"traceEvents": events} | ({} if step_s is None else {"otherData": {"step_time_s": step_s}}))


def _meta(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _ns(time_s: float, origin_s: float) -> int:
    return round((time_s - origin_s) * 1e9)


def _slice(span: Span, tid: int, origin_s: float) -> dict[str, Any]:
    begin, end = _ns(span.start_s, origin_s), _ns(span.end_s, origin_s)
    action = span.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.value,
        "pid": span.rank,
        "tid": tid,
        # In microseconds, the unit of the format; three decimals keep nanoseconds.
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": {"stage": action.stage, "microbatch": action.microbatch, "slice": action.slice},
    }


def _arrows(trace: Trace, tids: dict[tuple[int, Lane], int]) -> list[dict[str, Any]]:
    sends = {span.action: span for span in trace.spans if span.action.kind in _SENDS and span.lane != HOST_LANE}
    events: list[dict[str, Any]] = []
    receives = [s for s in trace.spans if s.action.kind in _RECEIVES and s.lane != HOST_LANE]
    num_stages = 1 + int(trace.spans.row.stage.max(initial=0))
    for number, receive in enumerate(receives):
        send = sends.get(other_end(receive.action, num_stages))
        if send is None:
            continue
        begin, end = _ns(receive.start_s, trace.start_s), _ns(receive.end_s, trace.start_s)
        # An arrow binds to the slice that encloses its time, and the end of a slice is outside.
        inside = max(begin, end - 1)
        for phase, span, time_ns in (("s", send, _ns(send.start_s, trace.start_s)), ("f", receive, inside)):
            place = {"pid": span.rank, "tid": tids[span.rank, span.lane], "ts": time_ns / 1000, "bp": "e"}
            events.append({"ph": phase, "name": "message", "cat": "message", "id": number, **place})
    return events


_MOST_US = 1e15
"""Largest time in a trace in microseconds, about 30 years: in nanoseconds it fits into 64 bits."""


def from_chrome(text: str) -> Trace:
    """Read a trace that ``to_chrome`` wrote: ranks, lanes, actions, and times in whole nanoseconds.

    Returns:
        The trace, from time 0, with spans in the order of the text.

    Raises:
        UserError: the text is not such a trace; the message has the first wrong event.
    """
    events = _events(text)
    lanes: dict[tuple[int, int], Lane] = {}
    ranks: set[int] = set()
    spans: list[Span] = []
    for number, event in enumerate(events):
        try:
            match event:
                case {"ph": "M", "name": "process_name", "pid": int(rank)}:
                    ranks.add(rank)
                case {"ph": "M", "name": "thread_name", "pid": int(rank), "tid": int(tid), "args": {"name": str(name)}}:
                    lanes[rank, tid] = Lane.parse(name)
                case {"ph": "X"}:
                    spans.append(_span(event, lanes))
        except UserError as error:
            raise UserError(f"this is not a trace of pipeloom: event {number}: {error}") from error
    if ranks != set(range(len(ranks))) or any(span.rank not in ranks for span in spans):
        found = ", ".join(map(str, sorted(ranks))) or "none"
        raise UserError(f"this is not a trace of pipeloom: expected a process for every rank from 0 on, found {found}")
    return Trace(Spans.of(spans), len(ranks))


def step_s_of(text: str) -> float | None:
    """Seconds of the whole step in a text of ``to_chrome``; ``None`` where it was left out.

    Raises:
        UserError: the text is no JSON.
    """
    match parse_json(text):
        case {"otherData": {"step_time_s": int() | float() as step_s}}:
            return step_s
    return None


def _events(text: str) -> list[Any]:
    try:
        tree = parse_json(text)
    except UserError as error:
        raise UserError(f"this is not a trace: {error}") from error
    match tree:
        case {"traceEvents": list(events)}:
            return events
    raise UserError("this is not a trace: expected an object with a list 'traceEvents'")


def _span(event: dict[str, Any], lanes: dict[tuple[int, int], Lane]) -> Span:
    match event:
        case {
            "name": str(name),
            "pid": int(rank),
            "tid": int(tid),
            "ts": int() | float() as begin,
            "dur": int() | float() as duration,
        } if abs(begin) <= _MOST_US and 0 <= duration <= _MOST_US:
            begin_ns, duration_ns = round(begin * 1000), round(duration * 1000)
        case _:
            raise UserError("expected name, pid, tid, ts and dur, with finite times and no negative duration")
    if (rank, tid) not in lanes:
        raise UserError(f"thread {tid} of process {rank} has no name")
    return Span(Action.parse(name), rank, lanes[rank, tid], begin_ns / 1e9, (begin_ns + duration_ns) / 1e9)
