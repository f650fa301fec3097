"""Token slices: the pass over any schedule, and families that take turns by the slice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.analysis.summary import summarize
from pipeloom.cost.costs import Costs
from pipeloom.errors import ConfigError, ScheduleTextError, UserError
from pipeloom.export.torch_csv import format_torch_csv
from pipeloom.families import FAMILIES, Choice, make_schedule
from pipeloom.passes import add_data_parallel, add_slices, exchanges, lower
from pipeloom.schedule import Kind, Placement, Schedule, format_schedule, parse_schedule
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import COMPUTE_KINDS
from pipeloom.simulation import simulate

TRAINING = [name for name, family in FAMILIES.items() if family.has_backward]


def text(schedule):
    return [" ".join(map(str, row)) for row in schedule.rows]


def test_every_action_becomes_its_slices_in_place():
    whole = make_schedule("gpipe", pp=2, num_microbatches=2)
    assert text(add_slices(whole, 2)) == [
        "0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1F1 1F1.1 1B0.1 1B0 1B1.1 1B1",
    ]
    assert add_slices(whole, 1) == whole
    assert add_slices(whole, 3).max_stage_inputs == whole.max_stage_inputs


def test_both_halves_of_a_backward_go_back():
    rows = ([Action(Kind(kind), 0, 0) for kind in ("F", "I", "W")],)
    assert text(add_slices(Schedule(rows, Placement.linear(1), 1), 2)) == ["0F0 0F0.1 0I0.1 0I0 0W0.1 0W0"]


def test_1f1b_takes_turns_by_the_slice():
    """Seq1F1B: with two slices rank r of two begins with 2 - r forwards of slices, and its first backward follows."""
    assert text(make_schedule("1f1b", pp=2, num_microbatches=2, num_slices=2)) == [
        "0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1",
    ]


SIZES = {
    "pp": st.integers(1, 4),
    "loops": st.integers(1, 3),
    "num_microbatches": st.integers(1, 6),
    "num_slices": st.integers(1, 5),
}


@given(family=st.sampled_from(list(FAMILIES)), **SIZES)
def test_the_bubble_is_that_of_as_many_micro_batches(family, pp, loops, num_microbatches, num_slices):
    """(P - 1) / (M K V) of the ideal time, where there are at least P slices (or one loop)."""
    choice = Choice(family=family, pp=pp, loops=loops, num_microbatches=num_microbatches, num_slices=num_slices)
    if choice.problems() or not _has_known_bubble(choice):
        return
    schedule = lower(choice.make(), receive_buffers=1)
    assert schedule.num_slices == num_slices
    trace = simulate(schedule, Costs(1, 2))
    bubble = summarize(trace).bubble_overhead
    assert bubble == pytest.approx((pp - 1) / (num_microbatches * num_slices * loops), abs=1e-9)
    assert parse_schedule(format_schedule(schedule)).rows == schedule.rows
    assert (
        add_data_parallel(schedule, *exchanges("full", residency=1, prefetch=1, gradient_buffers=None)).num_slices
        == num_slices
    )


def _has_known_bubble(choice):
    known = ("gpipe", "1f1b", "breadth-first", "depth-first", "hybrid", "forward-only")
    fills = choice.loops == 1 or choice.num_microbatches * choice.num_slices >= choice.pp
    return choice.family in known and fills


@given(family=st.sampled_from(TRAINING), placement=st.sampled_from(["looped", "v", "linear"]), **SIZES)
def test_no_family_deadlocks_or_holds_more(family, placement, pp, loops, num_microbatches, num_slices):
    sizes = {"family": family, "pp": pp, "loops": loops, "num_microbatches": num_microbatches, "placement": placement}
    choice = Choice(**sizes, num_slices=num_slices)
    if choice.problems():
        return
    schedule = lower(choice.make())
    computes = [action for _, _, action in schedule.actions() if action.kind in COMPUTE_KINDS]
    whole = Choice(**sizes).make()
    assert len(computes) == whole.num_actions * num_slices
    assert all(map(int.__le__, schedule.peak_stage_inputs, whole.peak_stage_inputs))


@given(pp=st.integers(1, 8), num_microbatches=st.integers(1, 9), num_slices=st.integers(1, 6))
def test_activations_of_1f1b_fall_with_slices(pp, num_microbatches, num_slices):
    """At most (P - r - 1 + K) slices, of which K make a micro-batch (Seq1F1B, arXiv 2406.03488)."""
    schedule = make_schedule("1f1b", pp=pp, num_microbatches=num_microbatches, num_slices=num_slices)
    slices = [min(pp - rank - 1 + num_slices, num_microbatches * num_slices) for rank in range(pp)]
    assert schedule.peak_stage_inputs == tuple(-(-held // num_slices) for held in slices)


def test_few_micro_batches_keep_many_ranks_busy():
    sizes = {"pp": 4, "loops": 2, "num_microbatches": 1}
    idle = [
        summarize(simulate(make_schedule("breadth-first", **sizes, num_slices=number), Costs(1, 2)))
        for number in (1, 4)
    ]
    assert [summary.bubble_overhead for summary in idle] == [3.0, 0.375]


def test_groups_are_of_as_many_micro_batches_as_have_a_slice_for_each_rank():
    sizes = {"family": "hybrid", "pp": 4, "loops": 2, "num_microbatches": 4, "num_slices": 2}
    assert Choice(**sizes).smallest_group == 2
    assert Choice(**sizes, group_size=2).make() == Choice(**sizes).make()
    with pytest.raises(ConfigError, match="between pp 4 / 2 token slices and the number of micro-batches 4, found 1"):
        Choice(**sizes, group_size=1).make()


def test_slices_come_before_everything_else():
    whole = make_schedule("gpipe", pp=2, num_microbatches=2)
    with pytest.raises(UserError, match="at least one token slice"):
        add_slices(whole, 0)
    for schedule in (lower(whole), add_slices(whole, 2)):
        with pytest.raises(UserError, match="token slices come first"):
            add_slices(schedule, 2)


def test_pytorch_has_no_slices():
    with pytest.raises(ScheduleTextError, match="whole sequences"):
        format_torch_csv(make_schedule("gpipe", pp=2, num_microbatches=2, num_slices=2))
