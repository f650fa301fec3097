"""The host launches actions one after the other, and an action starts no earlier than its launch ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.summary import communication
from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import parse_schedule
from pipeloom.schedule.lanes import HOST_LANE
from pipeloom.simulation import Host, simulate
from pipeloom.trace import from_chrome, to_chrome


def parts(trace):
    launches = {s.action: s for s in trace.spans if s.lane == HOST_LANE}
    actions = {s.action: s for s in trace.spans if s.lane != HOST_LANE}
    return actions, launches


def test_a_slow_host_is_what_a_rank_waits_for():
    schedule = parse_schedule("0F0 0F1 0B0 0B1")
    trace = simulate(schedule, Costs(1, 1), host=Host(lambda _: 3))
    actions, launches = parts(trace)
    assert [s.start_s for s in launches.values()] == [0, 3, 6, 9]
    assert [s.start_s for s in actions.values()] == [3, 6, 9, 12]
    (account,) = account_bubble(schedule, trace)
    assert (account.compute_s, account.startup_s, account.host_s) == (4, 3, 6)
    assert communication(trace) == []


def test_a_throttled_host_waits_for_the_action_that_many_before():
    schedule = parse_schedule("0F0 0F1 0B0 0B1")
    trace = simulate(schedule, Costs(10, 10), host=Host(lambda _: 1, run_ahead=2))
    _, launches = parts(trace)
    # 0F0 runs 1-11, 0F1 11-21: the third launch waits for the first action, the fourth for the second
    assert [s.start_s for s in launches.values()] == [0, 1, 11, 21]
    assert trace.end_s == 41


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["breadth-first", "depth-first", "hybrid"]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.floats(0, 3),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_launches_follow_each_other_and_no_action_starts_before_its_own(family, pp, count, launch_s, run_ahead):
    size = {"group_size": max(pp, count)} if family == "hybrid" and pp <= count else {}
    schedule = lower(make_schedule(family, pp=pp, loops=2, num_microbatches=count, **size))
    costs = Costs(1.0, 2.0, 0.5)
    trace = simulate(schedule, costs, host=Host(lambda _: launch_s, run_ahead))
    actions, launches = parts(trace)
    assert list(launches) == list(actions) == [action for row in schedule.rows for action in row]
    for row in schedule.rows:
        ends = 0.0
        for action in row:
            assert launches[action].start_s >= ends
            ends = launches[action].end_s
            assert actions[action].start_s >= ends
    assert trace.end_s >= simulate(schedule, costs).end_s - 1e-9
    if launch_s == 0 and run_ahead is None:
        assert list(actions.values()) == list(simulate(schedule, costs).spans)


def test_a_trace_with_launches_goes_to_a_file_and_back():
    schedule = lower(make_schedule("1f1b", pp=2, num_microbatches=3))
    trace = simulate(schedule, Costs(1, 2, 0.5), host=Host(lambda _: 0.25))
    back = from_chrome(to_chrome(trace, "simulated"))
    assert sorted(back.spans) == sorted(trace.spans)
    assert account_bubble(schedule, back) == account_bubble(schedule, trace)


def test_a_host_that_may_launch_nothing_is_refused():
    with pytest.raises(UserError, match="run_ahead must be at least 1, found 0"):
        Host(lambda _: 1, run_ahead=0)
