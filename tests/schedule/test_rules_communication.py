"""Communication-level rules: a good schedule, one fault at a time, and the refusal's rule and place."""

import numpy as np
import pytest
from by_hand import assert_refused, maker

from pipeloom.schedule import Level, Placement
from pipeloom.schedule.rules import COMMUNICATION_RULES, rule_name

GOOD = (
    "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE_GRAD",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
)


build, refused = maker(Placement.looped, level=Level.COMMUNICATION)


def test_the_schedule_that_the_faults_start_from_is_good():
    assert build(*GOOD).level is Level.COMMUNICATION


FAULTS = {
    "a send is missing": (0, "0SEND_F1 ", "", "messages-complete", 0, None, "0SEND_F1 is missing"),
    "a gradient's send is missing": (1, " 1SEND_B1", "", "messages-complete", 1, None, "1SEND_B1 is missing"),
    "a receive is missing": (1, "1RECV_F1 ", "", "messages-complete", 1, None, "1RECV_F1 is missing"),
    "a gradient's receive is missing": (0, "0RECV_B0 ", "", "messages-complete", 0, None, "0RECV_B0 is missing"),
    "a send comes twice": (0, "0SEND_F0", "0SEND_F0 0SEND_F0", "unique", 0, 3, "0SEND_F0 appears a second time"),
    "a receive comes twice": (1, "1RECV_F0", "1RECV_F0 1RECV_F0", "unique", 1, 1, "appears a second time"),
    "a reduction comes twice": (1, "1REDUCE_GRAD", "1REDUCE_GRAD 1REDUCE_GRAD", "reduce-each-contribution-once", 1, 9,
        "reduces nothing"),
    "a reduction is missing": (1, " 1REDUCE_GRAD", "", "reduce-each-contribution-once", 1, 6,
        "1B1 adds to a gradient that no 1REDUCE_GRAD"),
    "a reduction before the first backward": (0, "0F1", "0REDUCE_GRAD 0F1", "reduce-each-contribution-once", 0, 3,
        "0REDUCE_GRAD reduces nothing"),
    "an eviction is never undone": (0, "0F1", "0EVICT0 0F1", "swaps-in-turn", 0, 3, "0LOAD0 is missing"),
    "an eviction before its forward": (0, "0F0", "0EVICT0 0F0 0LOAD0", "swaps-in-turn", 0, 1,
        "0EVICT0 is not between 0F0 and 0LOAD0"),
    "a forward comes twice": (0, "0F0", "0F0 0F0", "unique", 0, 2, "0F0 appears a second time"),
    "a backward is missing": (1, "1B1 ", "", "complete", 1, 2, "1B1 is missing"),
    "a micro-batch too many": (0, "0F1", "0F1 0SEND_F2", "in-range", 0, 4, "micro-batch 2"),
    "a stage too many": (1, "1F1", "1F1 2UNSHARD", "in-range", 1, 6, "stage 2"),
    "a send on another rank": (1, "1F1", "1F1 0SEND_F1", "on-its-rank", 1, 6, "0SEND_F1 belongs to rank 0"),
    "a reduction on another rank": (0, "0RESHARD", "0RESHARD 1REDUCE_GRAD", "on-its-rank", 0, 10, "rank 1"),
    "a backward before its forward": (1, "1RECV_F0 1F0 1B0", "1B0 1RECV_F0 1F0", "forward-before-backward", 1, 0,
        "1B0 precedes 1F0"),
    "two sends crossed": (0, "0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0SEND_F0", "sends-match-receives", 1, 0,
        "1RECV_F0 takes what rank 0 sends as 0SEND_F1"),
    "two receives crossed": (0, "0RECV_B0 0B0 0RECV_B1", "0RECV_B1 0RECV_B0 0B0", "sends-match-receives", 0, 5,
        "0RECV_B1 takes what rank 1 sends as 1SEND_B0"),
    "a receive behind its user": (1, "1RECV_F1 1F1", "1F1 1RECV_F1", "receive-before-compute", 1, 5,
        "1RECV_F1 follows 1F1"),
    "a gradient received behind its user": (0, "0RECV_B1 0B1", "0B1 0RECV_B1", "receive-before-compute", 0, 8,
        "0RECV_B1 follows 0B1"),
    "a send before its producer": (0, "0F1 0SEND_F1", "0SEND_F1 0F1", "send-after-compute", 0, 3,
        "0SEND_F1 precedes 0F1"),
    "a gradient sent before its producer": (1, "1B0 1SEND_B0", "1SEND_B0 1B0", "send-after-compute", 1, 2,
        "1SEND_B0 precedes 1B0"),
    "a send behind the last stage": (1, "1F1", "1F1 1SEND_F1", "messages-complete", 1, 6, "does not change rank"),
    "a receive before the first stage": (0, "0F0", "0RECV_F0 0F0", "messages-complete", 0, 1, "does not change rank"),
    "a gradient sent from the first stage": (0, "0B0", "0B0 0SEND_B0", "messages-complete", 0, 7, "not change rank"),
    "a gradient received by the last stage": (1, "1B0", "1RECV_B0 1B0", "messages-complete", 1, 2, "not change rank"),
    "computing on a resharded stage": (0, "0RECV_B1 0B1 0RESHARD", "0RESHARD 0RECV_B1 0B1", "unshard-before-compute", 0,
        9, "0B1 computes on stage 0"),
    "computing before the gather": (0, "0UNSHARD 0F0", "0F0 0UNSHARD", "unshard-before-compute", 0, 0,
        "0F0 computes on stage 0"),
    "gathering twice": (0, "0B0", "0UNSHARD 0B0", "unshard-before-compute", 0, 6, "is gathered already"),
    "dropping what is not gathered": (1, "1F1", "1RESHARD 1F1", "unshard-before-compute", 1, 5, "is not gathered"),
    "reducing too early": (1, "1B1 1SEND_B1 1REDUCE_GRAD", "1REDUCE_GRAD 1B1 1SEND_B1", "reduce-each-contribution-once",
        1, 7, "1B1 adds"),
    "reducing before the weights' half": (1, "1B1 1SEND_B1 1REDUCE_GRAD", "1I1 1SEND_B1 1REDUCE_GRAD 1W1",
        "reduce-each-contribution-once", 1, 9, "1W1 adds to a gradient that no 1REDUCE_GRAD reduces"),
    "sending only after the answer": (0, "0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "0RECV_B0 0B0 0RECV_B1 0B1 0SEND_F1",
        "acyclic", 0, 7, "deadlock"),
}  # fmt: skip


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_is_refused_with_its_rule_its_place_and_the_rows(title):
    assert_refused(refused, GOOD, FAULTS[title])


