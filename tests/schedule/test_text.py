"""Schedules as text."""

import pytest
from families import fitting

from pipeloom.errors import ScheduleError, ScheduleTextError, UserError
from pipeloom.export.torch_csv import format_torch_csv, parse_torch_csv
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import PLACEMENTS, Kind, Level, format_schedule, parse_schedule

SLICED = """\
0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1
1F0 1F0.1 1B0.1 1B0 1F1 1F1.1 1I1.1 1I1 1W1 1W1.1
"""


def what_text_carries(schedule):
    return (
        schedule.rows,
        schedule.placement,
        schedule.num_microbatches,
        schedule.num_slices,
        schedule.level,
        schedule.first_backward_stage,
    )


def without_reductions(schedule):
    """A schedule without what PyTorch's format adds to one with communication."""
    rows = [[action for action in row if action.kind is not Kind.REDUCE_GRAD] for row in schedule.rows]
    return schedule.with_rows(rows, schedule.level)


def schedules():
    for name, family in FAMILIES.items():
        for placement in PLACEMENTS:
            for pp, loops, count in [(1, 1, 1), (2, 2, 3), (3, 1, 4), (3, 3, 3)]:
                if loops == 1 or family.is_looped:
                    fits = fitting(name, loops, placement)
                    schedule = make_schedule(name, pp=pp, num_microbatches=count, **fits)
                    yield schedule
                    if pp > 1:
                        yield lower(schedule)


def test_every_schedule_reads_back_from_its_text_and_its_csv():
    number = 0
    for schedule in schedules():
        assert what_text_carries(parse_schedule(format_schedule(schedule))) == what_text_carries(schedule)
        read = parse_torch_csv(format_torch_csv(schedule))
        assert what_text_carries(without_reductions(read)) == what_text_carries(schedule)
        number += 1
    assert number > 100


def test_text_is_one_line_for_each_promise_and_for_each_rank():
    text = format_schedule(make_schedule("gpipe", pp=2, num_microbatches=2))
    assert text == "max_stage_inputs = 2 2\n0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n"


def test_csv_is_one_cell_for_each_action():
    assert format_torch_csv(make_schedule("gpipe", pp=2, num_microbatches=1)) == "0F0,0B0\n1F0,1B0\n"


def test_the_csv_of_a_schedule_with_communication_reduces_each_gradient_after_its_last_backward():
    lowered = lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=2), receive_buffers=9)
    (_, row) = format_torch_csv(lowered).splitlines()
    assert row.endswith("3B0,3SEND_B0,3B1,3REDUCE_GRAD,3SEND_B1,1B0,1SEND_B0,1B1,1REDUCE_GRAD,1SEND_B1")


def test_nothing_is_reduced_where_nothing_trains():
    lowered = lower(make_schedule("forward-only", pp=2, num_microbatches=2))
    assert "REDUCE_GRAD" not in format_torch_csv(lowered)


def test_a_reduction_that_is_there_is_not_added_again():
    once = format_torch_csv(lower(make_schedule("1f1b", pp=2, num_microbatches=3)))
    assert format_torch_csv(parse_torch_csv(once)) == once


def test_token_slices_and_split_backwards_are_read_and_written():
    schedule = parse_schedule(SLICED)
    assert (schedule.num_slices, schedule.num_microbatches) == (2, 2)
    assert format_schedule(schedule) == SLICED
    lowered = lower(schedule)
    assert lowered.level is Level.COMMUNICATION
    assert what_text_carries(parse_schedule(format_schedule(lowered))) == what_text_carries(lowered)


def test_frozen_stages_are_read_off_the_missing_backwards():
    assert parse_schedule("0F0 0F1\n1F0 1B0 1F1 1B1").first_backward_stage == 1
    assert parse_schedule("0F0\n1F0").first_backward_stage == 2


def test_comments_and_empty_lines_are_skipped():
    plain = parse_schedule("0F0 0B0\n1F0 1B0")
    assert parse_schedule("# a title\n\n0F0   0B0\n   # between\n1F0 1B0\n\n# the end") == plain


