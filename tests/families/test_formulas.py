"""The closed formulas of the papers, and orders that can be written down without code."""

from fractions import Fraction
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.analysis.summary import summarize
from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.simulation import simulate

UNIT = Costs(forward_s=1, backward_s=2)
quick = settings(max_examples=40, deadline=None)
ranks = st.integers(1, 6)
loop_counts = st.integers(1, 4)
whole_costs = st.integers(1, 9)


def bubble(schedule, forward=1, backward=2):
    return summarize(simulate(schedule, Costs(forward, backward))).bubble_overhead


@quick
@given(ranks, st.integers(1, 16), whole_costs, whole_costs, st.sampled_from(["gpipe", "1f1b"]))
def test_without_loops_the_bubble_is_ranks_minus_one_over_microbatches(pp, num_microbatches, forward, backward, name):
    schedule = make_schedule(name, pp=pp, num_microbatches=num_microbatches)
    assert bubble(schedule, forward, backward) == (pp - 1) / num_microbatches


@quick
@given(ranks, loop_counts, st.integers(0, 10), whole_costs, whole_costs)
def test_breadth_first_divides_the_bubble_by_the_loops(pp, loops, more, forward, backward):
    schedule = make_schedule("breadth-first", pp=pp, loops=loops, num_microbatches=pp + more)
    assert bubble(schedule, forward, backward) == (pp - 1) / ((pp + more) * loops)


@quick
@given(ranks, loop_counts, st.integers(1, 4), whole_costs, whole_costs)
def test_depth_first_divides_the_bubble_by_the_loops(pp, loops, groups, forward, backward):
    schedule = make_schedule("depth-first", pp=pp, loops=loops, num_microbatches=pp * groups)
    assert bubble(schedule, forward, backward) == (pp - 1) / (pp * groups * loops)


@quick
@given(ranks, loop_counts, st.integers(0, 5), st.integers(1, 3), whole_costs, whole_costs)
def test_hybrid_divides_the_bubble_by_the_loops(pp, loops, more, groups, forward, backward):
    size = pp + more
    schedule = make_schedule("hybrid", pp=pp, loops=loops, num_microbatches=size * groups, group_size=size)
    assert bubble(schedule, forward, backward) == (pp - 1) / (size * groups * loops)


def test_too_few_microbatches_make_the_bubble_larger_than_the_formula():
    schedule = make_schedule("breadth-first", pp=4, loops=4, num_microbatches=2)
    assert bubble(schedule) > Fraction(3, 8)


@quick
@given(ranks, loop_counts, st.integers(1, 12))
def test_breadth_first_holds_every_input(pp, loops, num_microbatches):
    schedule = make_schedule("breadth-first", pp=pp, loops=loops, num_microbatches=num_microbatches)
    assert schedule.peak_stage_inputs == (num_microbatches * loops,) * pp


@quick
@given(ranks, st.integers(1, 12))
def test_one_forward_one_backward_holds_one_input_for_each_rank_behind(pp, num_microbatches):
    schedule = make_schedule("1f1b", pp=pp, num_microbatches=num_microbatches)
    assert schedule.peak_stage_inputs == tuple(min(num_microbatches, pp - rank) for rank in range(pp))


@quick
@given(ranks, loop_counts, st.integers(0, 5), st.integers(1, 3))
def test_a_group_of_n_holds_n_inputs_for_each_loop_but_the_last(pp, loops, more, groups):
    size, count = pp + more, (pp + more) * groups
    schedule = make_schedule("hybrid", pp=pp, loops=loops, num_microbatches=count, group_size=size)
    formula = [2 * (pp - rank - 1) + (loops - 1) * size + 1 for rank in range(pp)]
    assert list(schedule.peak_stage_inputs) == [min(held, count * loops) for held in formula]


def test_with_one_rank_depth_first_is_plain_accumulation():
    schedule = make_schedule("depth-first", pp=1, loops=2, num_microbatches=2)
    assert [str(a) for a in schedule.rows[0]] == ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]


