"""Rules of sharded weights and gradients: a good schedule, one fault at a time, and the refusal's rule and place."""

import itertools

import pytest
from by_hand import assert_refused, maker
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import family_schedules

from pipeloom.errors import ScheduleError
from pipeloom.passes import add_reduce_grad, add_unshard
from pipeloom.schedule import Level, Placement

# One rank, three stages, two micro-batches; two stages gathered and two unreduced gradients at most. Stage 2 goes
# back for one micro-batch at a time, so its gradient is reduced twice.
GOOD = (
    "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 2F0 2B0 1B0 2REDUCE_GRAD 2F1 2B1 2RESHARD 2REDUCE_GRAD "
    "1B1 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0 0B1 0RESHARD 0REDUCE_GRAD"
)


build, refused = maker(lambda _: Placement.linear(1, 3), level=Level.COMMUNICATION, max_gathered=2, gradient_buffers=2)


FAULTS = {
    "a stage not gathered": (0, "0UNSHARD 0B0", "0B0", "unshard-before-compute", 0, 19, "0B0 computes on stage 0"),
    "a stage gathered too late": (0, "2UNSHARD 1F0 1F1 2F0", "1F0 1F1 2F0 2UNSHARD", "unshard-before-compute", 0, 7,
        "2F0"),
    "a stage dropped too early": (0, "1B1 1REDUCE_GRAD 1RESHARD", "1RESHARD 1B1 1REDUCE_GRAD", "unshard-before-compute",
        0, 17, "1B1"),
    "a stage dropped twice": (0, "0RESHARD 2UNSHARD", "0RESHARD 0RESHARD 2UNSHARD", "unshard-before-compute", 0, 5,
        "not gathered"),
    "a stage gathered twice": (0, "2B0", "1UNSHARD 2B0", "unshard-before-compute", 0, 9, "gathered already"),
    "a third stage gathered": (0, "0RESHARD 2UNSHARD", "2UNSHARD 0RESHARD", "gathered-bound", 0, 4,
        "2UNSHARD makes 3 gathered"),
    "no reduction at the end": (0, " 0REDUCE_GRAD", "", "reduce-each-contribution-once", 0, 21,
        "0B1 adds to a gradient that no 0REDUCE_GRAD"),
    "no second reduction": (0, "2RESHARD 2REDUCE_GRAD", "2RESHARD", "reduce-each-contribution-once", 0, 13,
        "2B1 adds to a gradient"),
    "a stage never reduced": (0, "1REDUCE_GRAD ", "", "reduce-each-contribution-once", 0, 16, "1B1 adds to a gradient"),
    "a reduction before the last backward": (0, "0B1 0RESHARD 0REDUCE_GRAD", "0REDUCE_GRAD 0B1 0RESHARD",
        "reduce-each-contribution-once", 0, 22, "0B1 adds"),
    "a reduction twice": (0, "2REDUCE_GRAD 2F1", "2REDUCE_GRAD 2REDUCE_GRAD 2F1", "reduce-each-contribution-once", 0,
        12, "reduces nothing"),
    "a reduction before any backward": (0, "2F0 2B0", "2F0 2REDUCE_GRAD 2B0", "reduce-each-contribution-once", 0, 9,
        "reduces nothing"),
    "a third gradient begun": (0, "2REDUCE_GRAD 1B1 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0",
        "1B1 1RESHARD 0UNSHARD 0B0 2REDUCE_GRAD 1REDUCE_GRAD", "gradient-bound", 0, 18,
        "0B0 begins unreduced gradient number 3, but gradient_buffers is 2"),
}  # fmt: skip


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_is_refused_with_its_rule_its_place_and_the_rows(title):
    assert_refused(refused, (GOOD,), FAULTS[title])


def test_the_schedule_that_the_faults_start_from_is_good():
    assert build(GOOD).gradient_buffers == 2


def test_one_buffer_less_is_refused_where_one_more_is_needed():
    error = refused(GOOD, gradient_buffers=1)
    assert (error.rule, error.slot) == ("gradient-bound", 10)
    assert "1B0 begins unreduced gradient number 2, but gradient_buffers is 1" in str(error)
    error = refused(GOOD, max_gathered=1)
    assert (error.rule, error.slot) == ("gathered-bound", 1)


def test_without_promises_there_is_no_bound():
    assert build(GOOD, max_gathered=None, gradient_buffers=None).max_gathered is None


def test_a_schedule_without_reductions_holds_every_gradient():
    row = " ".join(cell for cell in GOOD.split() if "REDUCE" not in cell)
    assert build(row, gradient_buffers=3).gradient_buffers == 3
    assert refused(row).rule == "gradient-bound"


def test_every_rule_of_sharding_has_a_fault_above():
    of_sharding = {"unshard-before-compute", "gathered-bound", "reduce-each-contribution-once", "gradient-bound"}
    assert {fault[3] for fault in FAULTS.values()} == of_sharding


def most_gathered(row):
    """The largest number of gathers without a drop so far."""
    changes = [{"UNSHARD": 1, "RESHARD": -1}.get(action.kind.value, 0) for action in row]
    return max(itertools.accumulate(changes))


@settings(max_examples=60, deadline=None)
@given(st.data(), family_schedules(), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
def test_leaving_any_gather_drop_or_reduction_out_is_refused(data, schedule, residency, prefetch, buffers):
    result = add_reduce_grad(add_unshard(schedule, residency, prefetch), buffers)
    rank = data.draw(st.integers(0, result.num_ranks - 1))
    slots = [slot for slot, action in enumerate(result.rows[rank]) if action.microbatch is None]
    slot = data.draw(st.sampled_from(slots))
    action, row = result.rows[rank][slot], result.rows[rank]
    left = [*row[:slot], *row[slot + 1 :]]
    rows = [left if number == rank else other for number, other in enumerate(result.rows)]
    is_gathered_again = any(a == ("UNSHARD", action.stage, None, 0) for a in row[slot:])
    num_reductions = sum(a.kind == "REDUCE_GRAD" for _, _, a in result.actions())
    if (action.kind == "RESHARD" and not is_gathered_again and most_gathered(left) <= residency) or (
        action.kind == "REDUCE_GRAD" and num_reductions == 1
    ):
        result.with_rows(rows, result.level)  # nothing needs its place; nothing else is reduced
        return
    with pytest.raises(ScheduleError) as caught:
        result.with_rows(rows, result.level)
    rules = {
        "UNSHARD": {"unshard-before-compute"},
        "RESHARD": {"unshard-before-compute", "gathered-bound"},
        "REDUCE_GRAD": {"reduce-each-contribution-once", "gradient-bound"},
    }
    assert caught.value.rule in rules[action.kind.value]
