"""Compute-level rules: a good schedule, one fault at a time, and the refusal's rule, place and picture."""

from itertools import pairwise

import pytest
from by_hand import assert_refused, maker

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Action, Kind, Placement, Schedule
from pipeloom.schedule.rules import COMPUTE_RULES, rule_name

GOOD = (
    "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
)


build, refused = maker(lambda _: Placement.looped(2, 2))


def test_the_schedule_that_the_faults_start_from_is_good():
    assert build(*GOOD).num_stages == 4


FAULTS = {
    "a forward is missing": (0, "2F1 ", "", "complete", 0, 2, "2F1 is missing"),
    "a backward is missing": (1, "3B1 ", "", "complete", 1, 4, "3B1 is missing"),
    "a forward comes twice": (0, "0F0", "0F0 0F0", "unique", 0, 1, "0F0 appears a second time"),
    "a backward comes twice": (1, "3B0", "3B0 3B0", "unique", 1, 5, "3B0 appears a second time"),
    "a stage runs on another rank": (1, "3F0", "2F0", "on-its-rank", 1, 2, "2F0 belongs to rank 0"),
    "a micro-batch too many": (0, "0F1", "0F1 0F2", "in-range", 0, 2, "micro-batch 2, but they are 0..1"),
    "a stage too many": (0, "0F1", "0F1 4F0", "in-range", 0, 2, "stage 4, but stages are 0..3"),
    "a token slice too many": (1, "1F1", "1F1 1F1.1", "in-range", 1, 2, "token slice 1, but they are 0..0"),
    "a backward before its forward": (0, "2F1 2B0 2B1", "2B0 2B1 2F1", "forward-before-backward", 0, 4,
        "2B1 precedes 2F1"),
    "weights without inputs": (0, "2B0", "2W0", "complete", 0, None, "2I0 is missing"),
    "inputs without weights": (0, "2B0", "2I0", "complete", 0, None, "2W0 is missing"),
    "whole and split backward": (0, "2B0", "2B0 2I0", "complete", 0, 4, "2B0 and 2I0 are both there"),
    "all three backwards": (0, "2B0", "2B0 2I0 2W0", "complete", 0, 4, "2B0 and 2I0 are both there"),
    "weights before inputs": (1, "1B0", "1W0 1I0", "forward-before-backward", 1, 6, "1W0 precedes 1I0"),
    "inputs before the forward": (1, "3F1 3B0 3B1", "3I1 3F1 3B0 3W1", "forward-before-backward", 1, 3,
        "3I1 precedes 3F1"),
    "a send": (0, "0F0", "0F0 0SEND_F0", "kinds-of-level", 0, 1, "does not belong in a compute-only schedule"),
    "a reduction": (0, "0B1", "0B1 0REDUCE_GRAD", "kinds-of-level", 0, 8, "does not belong in a compute-only"),
    "a stage before the one that feeds it": (0, "0F0 0F1 2F0", "2F0 0F0 0F1", "acyclic", 0, 0, "deadlock"),
    "a backward in the wrong order of stages": (0, "2B0 2B1 0B0", "0B0 2B0 2B1", "acyclic", 0, 4, "deadlock"),
}  # fmt: skip


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_is_refused_with_its_rule_its_place_and_the_rows(title):
    assert_refused(refused, GOOD, FAULTS[title])


def test_a_deadlock_over_two_ranks_names_the_circle():
    waits = {
        "0B0": ("0F0", "1B0"),
        "0F1": ("0B0",),
        "0B1": ("0F1", "1B1"),
        "1F1": ("0F1",),
        "1F0": ("1F1", "0F0"),
        "1B1": ("1F0", "1F1"),
        "1B0": ("1B1", "1F0"),
    }
    error = refused("0F0 0B0 0F1 0B1", "1F1 1F0 1B1 1B0", placement=Placement.looped(2))
    assert error.rule == "acyclic"
    circle = str(error).splitlines()[0].partition("each waits for the next: ")[2].split(" -> ")
    assert circle[0] == circle[-1]
    assert {text.partition(" ")[2] for text in circle} == {"(rank 0)", "(rank 1)"}
    names = [text.partition(" ")[0] for text in circle]
    assert all(second in waits[first] for first, second in pairwise(names))


