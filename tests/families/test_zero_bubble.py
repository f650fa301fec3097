"""Schedules with split backwards: their published bubbles and memory, and what holds for every size.

The papers' figures and tables count with T_F = T_I = T_W, and a bubble as the longest time that a rank takes from its
first action to its last, less its work: steps follow each other like bricks if no rank waits for another between them.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.families import FAMILIES, Choice, make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Placement
from pipeloom.simulation import simulate

UNIT = Costs(forward_s=1, backward_s=2)
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


@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(pp, count):
    """2 P inputs of stages half as large (arXiv 2401.10241, section 6).

    The step is the shortest that there is at any size: the last rank waits for P - 1 forwards.
    """
    schedule = make_schedule("zb-v", pp=pp, loops=2, num_microbatches=count)
    assert bubble(schedule) == (0 if count >= 2 * pp - 1 else pp - 1)
    assert simulate(schedule, UNIT).end_s == 6 * count + pp - 1
    assert max(schedule.peak_stage_inputs) == 2 * pp


@pytest.mark.parametrize(
    ("name", "memory", "thirds"), [("v-half", lambda pp: (pp + 2) // 2, 3), ("v-min", lambda pp: (pp + 4) // 3, 4)]
)
@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_less_memory_costs_the_published_part_of_the_bubble(name, memory, thirds, pp, count):
    """Of 1F1B, which loses 6 (P - 1) here: half the bubble with half the inputs, two thirds of it with a third.

    The published table has the bubbles as about p / 2 m and 2 p / 3 m against p / m, and the inputs exactly
    (arXiv 2405.15362, table 2).
    """
    schedule = make_schedule(name, pp=pp, loops=2, num_microbatches=count)
    assert pp - 1 < bubble(schedule) <= thirds * pp
    assert max(schedule.peak_stage_inputs) == 2 * memory(pp)


@pytest.mark.parametrize(("pp", "count"), [(pp, count) for pp, count in SIZES if count >= 2 * pp])
def test_dualpipe_v_stays_below_its_published_bubble_with_one_input_more_than_zb_v(pp, count):
    """(P - 1) (F&B + B - 3 W), where the pair takes F + B, and 2 P + 1 inputs (deepseek-ai/DualPipe, README)."""
    schedule = make_schedule("dualpipe-v", pp=pp, loops=2, num_microbatches=count)
    assert bubble(schedule) <= (pp - 1) * (3 + 2 - 3)
    assert max(schedule.peak_stage_inputs) == 2 * pp + 1


def test_dualpipe_v_pairs_a_forward_with_the_backward_of_the_other_stage():
    row = make_schedule("dualpipe-v", pp=2, loops=2, num_microbatches=6).rows[1]
    assert "1F2 2B0 2F2 1B0 1F3 2B1" in " ".join(map(str, row))


def test_a_family_on_a_v_says_so():
    wrong = {"loops": 3, "placement": "looped"}
    problems = Choice(family="zb-v", pp=4, num_microbatches=8, **wrong).problems()
    assert problems == [
        "zb-v runs 2 stages on each rank, found loops 3; use loops 2",
        "zb-v runs on the placement v, found looped; use v or leave it out",
    ]
    assert Choice(family="zb-v", pp=4, num_microbatches=8, loops=2).placed() == Placement.v(4, 2)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SPLIT),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 12),
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
