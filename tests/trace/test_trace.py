"""Traces and their Chrome JSON."""

import itertools
import json
import re
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Action
from pipeloom.schedule.lanes import COMPUTE_LANE, Lane, other_end
from pipeloom.simulation import simulate
from pipeloom.trace import Span, Trace, from_chrome, merge, step_s_of, to_chrome

COSTS = [Costs(1, 2, 0.5), Costs(1, 2), Costs(1e-3 / 3, 2e-3 / 3, 1e-4 / 7)]


def example(costs=COSTS[0], shift=0.0):
    schedule = lower(make_schedule("breadth-first", pp=3, loops=2, num_microbatches=4))
    spans = simulate(schedule, costs).spans
    return Trace(tuple(s._replace(start_s=s.start_s + shift, end_s=s.end_s + shift) for s in spans), 3)


def events(trace, phase):
    return [event for event in json.loads(to_chrome(trace, "test"))["traceEvents"] if event["ph"] == phase]


def nanoseconds(microseconds):
    whole = round(microseconds * 1000)
    assert microseconds == whole / 1000
    return whole


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("shift", [0.0, 1234.5678901])
def test_slices_of_one_track_never_overlap(costs, shift):
    trace = example(costs, shift)
    tracks = defaultdict(list)
    for event in events(trace, "X"):
        begin = nanoseconds(event["ts"])
        tracks[event["pid"], event["tid"]].append((begin, begin + nanoseconds(event["dur"])))
    assert sum(map(len, tracks.values())) == len(trace.spans)
    for slices in tracks.values():
        slices.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(slices))
    assert min(begin for slices in tracks.values() for begin, _ in slices) == 0


def test_a_slice_says_what_was_done_where_and_when():
    span = Span(Action.parse("2B1.3"), 1, COMPUTE_LANE, 10.5, 12.25)
    first = Span(Action.parse("0F0"), 0, COMPUTE_LANE, 10.0, 10.5)
    slices = events(Trace((first, span), 2), "X")
    assert slices[1] == {
        "ph": "X",
        "name": "2B1.3",
        "cat": "B",
        "pid": 1,
        "tid": 0,
        "ts": 500_000.0,
        "dur": 1_750_000.0,
        "args": {"stage": 2, "microbatch": 1, "slice": 3},
    }


def test_ranks_and_lanes_have_names_compute_first():
    named = defaultdict(dict)
    for event in events(example(), "M"):
        named[event["name"]][event["pid"], event["tid"]] = event["args"]["name"]
    assert named["process_name"] == {(rank, 0): f"rank {rank} (test)" for rank in range(3)}
    assert [named["thread_name"][1, tid] for tid in range(5)] == [
        "compute",
        "recv from 0",
        "recv from 2",
        "send to 0",
        "send to 2",
    ]


def test_every_message_has_one_arrow_from_its_send_to_its_receive():
    trace = example()
    slices = {event["name"]: event for event in events(trace, "X")}
    starts = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    receives = [name for name in slices if "RECV" in name]
    assert len(receives) == 2 * 4 * 5  # outputs and gradients of 4 micro-batches over 5 boundaries
    assert len(events(trace, "s")) == len(events(trace, "f")) == len(starts) == len(ends) == len(receives)
    assert starts.keys() == ends.keys()
    joined = set()
    for number, start in starts.items():
        assert ends[number]["ts"] >= start["ts"]
        assert (start["name"], start["cat"]) == (ends[number]["name"], ends[number]["cat"])
        (taken,) = [name for name, event in slices.items() if encloses(event, ends[number])]
        # sends take no time on this clock, so that several may stand at the same point
        sent = [name for name, event in slices.items() if place(event) == place(start)]
        assert taken in map(receive_of, sent)
        joined.add(taken)
    assert joined == set(receives)


def receive_of(send):
    stage, _, rest = send.partition("SEND_")
    return f"{int(stage) + (1 if rest[0] == 'F' else -1)}RECV_{rest}"


