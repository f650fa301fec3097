"""The pass for a tied matrix: where its messages stand, for every family, and what it refuses."""

import pytest
from hypothesis import given, settings
from orders import family_schedules

from pipeloom.errors import ScheduleTextError, UserError
from pipeloom.export.torch_csv import format_torch_csv
from pipeloom.families import make_schedule
from pipeloom.passes import add_tied, add_unshard, lower
from pipeloom.schedule import format_schedule, parse_schedule

quick = settings(max_examples=80, deadline=None)


def tied(name="breadth-first", buffers=2, **sizes):
    return add_tied(lower(make_schedule(name, **sizes), buffers))


def is_tied(action):
    return "TIED" in action.kind.value


@quick
@given(family_schedules(trains=False))
def test_everything_else_stays_as_it_is_and_the_text_reads_back(schedule):
    result = add_tied(schedule)
    assert [[a for a in row if not is_tied(a)] for row in result.rows] == [list(row) for row in schedule.rows]
    assert parse_schedule(format_schedule(result)).rows == result.rows
    assert result.max_stage_inputs == schedule.max_stage_inputs


@quick
@given(family_schedules(trains=False))
def test_weights_leave_before_all_compute_and_are_awaited_from_the_start(schedule):
    result = add_tied(schedule)
    owner = schedule.placement.rank_by_stage
    if owner[0] == owner[-1]:
        assert result is schedule
        return
    texts = list(map(str, result.rows[owner[0]]))
    assert texts[texts.index("0SEND_TIED") + 1].startswith("0F")
    assert not any("SEND" in text for text in texts[: texts.index("0SEND_TIED")])
    assert str(result.rows[owner[-1]][0]) == f"{schedule.num_stages - 1}RECV_TIED"


@quick
@given(family_schedules())
def test_a_gradient_is_sent_once_it_is_complete_behind_what_others_wait_for(schedule):
    result = add_tied(schedule)
    owner, last = schedule.placement.rank_by_stage, schedule.num_stages - 1
    if owner[0] == owner[-1]:
        return
    texts = list(map(str, result.rows[owner[-1]]))
    backwards = [slot for slot, text in enumerate(texts) if text.startswith((f"{last}B", f"{last}W"))]
    is_sent = "B" in texts[backwards[-1]] and schedule.placement.crosses(last - 1)  # a half leaves nothing to send
    behind = backwards[-1] + (2 if is_sent else 1)
    assert texts[behind] == f"{last}SEND_TIED_GRAD"


def test_a_gradient_is_awaited_from_the_last_forward_on():
    result = tied(pp=4, loops=2, num_microbatches=8)
    texts = list(map(str, result.rows[0]))
    assert texts[texts.index("4F7") + 1] == "0RECV_TIED_GRAD"
    texts = list(map(str, tied("1f1b", pp=3, num_microbatches=5).rows[0]))
    assert texts[texts.index("0F4") + 1] == "0RECV_TIED_GRAD"


def test_with_two_ranks_the_gradient_keeps_the_order_of_the_edge():
    texts = list(map(str, tied(buffers=8, pp=2, loops=2, num_microbatches=1).rows[0]))
    assert texts[:6] == ["2RECV_F0", "2RECV_B0", "0RECV_TIED_GRAD", "0RECV_B0", "0SEND_TIED", "0F0"]
    texts = list(map(str, tied(buffers=1, pp=2, loops=2, num_microbatches=3).rows[0]))
    assert texts.index("2RECV_B2") < texts.index("0RECV_TIED_GRAD") < texts.index("0RECV_B0")


def test_forward_only_sends_weights_and_no_gradient():
    kinds = [str(a) for _, _, a in tied("forward-only", loops=1, pp=3, num_microbatches=2).actions() if is_tied(a)]
    assert kinds == ["0SEND_TIED", "2RECV_TIED"]


def test_weights_are_sent_while_they_are_gathered():
    plain = lower(make_schedule("breadth-first", pp=3, loops=2, num_microbatches=3))
    for schedule in (add_unshard(add_tied(plain), 1, 0), add_tied(add_unshard(plain, 1, 0))):
        texts = list(map(str, schedule.rows[0]))
        assert texts.index("0UNSHARD") < texts.index("0SEND_TIED") < texts.index("0F0")


def test_the_other_messages_come_first_and_nothing_is_added_twice():
    with pytest.raises(UserError, match=r"call pipeloom\.passes\.lower first"):
        add_tied(make_schedule("gpipe", pp=2, num_microbatches=2))
    with pytest.raises(UserError, match="sends a tied matrix already"):
        add_tied(tied("gpipe", pp=2, num_microbatches=2))


def test_pytorchs_csv_has_no_word_for_it():
    with pytest.raises(ScheduleTextError, match="has no SEND_TIED, RECV_TIED"):
        format_torch_csv(tied("gpipe", pp=2, num_microbatches=2))
