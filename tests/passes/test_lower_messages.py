"""Lowering: what is sent and received, where, and with how many buffers."""

import itertools
from collections import Counter, defaultdict

import hypothesis.strategies as st
import pytest
from families import fitting, named_sizes
from hypothesis import given, settings

from pipeloom.errors import UserError
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import PLACEMENTS, Level, Placement, Schedule, parse_schedule

COMPUTE = ("F", "B", "I", "W")
quick = settings(max_examples=80, deadline=None)


@st.composite
def schedules(draw):
    name, fits = draw(named_sizes())
    pp, count = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    return make_schedule(name, pp=pp, num_microbatches=count, **fits)


def edge_of(action, placement):
    """(sender, receiver) of a send or a receive, from the words of the definition."""
    owner, stage = placement.rank_by_stage, action.stage
    match action.kind.value:
        case "SEND_F":
            return owner[stage], owner[stage + 1]
        case "SEND_B":
            return owner[stage], owner[stage - 1]
        case "RECV_F":
            return owner[stage - 1], owner[stage]
        case "RECV_B":
            return owner[stage + 1], owner[stage]
    return None


def users(row, placement):
    """For each edge into this row the slots of the compute actions that use its tensors, in order of posting."""
    letters = {"F": "F", "B": "B", "I": "B"}
    slot_of = {
        (letters[action.kind], action.stage, action.microbatch): slot
        for slot, action in enumerate(row)
        if action.kind in letters
    }
    found = defaultdict(list)
    for slot, action in enumerate(row):
        if action.kind.value.startswith("RECV"):
            found[edge_of(action, placement)].append((slot, slot_of[action.kind[-1], action.stage, action.microbatch]))
    return found


def most_waiting(posted_and_used):
    """The largest number of receives posted and not yet used."""
    return max(sum(p <= slot < used for p, used in posted_and_used) for slot, _ in posted_and_used)


def most_waiting_if_posted_last_minute(used_slots):
    """The same if every receive is posted only when it or a later one of its edge is about to be used."""
    last_minute = [min(used_slots[k:]) for k in range(len(used_slots))]
    return max(
        sum(last_minute[j] <= last_minute[k] and used_slots[j] >= last_minute[k] for j in range(k + 1))
        for k in range(len(used_slots))
    )


@quick
@given(schedules(), st.integers(1, 4))
def test_every_tensor_that_changes_rank_is_sent_once_and_received_once(schedule, buffers):
    owner = schedule.placement.rank_by_stage
    expected = Counter()
    for stage in range(schedule.num_stages - 1):
        for microbatch in range(schedule.num_microbatches):
            if owner[stage] != owner[stage + 1]:
                expected[owner[stage], f"{stage}SEND_F{microbatch}"] += 1
                expected[owner[stage + 1], f"{stage + 1}RECV_F{microbatch}"] += 1
                if schedule.first_backward_stage == 0:
                    expected[owner[stage + 1], f"{stage + 1}SEND_B{microbatch}"] += 1
                    expected[owner[stage], f"{stage}RECV_B{microbatch}"] += 1
    found = Counter(
        (rank, str(action))
        for rank, _, action in lower(schedule, buffers).actions()
        if action.kind.value not in COMPUTE
    )
    assert found == expected


@quick
@given(schedules(), st.integers(1, 4))
def test_without_its_messages_a_lowered_schedule_is_what_it_was(schedule, buffers):
    lowered = lower(schedule, buffers)
    stripped = [tuple(action for action in row if action.kind.value in COMPUTE) for row in lowered.rows]
    assert tuple(stripped) == schedule.rows
    assert lowered.level is Level.COMMUNICATION
    assert lowered.max_stage_inputs == schedule.max_stage_inputs
    assert lowered.peak_stage_inputs == schedule.peak_stage_inputs


@quick
@given(schedules(), st.integers(1, 4))
def test_a_send_follows_its_producer_at_once(schedule, buffers):
    for row in lower(schedule, buffers).rows:
        for before, action in itertools.pairwise(row):
            if action.kind.value.startswith("SEND"):
                assert before == action._replace(kind=before.kind)
                assert before.kind in {"SEND_F": ("F",), "SEND_B": ("B", "I")}[action.kind]