def place(event):
    return event["pid"], event["tid"], event["ts"]


def encloses(event, arrow):
    same_track = place(event)[:2] == place(arrow)[:2]
    return same_track and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]


def test_a_receive_without_its_send_has_no_arrow():
    receive = Span(Action.parse("1RECV_F0"), 1, Lane("recv", 0), 0, 1)
    trace = Trace((receive,), 2)
    assert events(trace, "s") == events(trace, "f") == []
    assert len(events(trace, "X")) == 1


def test_lanes_are_listed_compute_first_then_by_name_and_peer():
    lanes = [Lane("send", 2), Lane("recv", 3), Lane("send", 1), COMPUTE_LANE, Lane("data-parallel")]
    trace = Trace(tuple(Span(Action.parse("0F0"), 0, lane, 0, 1) for lane in lanes), 2)
    assert [str(lane) for lane in trace.lanes(0)] == [
        "compute",
        "data-parallel",
        "recv from 3",
        "send to 1",
        "send to 2",
    ]
    assert trace.lanes(1) == []


def test_compute_spans_differ_from_messages():
    trace = example()
    assert {span.action.kind.value for span in trace.compute()} == {"F", "B"}
    assert sum(len(trace.compute(rank)) for rank in range(3)) == len(trace.compute()) == 6 * 4 * 2
    assert {span.rank for span in trace.compute(2)} == {2}


def test_a_trace_begins_with_its_first_span_and_ends_with_its_last():
    trace = example(shift=100.0)
    assert trace.start_s == 100.0
    assert trace.end_s == 100.0 + example().end_s
    assert (Trace((), 1).start_s, Trace((), 1).end_s) == (0.0, 0.0)


def test_parts_of_several_ranks_merge_into_the_whole():
    whole = example()
    parts = [Trace(tuple(s for s in whole.spans if s.rank == rank), rank + 1) for rank in (2, 0, 1)]
    merged = merge(parts)
    assert set(merged.spans) == set(whole.spans)
    assert len(merged.spans) == len(whole.spans)
    assert merged.num_ranks == 3
    assert [(s.rank, s.start_s) for s in merged.spans] == sorted((s.rank, s.start_s) for s in merged.spans)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_merged_times_of_a_message_are_in_order_however_late_they_were_noticed(data):
    schedule = lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=3))
    late = st.floats(0, 2)
    parts = []
    exact = simulate(schedule, Costs(1, 2, 0.25))
    for rank in range(2):
        spans = []
        for span in exact.spans:
            if span.rank == rank and span.lane.name == "send":  # both ends of a send are seen too late
                start_s = span.start_s + data.draw(late)
                spans.append(span._replace(start_s=start_s, end_s=start_s + data.draw(late)))
            elif span.rank == rank:
                spans.append(span)
        parts.append(Trace(tuple(spans), 2))
    merged = {span.action: span for span in merge(parts).spans}
    assert len(merged) == len(exact.spans)
    for action, span in merged.items():
        assert span.start_s <= span.end_s
        if action.kind.value.startswith("RECV"):
            sent = merged[other_end(action, 4)]
            assert sent.start_s <= span.start_s <= span.end_s


def test_an_empty_trace_names_its_ranks_and_nothing_else():
    text = to_chrome(Trace((), 2), "test")
    assert [event["args"]["name"] for event in json.loads(text)["traceEvents"]] == ["rank 0 (test)", "rank 1 (test)"]
    assert from_chrome(text) == Trace((), 2)


