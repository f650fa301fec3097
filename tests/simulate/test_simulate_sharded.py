"""What data parallelism costs on the clock: which gathers and reductions compute hides, and which it cannot.

A stage's forward takes 1 and its backward 2, exactly; a family without loops has stages of as many layers as the
looped ones have loops.
"""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from orders import family_schedules, one_rank_schedules

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.summary import communication
from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_unshard, lower
from pipeloom.schedule import parse_schedule
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE
from pipeloom.simulation import simulate

SIZES = [(1, 4, 8), (2, 3, 4), (4, 4, 8), (4, 2, 16), (4, 4, 4)]  # ranks, loops, micro-batches


def added(schedule, unshard_s=0, reduce_s=0, layers=1):
    """What collectives add to the makespan."""
    without, with_them = (
        simulate(schedule, Costs(layers, 2 * layers, 0, *collectives)).end_s
        for collectives in [(0, 0), (unshard_s * layers, reduce_s * layers)]
    )
    return with_them - without


def schedule_of(name, pp, loops, count):
    return lower(make_schedule(name, pp=pp, loops=loops, num_microbatches=count))


# ---------------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize(("pp", "loops", "count"), SIZES)
def test_breadth_first_exposes_one_stages_reduction(pp, loops, count):
    schedule = add_reduce_grad(schedule_of("breadth-first", pp, loops, count))
    longest = 2 * count  # a whole stage's backward is there to hide each but the last
    for reduce_s in (1, longest // 2, longest):
        assert added(schedule, reduce_s=reduce_s) == reduce_s
    assert added(schedule, reduce_s=longest + 3) == longest + 3 + 3 * (loops - 1)


@pytest.mark.parametrize(("pp", "loops", "groups"), [(2, 3, 2), (4, 4, 2), (4, 2, 4), (4, 4, 8)])
def test_depth_first_hides_reductions_behind_a_groups_backward_only(pp, loops, groups):
    schedule = add_reduce_grad(schedule_of("depth-first", pp, loops, groups * pp))
    window = 2 * pp
    for reduce_s in (1, window, window + 1, 3 * window):
        assert added(schedule, reduce_s=reduce_s) == reduce_s + (loops - 1) * max(0, reduce_s - window)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "layers", "count"), SIZES)
def test_without_loops_every_layers_reduction_is_exposed(name, pp, layers, count):
    schedule = add_reduce_grad(schedule_of(name, pp, 1, count))
    for reduce_s in (1, 5):
        assert added(schedule, reduce_s=reduce_s, layers=layers) == layers * reduce_s


def test_the_worked_example_with_reductions_of_sixteen():
    # P = V = 4, M = 8: 105 (132 without loops) and what is exposed
    ends = {}
    for name, loops, layers in [("gpipe", 1, 4), ("1f1b", 1, 4), ("depth-first", 4, 1), ("breadth-first", 4, 1)]:
        schedule = add_reduce_grad(schedule_of(name, 4, loops, 8))
        trace = simulate(schedule, Costs(layers, 2 * layers, 0, 0, 16 * layers))
        (use,) = [use for use in communication(trace) if use.rank == 0 and use.lane == DATA_PARALLEL_LANE]
        ends[name] = (trace.end_s, use.hidden_s, use.exposed_s)
    assert ends == {
        "gpipe": (132 + 64, 0, 64),
        "1f1b": (132 + 64, 0, 64),
        "depth-first": (105 + 40, 24, 40),
        "breadth-first": (105 + 16, 48, 16),
    }


# ---------------------------------------------------------------------------------------------- gathers


@pytest.mark.parametrize(("pp", "loops", "count"), SIZES)
def test_breadth_first_hides_gathers_as_long_as_a_stages_forward_with_two_resident(pp, loops, count):
    schedule = schedule_of("breadth-first", pp, loops, count)
    gather_s = count
    two = add_unshard(schedule, 2, 1)
    assert added(two, unshard_s=gather_s) == gather_s  # the first
    assert added(add_unshard(schedule, 2, 0), unshard_s=gather_s) == gather_s * (2 * loops - 2)  # each of them
    assert added(add_unshard(schedule, 1, 1), unshard_s=gather_s) == gather_s * (2 * loops - 1)
    assert added(add_unshard(schedule, None, 1), unshard_s=gather_s) == gather_s


@pytest.mark.parametrize(("pp", "loops", "count"), SIZES)
def test_breadth_first_hides_gathers_and_reductions_that_share_the_time_of_a_backward(pp, loops, count):
    schedule = add_reduce_grad(add_unshard(schedule_of("breadth-first", pp, loops, count), 2, 1))
    assert added(schedule, unshard_s=count, reduce_s=count) == 2 * count  # the first gather, the last reduction


