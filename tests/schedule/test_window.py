"""The rows around a place."""

from pipeloom.schedule import Action
from pipeloom.schedule.window import window


def rows(num_ranks, length):
    return [[Action.parse(f"{rank}F{slot}") for slot in range(length)] for rank in range(num_ranks)]


def test_the_place_is_marked_and_the_rest_is_cut():
    text = window(rows(6, 20), rank=3, slot=10, reach=2, neighbours=1)
    assert text.splitlines() == [
        "  slots 8 to 12:",
        "  rank 2: ... 2F8    2F9    2F10   2F11   2F12 ...",
        "> rank 3: ... 3F8    3F9    >3F10< 3F11   3F12 ...",
        "  rank 4: ... 4F8    4F9    4F10   4F11   4F12 ...",
    ]


def test_the_beginning_is_shown_if_no_slot_is_to_blame():
    text = window(rows(2, 3), rank=1, slot=None)
    assert text.splitlines()[1:] == ["  rank 0: 0F0 0F1 0F2", "> rank 1: 1F0 1F1 1F2"]


def test_a_slot_behind_the_end_of_a_shorter_row_marks_nothing():
    text = window([rows(1, 9)[0], rows(1, 2)[0]], rank=1, slot=8)
    assert "> rank 1:" in text
    assert "<" not in text


def test_the_first_and_the_last_slot_can_be_marked():
    assert ">0F0<" in window(rows(1, 3), rank=0, slot=0)
    assert ">0F2<" in window(rows(1, 3), rank=0, slot=2)