def test_with_one_rank_breadth_first_is_layered_accumulation():
    schedule = make_schedule("breadth-first", pp=1, loops=2, num_microbatches=2)
    assert [str(a) for a in schedule.rows[0]] == ["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "depth-first", "breadth-first", "hybrid", "forward-only"])
def test_a_family_promises_no_more_inputs_than_it_needs(name):
    schedule = make_schedule(name, pp=3, num_microbatches=6)
    assert schedule.max_stage_inputs == schedule.peak_stage_inputs


def added_by_latency(name, pp, loops, count, latency):
    """In units of the latency; a stage's forward takes 8."""
    schedule = lower(make_schedule(name, pp=pp, loops=loops, num_microbatches=count))
    with_it, without = (simulate(schedule, Costs(8, 16, transfer_s)).end_s for transfer_s in (latency, 0))
    return (with_it - without) / latency


LATENCY_SIZES = list(product((4, 8), (2, 4, 8), (8, 16, 24), (1, 4)))


@pytest.mark.parametrize(("pp", "loops", "count", "latency"), LATENCY_SIZES)
def test_breadth_first_shows_latency_only_on_the_way_in_and_out(pp, loops, count, latency):
    added = added_by_latency("breadth-first", pp, loops, count, latency)
    if count * 8 >= pp * (8 + latency):
        assert added == 2 * (pp - 1)
    else:
        assert added > 2 * (pp - 1)


@pytest.mark.parametrize(("pp", "loops", "count", "latency"), LATENCY_SIZES)
def test_depth_first_shows_latency_at_every_stage(pp, loops, count, latency):
    assert added_by_latency("depth-first", pp, loops, count, latency) == 2 * (pp * loops - 1)


def test_breadth_first_starts_every_action_when_the_formula_says():
    schedule = make_schedule("breadth-first", pp=4, loops=4, num_microbatches=8)
    starts = {str(span.action): span.start_s for span in simulate(schedule, UNIT).spans}
    for rank in range(4):
        for loop in range(4):
            for microbatch in range(8):
                assert starts[f"{rank + 4 * loop}F{microbatch}"] == rank + 8 * loop + microbatch
                backward = f"{rank + 4 * (3 - loop)}B{microbatch}"
                assert starts[backward] == 35 + 2 * (3 - rank) + 16 * loop + 2 * microbatch


def test_gpipe_starts_its_first_rank_when_the_formula_says():
    trace = simulate(make_schedule("gpipe", pp=4, num_microbatches=8), Costs(4, 8))
    assert [span.start_s for span in trace.compute(0)] == [*range(0, 32, 4), *range(68, 132, 8)]


@quick
@given(ranks, loop_counts, st.integers(1, 3))
def test_hybrid_with_groups_of_p_is_depth_first(pp, loops, groups):
    count = pp * groups
    depth_first = make_schedule("depth-first", pp=pp, loops=loops, num_microbatches=count)
    assert make_schedule("hybrid", pp=pp, loops=loops, num_microbatches=count, group_size=pp).rows == depth_first.rows


@quick
@given(ranks, loop_counts, st.integers(0, 6))
def test_hybrid_with_one_group_has_breadth_first_forward_and_backward_orders(pp, loops, more):
    count = pp + more
    breadth_first = make_schedule("breadth-first", pp=pp, loops=loops, num_microbatches=count)
    hybrid = make_schedule("hybrid", pp=pp, loops=loops, num_microbatches=count, group_size=count)
    for kind in "FB":
        for row, other in zip(hybrid.rows, breadth_first.rows, strict=True):
            assert [a for a in row if a.kind == kind] == [a for a in other if a.kind == kind]


def test_one_rank_runs_breadth_first_gradient_accumulation():
    schedule = make_schedule("breadth-first", pp=1, loops=2, num_microbatches=2)
    assert " ".join(map(str, schedule.rows[0])) == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
