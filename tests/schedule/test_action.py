"""Actions and their text."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.errors import ScheduleTextError
from pipeloom.schedule import Action, Kind

quick = settings(max_examples=100, deadline=None)
tied_kinds = [Kind.SEND_TIED, Kind.RECV_TIED, Kind.SEND_TIED_GRAD, Kind.RECV_TIED_GRAD]
stage_swaps = [Kind.SWAP_IN, Kind.SWAP_OUT, Kind.UPDATE]
stage_kinds = [Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, *tied_kinds, *stage_swaps]
counts = st.integers(0, 10**6)
actions = st.one_of(
    st.builds(Action, st.sampled_from([kind for kind in Kind if kind not in stage_kinds]), counts, counts, counts),
    st.builds(Action, st.sampled_from(stage_kinds), counts, st.none(), st.just(0)),
)


@quick
@given(actions)
def test_the_text_of_an_action_reads_back_as_the_same_action(action):
    assert Action.parse(str(action)) == action


@quick
@given(actions, actions)
def test_two_actions_share_a_text_only_if_they_are_equal(one, other):
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.FORWARD, 2, 0)),
        ("2F0.1", Action(Kind.FORWARD, 2, 0, 1)),
        ("13B7", Action(Kind.BACKWARD, 13, 7)),
        ("1I2", Action(Kind.BACKWARD_INPUT, 1, 2)),
        ("1W2.3", Action(Kind.BACKWARD_WEIGHT, 1, 2, 3)),
        ("0SEND_F4", Action(Kind.SEND_F, 0, 4)),
        ("1RECV_F4.2", Action(Kind.RECV_F, 1, 4, 2)),
        ("1SEND_B4", Action(Kind.SEND_B, 1, 4)),
        ("0RECV_B4", Action(Kind.RECV_B, 0, 4)),
        ("3UNSHARD", Action(Kind.UNSHARD, 3)),
        ("3RESHARD", Action(Kind.RESHARD, 3)),
        ("3REDUCE_GRAD", Action(Kind.REDUCE_GRAD, 3)),
        ("0SEND_TIED", Action(Kind.SEND_TIED, 0)),
        ("3RECV_TIED", Action(Kind.RECV_TIED, 3)),
        ("3SEND_TIED_GRAD", Action(Kind.SEND_TIED_GRAD, 3)),
        ("0RECV_TIED_GRAD", Action(Kind.RECV_TIED_GRAD, 0)),
    ],
)
def test_an_action_is_written_as_stage_kind_microbatch(text, action):
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


def test_slice_zero_is_not_written():
    assert str(Action.parse("2F0.0")) == "2F0"


@pytest.mark.parametrize("text", ["", "F0", "2", "2X0", "2f0", "2F0.", "2F.1", "-1F0", "2F-1", "2F0 2F1", "2F0x"])
def test_text_that_is_no_action_is_refused_with_the_form_and_the_kinds(text):
    with pytest.raises(ScheduleTextError, match="such as 2F0; the kinds are F, B, I, W, R, SEND_F") as refused:
        Action.parse(text)
    assert f"'{text}'" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "example"),
    [("2F", "takes a micro-batch, such as 2F0"), ("2UNSHARD0", "takes no micro-batch, such as 2UNSHARD")],
)
def test_a_microbatch_too_few_or_too_many_is_refused_with_an_example(text, example):
    with pytest.raises(ScheduleTextError, match=example):
        Action.parse(text)


def test_an_overlapped_pair_is_refused_by_name():
    with pytest.raises(ScheduleTextError, match="overlapped pair, which pipeloom does not read"):
        Action.parse("(0F4;7B1)OVERLAP_F_B")
