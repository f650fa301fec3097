"""Schedules with split backwards: their published bubbles and memory, and what holds for every size.

The papers' figures and tables count with T_F = T_I = T_W, and a bubble as the longest time that a rank takes from its
first action to its last, less its work: steps follow each other like bricks if no rank waits for another between them.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.cost.costs import StageCosts, UniformCosts
from pipeloom.generate import FAMILIES, make_schedule
from pipeloom.schedule import lower
from pipeloom.simulate import simulate

UNIT = UniformCosts(forward_s=1, backward_s=2)
SPLIT = [name for name, known in FAMILIES.items() if known.splits_backward]


def spans(trace):
    """For each rank the time from its first compute action to the end of its last."""
    return [float(c.end_s.max() - c.start_s.min()) for c in map(trace.compute, range(trace.num_ranks))]


def bubble(schedule, costs=UNIT):
    work = 3 * schedule.num_microbatches * schedule.num_stages / schedule.num_ranks
    return max(spans(simulate(schedule, costs))) - work


SIZES = [(pp, count) for pp in range(2, 9) for count in (pp, 2 * pp - 1, 2 * pp, 3 * pp + 1, 5 * pp)]


@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_in_its_memory(pp, count):
    """(P - 1) (T_F + T_I - T_W), and P inputs on the fullest rank (arXiv 2401.10241, table 1)."""
    schedule = make_schedule("zb-h1", pp=pp, num_microbatches=count)
    assert bubble(schedule) == pp - 1
    assert max(schedule.peak_stage_inputs) == max(
        make_schedule("1f1b", pp=pp, num_microbatches=count).peak_stage_inputs
    )


@pytest.mark.parametrize(("pp", "count"), [(pp, count) for pp, count in SIZES if count >= 2 * pp - 1])
def test_zb_h2_has_no_bubble_with_twice_the_memory(pp, count):
    """(P - 1) (T_F + T_I - 2 T_W), and 2 P - 1 inputs (arXiv 2401.10241, table 1)."""
    schedule = make_schedule("zb-h2", pp=pp, num_microbatches=count)
    assert bubble(schedule) == 0
    assert schedule.peak_stage_inputs == (2 * pp - 1,) * pp


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize(("pp", "groups"), [(2, 3), (3, 2), (4, 1), (4, 4), (8, 2)])
def test_interleaved_zero_bubble_has_the_bubble_of_zb_h1_in_stages_that_are_smaller(pp, groups, loops):
    """(P - 1) (T_F + T_I - T_W) of a stage, P inputs of each stage (PyTorch, ``ScheduleInterleavedZeroBubble``)."""
    schedule = make_schedule("interleaved-zb", pp=pp, loops=loops, num_microbatches=pp * groups)
    assert bubble(schedule) == pp - 1
    assert max(schedule.peak_stage_inputs) == pp * loops


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SPLIT),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_any_size_is_proven_lowered_and_run_without_deadlock(name, pp, loops, count, transfer, buffers):
    chosen = FAMILIES[name]
    loops = chosen.loops or (loops if chosen.is_looped else 1)
    schedule = make_schedule(name, pp=pp, loops=loops, num_microbatches=count)
    assert all(held <= most for held, most in zip(schedule.peak_stage_inputs, schedule.max_stage_inputs, strict=True))
    work = 3 * count * loops
    stages = pp * loops
    costs = StageCosts((1.0,) * stages, (2.0,) * stages, transfer_s=transfer / 4)
    trace = simulate(lower(schedule, buffers), costs)
    assert all(sum(span.end_s - span.start_s for span in trace.compute(rank)) == work for rank in range(pp))
    assert trace.end_s >= work