def test_empty_cells_of_a_csv_are_idle_slots():
    assert parse_torch_csv("0F0,,,0B0\n,1F0, ,1B0\n") == parse_torch_csv("0F0,0B0\n1F0,1B0\n")
    assert parse_torch_csv("0F0,0B0\r\n1F0,1B0\r\n").num_stages == 2


def test_empty_lines_at_the_end_of_a_csv_are_no_ranks():
    assert parse_torch_csv("0F0,0B0\n1F0,1B0\n\n") == parse_torch_csv("0F0,0B0\n1F0,1B0\n")


def test_every_cell_that_is_no_action_is_reported_at_once():
    with pytest.raises(ScheduleTextError) as refused:
        parse_schedule("0F0 zero 0B0 0X1\n# comment\n1F0 1B 1B0")
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["row 0, cell 1", "row 0, cell 3", "row 1, cell 1"]
    assert ["zero" in lines[0], "0X1" in lines[1], "1B" in lines[2]] == [True] * 3


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "0B0 0B1", "0UNSHARD"])
def test_text_without_any_forward_is_refused(text):
    with pytest.raises(ScheduleTextError, match="found no forward at all"):
        parse_schedule(text)


def test_a_stage_that_no_row_runs_is_refused():
    with pytest.raises(ScheduleTextError, match=r"forwards of every stage 0\.\.3, found none of \[1, 2\]"):
        parse_schedule("0F0 0B0\n3F0 3B0")


def test_a_row_whose_stages_all_lie_elsewhere_is_refused():
    with pytest.raises(UserError, match="every pipeline rank"):
        parse_schedule("0F0 0B0\n0F1 0B1\n1F0 1B0 1F1 1B1")


def test_rows_that_break_a_rule_are_refused_by_the_rule():
    with pytest.raises(ScheduleError, match="rule 'complete' at rank 1"):
        parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0")


def test_an_overlapped_cell_is_refused_with_a_clear_message():
    with pytest.raises(ScheduleTextError, match="row 1, cell 1: .*overlapped pair, which pipeloom does not read"):
        parse_torch_csv("0F0,0B0\n1F0,(1F1;2B0)OVERLAP_F_B,1B0\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 0F2147483647", "micro-batches that count up from 0, found number 2147483647 in rows of 2 forwards"),
        ("0F0 99999999F0", "stages that count up from 0, found number 99999999 in rows of 2 forwards"),
        ("0F0 0B0.1999999999", "token slices that count up from 0, found number 1999999999 in rows of 1 forward"),
        ("0F0 0B99999999999999999999", "more than 10 digits"),
        ("0F0 0B" + "9" * 5000, r"'0B9{58}\.\.\.' has a number of more than 10 digits"),
        (" ".join(f"{stage}F0" for stage in range(60)) + " 0F60", None),
        (" ".join(f"{stage}F0" for stage in range(1000)) + " 0F1000", r"1,000 x 1,001 x 1 = 1,001,000, found 1,001"),
    ],
)
def test_numbers_beyond_what_the_rows_hold_are_refused_before_there_is_room_for_them(monkeypatch, text, message):
    if message is None:  # as few as these are missing the rules name them
        with pytest.raises(ScheduleError, match="rule 'complete'"):
            parse_schedule(text)
        return
    monkeypatch.setattr("pipeloom.schedule.text.Schedule", None)  # what holds the rows makes room
    with pytest.raises(ScheduleTextError, match=message):
        parse_schedule(text)


def test_of_many_cells_that_are_no_action_the_first_are_shown_and_shortened():
    with pytest.raises(ScheduleTextError) as refused:
        parse_torch_csv(",".join(["x" * 100] * 100))
    lines = str(refused.value).splitlines()
    assert (len(lines), lines[-1]) == (21, "and 80 more")
    assert f"'{'x' * 60}...' is no action" in lines[0]
