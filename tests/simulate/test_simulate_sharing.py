"""Ranks that share a resource slow each other down, and nothing else changes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Kind, parse_schedule
from pipeloom.simulation import Sharing, simulate


def on_one_host(capacity):
    computes = (Kind.FORWARD, Kind.BACKWARD)
    return Sharing(lambda action, _: "host" if action.kind in computes else None, {"host": capacity})


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["breadth-first", "depth-first"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.25]),
)
def test_with_room_for_all_ranks_sharing_changes_nothing(family, pp, loops, num_microbatches, transfer_s):
    schedule = lower(make_schedule(family, pp=pp, loops=loops, num_microbatches=num_microbatches))
    costs = Costs(1.0, 2.0, transfer_s)
    alone, shared = simulate(schedule, costs), simulate(schedule, costs, on_one_host(pp))
    assert [span.action for span in shared.spans] == [span.action for span in alone.spans]
    assert [span.start_s for span in shared.spans] == pytest.approx([span.start_s for span in alone.spans])
    assert [span.end_s for span in shared.spans] == pytest.approx([span.end_s for span in alone.spans])


def test_one_core_does_the_work_of_all_ranks_without_a_gap():
    schedule = make_schedule("breadth-first", pp=4, loops=2, num_microbatches=5)
    trace = simulate(schedule, Costs(1.0, 2.0), on_one_host(1))
    assert trace.end_s == pytest.approx(4 * 2 * 5 * 3.0)


def test_two_that_share_one_core_take_twice_as_long():
    schedule = parse_schedule("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")  # one rank: nothing to share
    assert simulate(schedule, Costs(1, 1), on_one_host(1)).end_s == pytest.approx(8)
    schedule = parse_schedule("0F0 0F1\n1F0 1F1")
    ends = {str(s.action): s.end_s for s in simulate(schedule, Costs(1, 1), on_one_host(1)).spans}
    # 0F0 alone until 1; 0F1 and 1F0 share until 3; 1F1 alone until 4
    assert ends == pytest.approx({"0F0": 1, "0F1": 3, "1F0": 3, "1F1": 4})


@settings(deadline=None, max_examples=25)
@given(st.floats(0.5, 4), st.integers(2, 4), st.integers(1, 6))
def test_no_resource_works_faster_than_it_can_and_no_lane_overlaps(capacity, pp, num_microbatches):
    schedule = lower(make_schedule("breadth-first", pp=pp, loops=2, num_microbatches=num_microbatches))
    trace = simulate(schedule, Costs(1.0, 2.0, 0.1), on_one_host(capacity))
    assert trace.end_s >= pp * 2 * num_microbatches * 3 / capacity - 1e-9
    for rank in range(pp):
        spans = sorted(trace.compute(rank), key=lambda span: span.start_s)
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in pairwise(spans))
    assert simulate(schedule, Costs(1.0, 2.0, 0.1), on_one_host(capacity)) == trace