def test_depth_first_gathers_so_often_that_its_collectives_outlast_its_compute():
    busy, exposed = {}, {}
    for name in ("depth-first", "breadth-first"):
        schedule = add_unshard(schedule_of(name, 4, 4, 32), 2, 1)
        trace = simulate(schedule, Costs(1, 2, 0, unshard_s=16))
        (use,) = [use for use in communication(trace) if use.rank == 0 and use.lane == DATA_PARALLEL_LANE]
        busy[name], exposed[name] = use.busy_s, account_bubble(schedule, trace)[0].exposed_data_parallel_s
    assert busy == {"depth-first": 34 * 16, "breadth-first": 6 * 16}
    assert exposed["breadth-first"] == 16
    assert exposed["depth-first"] > 10 * exposed["breadth-first"]


@settings(max_examples=60, deadline=None)
@given(family_schedules(trains=False), st.integers(1, 4), st.integers(1, 40))
def test_a_step_never_takes_longer_with_gathers_further_ahead(schedule, residency, gather_s):
    costs = Costs(3, 7, 1, gather_s)
    ends = [simulate(add_unshard(schedule, residency, prefetch), costs).end_s for prefetch in range(5)]
    assert ends == sorted(ends, reverse=True)


# ---------------------------------------------------------------------------------------------- gradient buffers


@pytest.mark.parametrize(("pp", "loops", "count"), SIZES)
def test_with_one_gradient_buffer_every_reduction_is_exposed_and_two_are_enough(pp, loops, count):
    schedule = schedule_of("breadth-first", pp, loops, count)
    reduce_s = 2 * count
    assert added(add_reduce_grad(schedule, 1), reduce_s=reduce_s) == loops * reduce_s
    assert added(add_reduce_grad(schedule, 2), reduce_s=reduce_s) == reduce_s


def test_a_backward_waits_for_the_reduction_that_frees_its_buffer():
    # reductions of 5, buffers for 1 and 2 of 3 stages
    schedule = parse_schedule("0F0 1F0 2F0 2B0 1B0 0B0")
    costs = Costs(1, 2, 0, 0, 5)
    starts = {}
    for buffers in (1, 2, None):
        trace = simulate(add_reduce_grad(schedule, buffers), costs)
        starts[buffers] = [span.start_s for span in trace.spans if span.action.kind in ("B", "REDUCE_GRAD")]
    assert starts == {
        1: [3, 5, 10, 12, 17, 19],  # 2B0, its reduction 5-10, 1B0, its reduction 12-17, 0B0, 19-24
        2: [3, 5, 5, 10, 10, 15],  # 1B0 has a buffer, 0B0 waits for stage 2's
        None: [3, 5, 5, 10, 7, 15],
    }


@settings(max_examples=60, deadline=None)
@given(family_schedules() | one_rank_schedules(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20))
def test_memory_is_never_above_the_knobs_at_any_time_on_the_clock(schedule, residency, buffers, seconds):
    """What the row promises holds in time too: a place counts from its gather's start to its drop's end."""
    result = add_reduce_grad(add_unshard(schedule, residency, 1), buffers)
    trace = simulate(result, Costs(3, 5, 1, seconds, 2 * seconds))
    for rank in range(result.num_ranks):
        changes = []
        unreduced = set()
        for span in (span for span in trace.spans if span.rank == rank):  # in row order
            match span.action.kind.value:
                case "UNSHARD":
                    changes.append((span.start_s, 1, "gathered"))
                case "RESHARD":
                    changes.append((span.end_s, -1, "gathered"))
                case "B" | "W" if span.action.stage not in unreduced:
                    unreduced.add(span.action.stage)
                    changes.append((span.start_s, 1, "gradients"))
                case "REDUCE_GRAD":
                    unreduced.discard(span.action.stage)
                    changes.append((span.end_s, -1, "gradients"))
        for what, most in (("gathered", residency), ("gradients", buffers)):
            held = [change for _, change, name in sorted(changes) if name == what]  # at one time, ends come first
            assert max(itertools.accumulate(held)) <= most


def test_stage_costs_price_each_stages_collectives():
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), 0.5, unshard_s=(5.0, 6.0), reduce_s=(7.0, 8.0))
    schedule = parse_schedule("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD")
    seconds = [(str(action), costs.seconds(action)) for action in schedule.rows[0]]
    assert seconds == [
        ("0UNSHARD", 5.0),
        ("1UNSHARD", 6.0),
        ("0F0", 1.0),
        ("1F0", 2.0),
        ("1B0", 4.0),
        ("1RESHARD", 0.0),
        ("1REDUCE_GRAD", 8.0),
        ("0B0", 3.0),
        ("0RESHARD", 0.0),
        ("0REDUCE_GRAD", 7.0),
    ]
    free = StageCosts((1.0, 2.0), (3.0, 4.0))
    assert [free.seconds(action) for action in schedule.rows[0] if action.microbatch is None] == [0.0] * 6