def test_a_send_between_neighbors_on_one_rank_is_superfluous():
    rows = ("0F0 1F0 1SEND_F0 1RECV_B0 1B0 0B0", "2RECV_F0 2F0 3F0 3B0 2B0 2SEND_B0")
    linear = {"placement": Placement.linear(2, 2), "num_microbatches": 1}
    assert build(*rows, **linear).num_stages == 4
    error = refused(rows[0].replace("0F0", "0F0 0SEND_F0"), rows[1], **linear)
    assert (error.rule, error.rank, error.slot) == ("messages-complete", 0, 1)
    error = refused(rows[0], rows[1].replace("3B0", "3B0 3SEND_B0"), **linear)
    assert (error.rule, error.rank, error.slot) == ("messages-complete", 1, 4)


def test_no_gradient_goes_to_a_frozen_stage():
    rows = ("0F0 0SEND_F0", "1RECV_F0 1F0 1B0")
    frozen = {"num_microbatches": 1, "first_backward_stage": 1}
    assert build(*rows, **frozen).first_backward_stage == 1
    error = refused(rows[0], rows[1] + " 1SEND_B0", **frozen)
    assert (error.rule, error.rank, error.slot) == ("messages-complete", 1, 3)


def test_the_input_half_of_a_split_backward_makes_the_message():
    rows = ("0F0 0SEND_F0 0RECV_B0 0I0 0W0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
    assert np.argwhere(build(*rows, num_microbatches=1).facts.is_split).tolist() == [[0, 0, 0], [1, 0, 0]]
    error = refused(rows[0], "1RECV_F0 1F0 1SEND_B0 1I0 1W0", num_microbatches=1)
    assert (error.rule, error.rank, error.slot) == ("send-after-compute", 1, 2)
    error = refused("0F0 0SEND_F0 0I0 0RECV_B0 0W0", rows[1], num_microbatches=1)
    assert (error.rule, error.rank, error.slot) == ("receive-before-compute", 0, 3)


def test_a_message_the_wrong_way_round_a_ring_of_two_differs_from_the_right_one():
    # with two ranks and two loops, outputs and gradients share the edge from rank 0 to rank 1
    rows = (
        "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0",
    )
    ring = {"placement": Placement.looped(2, 2), "num_microbatches": 1}
    assert build(*rows, **ring).num_stages == 4
    error = refused(
        rows[0],
        rows[1].replace("3RECV_F0 3F0", "1RECV_B0 3RECV_F0 3F0").replace("3SEND_B0 1RECV_B0", "3SEND_B0"),
        **ring,
    )
    assert (error.rule, error.rank, error.slot) == ("sends-match-receives", 1, 3)
    assert "1RECV_B0 takes what rank 0 sends as 2SEND_F0 at that point" in str(error)


def test_too_many_held_inputs_are_refused_with_communication_too():
    assert build(*GOOD, max_stage_inputs=(2, 1)).peak_stage_inputs == (2, 1)
    error = refused(*GOOD, max_stage_inputs=(1, 1))
    assert (error.rule, error.rank) == ("in-flight-bound", 0)


def test_a_row_too_few_is_refused():
    assert refused(GOOD[0], placement=Placement.looped(2)).rule == "row-for-each-rank"


def test_a_stage_may_be_gathered_again():
    again = GOOD[0].replace("0SEND_F1", "0SEND_F1 0RESHARD").replace("0B0", "0UNSHARD 0B0")
    assert build(again, GOOD[1]).num_ranks == 2


EVICTING = (GOOD[0].replace("0F1", "0EVICT0 0F1 0LOAD0"), GOOD[1])


@pytest.mark.parametrize("partners", [None, (1, 0)])
def test_evictions_may_name_partners(partners):
    assert build(*EVICTING, partners=partners).partners == partners


@pytest.mark.parametrize(
    ("partners", "rule", "words"),
    [
        ((1,), "partners-in-pairs", "expected 2 partners, one for each rank, found 1"),
        ((2, 0), "partners-in-pairs", "the partner 2 of rank 0 is not in 0..1"),
        ((-1, 0), "partners-in-pairs", "the partner -1 of rank 0 is not in 0..1"),
        ((1, 1), "partners-in-pairs", "rank 0 has the partner 1, which has rank 1"),
        ((0, 1), "evicts-to-another", "0EVICT0 has nowhere to go: rank 0 has no partner"),
    ],
)
def test_wrong_partners_are_refused(partners, rule, words):
    error = refused(*EVICTING, partners=partners)
    assert error.rule == rule
    assert words in str(error)


def test_who_evicts_nothing_needs_no_partner():
    assert build(*GOOD, partners=(0, 1)).partners == (0, 1)


def test_every_communication_rule_has_a_fault_above():
    named = {fault[3] for fault in FAULTS.values()} | {"row-for-each-rank", "in-flight-bound"}
    named |= {"partners-in-pairs", "evicts-to-another"}  # just above
    named |= {"gathered-bound", "gradient-bound"}  # test_rules_sharding.py
    named |= {"on-device-when-used", "resident-bound", "update-each-stage-once"}  # test_stage_swaps.py
    named |= {"tied-messages-complete", "tied-weights-in-time", "tied-gradient-in-time"}  # test_rules_tied.py
    assert named == {rule_name(rule) for rule in COMMUNICATION_RULES}