@given(data=st.data(), shift=st.floats(0, 1e6))
def test_a_trace_comes_back_to_the_nanosecond(data, shift):
    name = data.draw(st.sampled_from(["breadth-first", "depth-first", "hybrid", "forward-only"]))
    pp = data.draw(st.integers(1, 4))
    seconds = st.floats(1e-6, 10)
    costs = Costs(data.draw(seconds), data.draw(seconds), data.draw(seconds))
    spans = simulate(lower(make_schedule(name, pp=pp, loops=2, num_microbatches=4)), costs).spans
    trace = Trace(tuple(s._replace(start_s=s.start_s + shift, end_s=s.end_s + shift) for s in spans), pp + 1)
    back = from_chrome(to_chrome(trace, "test"))
    assert back.num_ranks == pp + 1
    assert [span[:3] for span in back.spans] == [span[:3] for span in trace.spans]
    for found, written in zip(back.spans, trace.spans, strict=True):
        for ours, theirs in zip(found[3:], written[3:], strict=True):
            assert ours * 1e9 == pytest.approx(round((theirs - trace.start_s) * 1e9), abs=1e-3)
    assert to_chrome(back, "test") == to_chrome(trace, "test")
    assert step_s_of(to_chrome(trace, "test")) is None
    text = to_chrome(trace, "test", 0.25)
    assert (from_chrome(text), step_s_of(text)) == (back, 0.25)


def test_every_kind_of_lane_and_action_comes_back():
    lanes = [COMPUTE_LANE, Lane("send", 12), Lane("recv", 3), Lane("data-parallel")]
    texts = ["2F0.1", "2SEND_F0", "2RECV_B11", "2REDUCE_GRAD"]
    spans = tuple(
        Span(Action.parse(t), 1, lane, n, n + 0.5) for n, (t, lane) in enumerate(zip(texts, lanes, strict=True))
    )
    assert from_chrome(to_chrome(Trace(spans, 2), "a (b)")) == Trace(spans, 2)


PROCESS = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}
THREAD = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}}
SLICE = {"ph": "X", "name": "0F0", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1.0}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("{", "not JSON"),
        ([], "expected an object with a list 'traceEvents'"),
        ({"traceEvents": 3}, "expected an object with a list 'traceEvents'"),
        ([PROCESS, THREAD | {"args": {"name": "gpu"}}], "event 1: 'gpu' is no lane"),
        ([PROCESS, SLICE], "event 1: thread 0 of process 0 has no name"),
        ([PROCESS, THREAD, SLICE | {"name": "aten::mm"}], "event 2: 'aten::mm' is no action"),
        ([PROCESS, THREAD, SLICE | {"dur": -1}], "event 2: expected name, pid"),
        ([PROCESS, THREAD, SLICE | {"ts": float("nan")}], "with finite times"),
        ([PROCESS, THREAD, SLICE | {"ts": 1e306}], "with finite times"),
        ([PROCESS, THREAD, SLICE | {"ts": 10**400}], "with finite times"),
        ([PROCESS, THREAD, SLICE | {"ts": "0"}], "expected name, pid"),
        ([PROCESS | {"pid": 1}], "a process for every rank from 0 on, found 1"),
        ([THREAD, SLICE], "a process for every rank from 0 on, found none"),
    ],
)
def test_what_is_no_trace_is_refused(tree, words):
    if isinstance(tree, list) and tree:
        tree = {"traceEvents": tree}
    with pytest.raises(UserError, match=re.escape(words)):
        from_chrome(tree if isinstance(tree, str) else json.dumps(tree))


class Counted(tuple):
    """Spans that count how often someone goes through them."""

    count = 0

    def __iter__(self):
        Counted.count += 1
        return super().__iter__()


def test_writing_a_trace_goes_through_its_spans_a_few_times_however_many_there_are():
    trace = example()
    Counted.count = 0
    to_chrome(Trace(Counted(trace.spans), 3), "test")
    assert 0 < Counted.count < 20 < len(trace.spans)


def test_actions_that_repeat_are_all_kept():
    """A stage may be gathered several times in a step."""
    lane = Lane("data-parallel")
    gathers = [Span(Action.parse("0UNSHARD"), 0, lane, start_s, start_s + 1) for start_s in (0.0, 5.0)]
    assert merge([Trace(tuple(gathers), 2), Trace((), 2)]).spans == tuple(gathers)