def test_a_later_slice_must_go_backward_first():
    rows = "0F0 0F0.1 0B0.1 0B0"
    assert build(rows, placement=Placement.looped(1), num_microbatches=1, num_slices=2).num_slices == 2
    error = refused("0F0 0F0.1 0B0 0B0.1", placement=Placement.looped(1), num_microbatches=1, num_slices=2)
    assert error.rule == "acyclic"


def test_an_earlier_slice_must_go_forward_first():
    error = refused("0F0.1 0F0 0B0.1 0B0", placement=Placement.looped(1), num_microbatches=1, num_slices=2)
    assert error.rule == "acyclic"


def test_a_missing_slice_is_refused():
    error = refused("0F0 0F0.1 0B0", placement=Placement.looped(1), num_microbatches=1, num_slices=2)
    assert (error.rule, error.rank) == ("complete", 0)
    assert "0B0.1 is missing" in str(error)


def test_one_row_is_called_one_row():
    error = refused("0F0 0B0", "0F0", placement=Placement.looped(1), num_microbatches=1)
    assert "expected 1 row, one for each pipeline rank, found 2" in str(error)


@pytest.mark.parametrize("rows", [GOOD[:1], (*GOOD, "0F0"), ()])
def test_too_few_or_too_many_rows_are_refused(rows):
    error = refused(*rows)
    assert (error.rule, error.rank, error.slot) == ("row-for-each-rank", None, None)
    assert f"expected 2 rows, one for each pipeline rank, found {len(rows)}" in str(error)


@pytest.mark.parametrize(
    "changes", [{"num_microbatches": 0}, {"num_slices": 0}, {"first_backward_stage": 5}, {"first_backward_stage": -1}]
)
def test_counts_that_cannot_be_are_refused(changes):
    assert refused(*GOOD, **changes).rule == "row-for-each-rank"


def test_more_microbatches_than_the_rows_run_are_missed():
    error = refused(*GOOD, num_microbatches=3)
    assert (error.rule, error.rank, error.slot) == ("complete", 0, 1)
    assert "0F2 is missing (and 7 more like it)" in str(error)


@pytest.mark.parametrize("action", [Action(Kind.FORWARD, 0), Action(Kind.FORWARD, -1, 0), Action(Kind.FORWARD, 0, -1)])
def test_an_action_that_no_text_can_name_is_out_of_range(action):
    rows = [[*row] for row in build(*GOOD).rows]
    rows[0].insert(3, action)
    with pytest.raises(ScheduleError) as caught:
        Schedule(tuple(map(tuple, rows)), Placement.looped(2, 2), 2)
    assert (caught.value.rule, caught.value.rank, caught.value.slot) == ("in-range", 0, 3)


def test_a_frozen_stage_runs_no_backward():
    error = refused(*GOOD, first_backward_stage=1)
    assert (error.rule, error.rank) == ("complete", 0)
    assert "0B0 is superfluous: stage 0 runs no backward" in str(error)
    frozen = build(GOOD[0].replace(" 0B0 0B1", ""), GOOD[1], first_backward_stage=1)
    assert frozen.peak_stage_inputs == (2, 4)


def test_a_rank_that_holds_more_inputs_than_promised_is_refused():
    assert build(*GOOD, max_stage_inputs=(4, 4)).peak_stage_inputs == (4, 4)
    error = refused(*GOOD, max_stage_inputs=(4, 3))
    assert (error.rule, error.rank, error.slot) == ("in-flight-bound", 1, 3)
    assert "holds up to 4 stage inputs, but max_stage_inputs promises 3" in str(error)


@pytest.mark.parametrize("limits", [(4,), (4, 4, 4)])
def test_a_promise_for_another_number_of_ranks_is_refused(limits):
    assert refused(*GOOD, max_stage_inputs=limits).rule in {rule_name(rule) for rule in COMPUTE_RULES}


def test_an_input_is_held_until_the_weights_have_their_gradient():
    split = build("0F0 0I0 0F1 0I1 0W0 0W1", placement=Placement.looped(1))
    whole = build("0F0 0B0 0F1 0B1", placement=Placement.looped(1))
    assert (split.peak_stage_inputs, whole.peak_stage_inputs) == ((2,), (1,))


def test_every_compute_rule_has_a_fault_above():
    named = {fault[3] for fault in FAULTS.values()} | {"row-for-each-rank", "in-flight-bound"}
    named |= {"partners-in-pairs"}  # test_rules_communication.py
    assert named == {rule_name(rule) for rule in COMPUTE_RULES}
