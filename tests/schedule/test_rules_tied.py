"""Rules of a tied matrix: a good schedule, one fault at a time, and the refusal's rule and place."""

import pytest
from by_hand import assert_refused, maker
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import family_schedules

from pipeloom.errors import ScheduleError
from pipeloom.passes import add_data_parallel, add_tied, exchanges
from pipeloom.schedule import Level, Placement

# Two ranks, a stage each, two micro-batches; the first stage is sharded, the last one's backward is split.
GOOD = (
    """0UNSHARD 0SEND_TIED 0F0 0SEND_F0 0F1 0RESHARD 0SEND_F1
    0UNSHARD 0RECV_B0 0B0 0RECV_B1 0RECV_TIED_GRAD 0B1 0RESHARD 0REDUCE_GRAD""",
    "1RECV_TIED 1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1 1SEND_TIED_GRAD 1REDUCE_GRAD",
)


build, refused = maker(Placement.looped, level=Level.COMMUNICATION)


COMPLETE, WEIGHTS, GRADIENT = "tied-messages-complete", "tied-weights-in-time", "tied-gradient-in-time"
FAULTS = {
    "weights not sent": (0, "0SEND_TIED ", "", COMPLETE, 0, None, "0SEND_TIED is missing"),
    "weights not received": (1, "1RECV_TIED ", "", COMPLETE, 1, None, "1RECV_TIED is missing"),
    "a gradient not sent": (1, "1SEND_TIED_GRAD ", "", COMPLETE, 1, None, "1SEND_TIED_GRAD is missing"),
    "a gradient not received": (0, "0RECV_TIED_GRAD ", "", COMPLETE, 0, None, "0RECV_TIED_GRAD is missing"),
    "weights sent twice": (0, "0F0", "0F0 0SEND_TIED", COMPLETE, 0, 3, "0SEND_TIED appears a second time"),
    "a gradient received twice": (0, "0B1", "0B1 0RECV_TIED_GRAD", COMPLETE, 0, 13, "0RECV_TIED_GRAD appears a second"),
    "the wrong stage": (1, "1RECV_TIED", "1SEND_TIED", COMPLETE, 1, 0, "1SEND_TIED must name stage 0"),
    "weights sent before they are gathered": (0, "0UNSHARD 0SEND_TIED 0F0", "0SEND_TIED 0UNSHARD 0F0", WEIGHTS, 0, 0,
        "0SEND_TIED sends weights of stage 0 while they are sharded"),
    "weights sent after they are dropped": (0, "0SEND_TIED 0F0 0SEND_F0 0F1 0RESHARD 0SEND_F1",
        "0F0 0F1 0RESHARD 0SEND_TIED 0SEND_F0 0SEND_F1", WEIGHTS, 0, 4, "while they are sharded"),
    "weights received too late": (1, "1RECV_TIED 1RECV_F0 1F0", "1RECV_F0 1F0 1RECV_TIED", "sends-match-receives", 1, 0,
        "1RECV_F0 takes what rank 0 sends as 0SEND_TIED at that point"),
    "a gradient sent before it is complete": (1, "1W1 1SEND_TIED_GRAD", "1SEND_TIED_GRAD 1W1", GRADIENT, 1, 10,
        "1SEND_TIED_GRAD precedes 1W1, which adds to it"),
    "a gradient received behind the reduction": (0, "0RECV_TIED_GRAD 0B1 0RESHARD 0REDUCE_GRAD",
        "0B1 0RESHARD 0REDUCE_GRAD 0RECV_TIED_GRAD", GRADIENT, 0, 14,
        "0RECV_TIED_GRAD follows the last 0REDUCE_GRAD, which has to reduce it"),
    "messages of the edge in another order": (0, "0RECV_B1 0RECV_TIED_GRAD", "0RECV_TIED_GRAD 0RECV_B1",
        "sends-match-receives", 0, 10, "0RECV_TIED_GRAD takes what rank 1 sends as 1SEND_B1 at that point"),
}  # fmt: skip


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_is_refused_with_its_rule_its_place_and_the_rows(title):
    assert_refused(refused, GOOD, FAULTS[title])


def test_the_schedule_that_the_faults_start_from_is_good():
    assert build(*GOOD).num_actions == sum(len(row.split()) for row in GOOD)


def test_every_rule_has_a_fault_above():
    assert {COMPLETE, WEIGHTS, GRADIENT} <= {fault[3] for fault in FAULTS.values()}


def test_weights_received_behind_the_first_forward_are_refused_where_the_edge_allows_it():
    rows = ("0F0 0SEND_F0 0SEND_TIED", "1RECV_F0 1SEND_F0", "2RECV_F0 2F0 2RECV_TIED")
    rows = (rows[0], rows[1].replace("1SEND_F0", "1F0 1SEND_F0"), rows[2])
    error = refused(*rows, num_microbatches=1, first_backward_stage=3)
    assert (error.rule, error.rank, error.slot) == (WEIGHTS, 2, 2)
    assert "2RECV_TIED follows 2F0, which uses it" in str(error)


def test_two_stages_of_one_rank_send_each_other_nothing():
    error = refused("0SEND_TIED 0F0 1RECV_TIED 1F0", placement=Placement.linear(1, 2), num_microbatches=1)
    assert error.rule == "complete"
    error = refused("0SEND_TIED 0F0 1F0 1B0 0B0", placement=Placement.linear(1, 2), num_microbatches=1)
    assert (error.rule, error.slot) == (COMPLETE, 0)
    assert "0SEND_TIED moves a matrix that does not change rank" in str(error)


def test_nothing_comes_back_to_a_stage_that_does_not_train():
    rows = ("0SEND_TIED 0F0 0SEND_F0 {}", "1RECV_TIED 1RECV_F0 1F0 1B0 {}")
    fixed = {"num_microbatches": 1, "first_backward_stage": 1}
    assert build(rows[0].format(""), rows[1].format(""), **fixed).first_backward_stage == 1
    error = refused(rows[0].format("0RECV_TIED_GRAD"), rows[1].format("1SEND_TIED_GRAD"), **fixed)
    assert (error.rule, error.rank, error.slot) == (COMPLETE, 0, 3)
    assert "0RECV_TIED_GRAD is superfluous: stage 0 runs no backward" in str(error)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    family_schedules(trains=False),
    st.sampled_from(["none", "optimizer", "gradients", "full"]),
    st.booleans(),
)
def test_leaving_any_of_the_messages_out_is_refused(data, schedule, shard, is_first):
    knobs = {"residency": 1, "prefetch": 1, "gradient_buffers": data.draw(st.sampled_from([None, 1]))}
    if is_first:
        result = add_data_parallel(add_tied(schedule), *exchanges(shard, **knobs))
    else:
        result = add_tied(add_data_parallel(schedule, *exchanges(shard, **knobs)))
    places = [(rank, slot) for rank, slot, action in result.actions() if "TIED" in action.kind.value]
    owner = schedule.placement.rank_by_stage
    is_apart = owner[0] != owner[-1]
    assert len(places) == is_apart * (4 if schedule.first_backward_stage == 0 else 2)
    for rank, slot in places:
        row = result.rows[rank]
        rows = [[*row[:slot], *row[slot + 1 :]] if n == rank else other for n, other in enumerate(result.rows)]
        with pytest.raises(ScheduleError) as caught:
            result.with_rows(rows, result.level)
        assert caught.value.rule == COMPLETE
