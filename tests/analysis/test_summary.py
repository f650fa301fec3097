"""Numbers from a trace, by hand."""

import pytest

from pipeloom.analysis.summary import communication, summarize
from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Action
from pipeloom.schedule.lanes import COMPUTE_LANE, Lane
from pipeloom.simulation import simulate
from pipeloom.trace import Span, Trace


def span(text, rank, start, end, lane=COMPUTE_LANE):
    return Span(Action.parse(text), rank, lane, start, end)


HAND_MADE = Trace(
    (
        span("0F0", 0, 100.0, 101.0),
        span("0SEND_F0", 0, 101.0, 102.0, Lane("send", 1)),
        span("1RECV_F0", 1, 101.0, 102.0, Lane("recv", 0)),
        span("1F0", 1, 102.0, 103.0),
        span("1I0", 1, 103.0, 104.0),
        span("1W0", 1, 106.0, 107.0),
        span("0B0", 0, 105.0, 108.0),
        span("0REDUCE_GRAD", 0, 108.0, 110.0, Lane("data-parallel")),
    ),
    2,
)


def test_the_sums_of_a_trace_made_by_hand():
    summary = summarize(HAND_MADE)
    assert summary.makespan_s == 10
    assert summary.busy_s == (4, 3)
    assert summary.bubble_overhead == (2 * 10 - 7) / 7
    assert summary.bubble_fraction == (2 * 10 - 7) / 20
    assert summary.gradients_final_s == {0: 8, 1: 7}


def test_the_order_of_the_spans_does_not_matter():
    trace = simulate(lower(make_schedule("depth-first", pp=2, loops=2, num_microbatches=4)), Costs(1, 2, 0.5))
    assert summarize(Trace(trace.spans[::-1], 2)) == summarize(trace)


def test_a_rank_without_work_counts_as_idle():
    summary = summarize(Trace((span("0F0", 0, 0.0, 1.0),), 2))
    assert summary.busy_s == (1, 0)
    assert summary.bubble_fraction == 0.5
    assert summary.gradients_final_s == {}


def test_an_empty_trace_has_no_bubble():
    summary = summarize(Trace((), 2))
    assert (summary.makespan_s, summary.bubble_overhead, summary.bubble_fraction) == (0, 0, 0)


@pytest.mark.parametrize("name", ["breadth-first", "depth-first", "hybrid"])
def test_busy_and_idle_add_up_to_ranks_times_makespan(name):
    schedule = lower(make_schedule(name, pp=3, loops=2, num_microbatches=6))
    summary = summarize(simulate(schedule, Costs(1, 2, 0.25)))
    assert summary.busy_s == (2 * 6 * 3,) * 3
    total = 3 * summary.makespan_s
    assert sum(summary.busy_s) + summary.bubble_fraction * total == pytest.approx(total)
    assert summary.bubble_overhead == pytest.approx(summary.bubble_fraction / (1 - summary.bubble_fraction))


def test_gradients_are_final_stage_by_stage_from_the_last():
    schedule = make_schedule("breadth-first", pp=2, loops=3, num_microbatches=4)
    final = summarize(simulate(schedule, Costs(1, 2))).gradients_final_s
    assert list(final) == list(range(6))
    assert sorted(final.values(), reverse=True) == list(final.values())


def test_a_lane_is_hidden_where_its_rank_computes_and_exposed_elsewhere():
    recv = Lane("recv", 1)
    trace = Trace(
        (
            span("0F0", 0, 10.0, 12.0),
            span("0F1", 0, 13.0, 15.0),
            span("0RECV_B0", 0, 11.0, 14.0, recv),  # hidden 11-12 and 13-14
            span("0RECV_B1", 0, 13.5, 16.0, recv),  # overlaps the one before; 14-15 hidden, 15-16 exposed
            span("0RECV_B2", 0, 18.0, 19.0, recv),
            span("0SEND_F0", 0, 12.0, 12.0, Lane("send", 1)),
            span("1F0", 1, 17.0, 20.0),  # another rank's compute hides nothing
        ),
        2,
    )
    received, sent = communication(trace)
    assert (received.rank, received.lane, received.num_actions) == (0, recv, 3)
    assert (received.busy_s, received.hidden_s, received.exposed_s) == (6, 3, 3)
    assert (sent.num_actions, sent.busy_s, sent.hidden_s, sent.exposed_s) == (1, 0, 0, 0)


def test_ranks_without_spans_hold_nothing():
    assert communication(Trace((), 2)) == []