@quick
@given(schedules(), st.integers(1, 4))
def test_no_edge_waits_for_more_tensors_than_it_has_buffers_unless_the_senders_order_forces_it(schedule, buffers):
    for row in lower(schedule, buffers).rows:
        for receives in users(row, schedule.placement).values():
            forced = most_waiting_if_posted_last_minute([used for _, used in receives])
            assert most_waiting(receives) <= max(buffers, forced)


@quick
@given(schedules(), st.integers(1, 4))
def test_no_receive_could_be_posted_earlier(schedule, buffers):
    for row in lower(schedule, buffers).rows:
        for receives in users(row, schedule.placement).values():
            for number, (slot, _) in enumerate(receives):
                earlier_slot = max((s for s in range(slot) if row[s].kind.value in COMPUTE), default=None)
                if earlier_slot is None:
                    continue  # nothing runs before it
                if number and receives[number - 1][0] > earlier_slot:
                    continue  # it stands right behind the receive that must come first
                waiting = sum(used >= earlier_slot for _, used in receives[:number])
                assert waiting >= buffers


def test_with_buffers_for_everything_every_receive_is_first():
    lowered = lower(make_schedule("breadth-first", pp=3, loops=2, num_microbatches=3), receive_buffers=99)
    for row in lowered.rows:
        kinds = [action.kind.value.startswith("RECV") for action in row]
        assert kinds == sorted(kinds, reverse=True)


def test_two_buffers_post_one_receive_ahead():
    lowered = lower(make_schedule("gpipe", pp=2, num_microbatches=3), receive_buffers=2)
    assert " ".join(map(str, lowered.rows[1])) == (
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    )
    assert " ".join(map(str, lowered.rows[0])) == (
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0B0 0RECV_B2 0B1 0B2"
    )


def test_one_buffer_posts_a_receive_when_the_one_before_is_used():
    lowered = lower(make_schedule("gpipe", pp=2, num_microbatches=3), receive_buffers=1)
    assert " ".join(map(str, lowered.rows[1][:6])) == "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2"


def test_the_senders_order_wins_over_the_number_of_buffers():
    crossed = parse_schedule("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1")
    lowered = lower(crossed, receive_buffers=1)
    assert " ".join(map(str, lowered.rows[1][:4])) == "1RECV_F0 1RECV_F1 1F1 1F0"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_buffer_never_deadlocks(placement):
    for name in FAMILIES:
        for pp in range(1, 5):
            for loops in range(1, 4 if FAMILIES[name].is_looped and not FAMILIES[name].loops else 2):
                for count in (1, 2, 3, 4, 6):
                    fits = fitting(name, loops, placement)
                    schedule = make_schedule(name, pp=pp, num_microbatches=count, **fits)
                    assert lower(schedule, 1).graph.cycle() == []


def test_a_lowered_schedule_is_not_lowered_again():
    lowered = lower(make_schedule("1f1b", pp=2, num_microbatches=2))
    assert lower(lowered, 1) is lowered


def test_on_one_rank_there_is_nothing_to_move():
    schedule = make_schedule("breadth-first", pp=1, loops=3, num_microbatches=2)
    assert lower(schedule).rows == schedule.rows


@pytest.mark.parametrize("buffers", [0, -1])
def test_less_than_one_buffer_is_refused(buffers):
    with pytest.raises(UserError, match=f"receive_buffers must be at least 1, found {buffers}"):
        lower(make_schedule("1f1b", pp=2, num_microbatches=2), buffers)


def test_split_backwards_send_the_gradient_after_the_first_half():
    split = parse_schedule("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1F1 1W0 1I1 1W1")
    row = " ".join(map(str, lower(split, 1).rows[1]))
    assert row == "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1W0 1I1 1SEND_B1 1W1"


def test_token_slices_travel_one_by_one():
    sliced = parse_schedule("0F0 0F0.1 0B0.1 0B0\n1F0 1F0.1 1B0.1 1B0")
    row = " ".join(map(str, lower(sliced, 1).rows[1]))
    assert row == "1RECV_F0 1F0 1RECV_F0.1 1F0.1 1B0.1 1SEND_B0.1 1B0 1SEND_B0"


def test_no_gradient_is_sent_to_frozen_stages():
    rows = parse_schedule("0F0\n1F0\n2F0 2B0").rows
    frozen = Schedule(rows, Placement.looped(3), 1, first_backward_stage=2)
    assert {str(a) for _, _, a in lower(frozen).actions() if a.kind.value not in COMPUTE} == {
        "0SEND_F0",
        "1RECV_F0",
        "1SEND_F0",
        "2RECV_F0",
    }
