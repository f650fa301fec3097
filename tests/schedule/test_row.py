"""A row is its actions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import ScheduleTextError
from pipeloom.schedule import Action, Kind, Row
from pipeloom.schedule.kinds import STAGE_KINDS

kinds = st.sampled_from(list(Kind))


@st.composite
def actions(draw):
    kind, stage = draw(kinds), draw(st.integers(-3, 9))
    if kind in STAGE_KINDS:
        return Action(kind, stage, draw(st.one_of(st.none(), st.integers(0, 9))))
    return Action(kind, stage, draw(st.one_of(st.none(), st.integers(-3, 2**31 - 1))), draw(st.integers(0, 3)))


lists = st.lists(actions(), max_size=12)


@given(lists)
def test_a_row_reads_as_the_actions_it_was_made_of(items):
    row = Row.of(items)
    assert list(row) == items
    assert [row[n] for n in range(len(row))] == items
    assert row == tuple(items)
    assert len(row) == len(items)


@given(lists, lists, st.integers(-14, 14), st.integers(-14, 14))
def test_rows_are_cut_joined_and_compared_like_lists(items, more, begin, end):
    assert Row.of(items)[begin:end] == items[begin:end]
    assert Row.of(items) + Row.of(more) == items + more
    assert (Row.of(items) == Row.of(more)) == (items == more)
    assert (Row.of(items) == more) == (items == more)
    assert (hash(Row.of(items)) == hash(Row.of(tuple(items)))) is True


@given(lists, st.data())
def test_two_rows_alternate(items, data):
    others = data.draw(st.lists(actions(), min_size=len(items), max_size=len(items)))
    wanted = [action for pair in zip(items, others, strict=True) for action in pair]
    assert Row.of(items).alternate(Row.of(others)) == wanted


@given(kinds, st.lists(st.integers(0, 5), max_size=3), st.lists(st.integers(0, 5), max_size=4))
def test_a_grid_goes_stage_by_stage(kind, stages, microbatches):
    assert Row.grid(kind, stages, microbatches) == [Action(kind, s, m) for s in stages for m in microbatches]


@given(lists, st.lists(kinds, max_size=3))
def test_kinds_are_distinguished(items, wanted):
    assert Row.of(items).is_kind(*wanted).tolist() == [action.kind in wanted for action in items]


def test_numbers_that_no_run_has_are_refused():
    with pytest.raises(ScheduleTextError, match="below 2 \\*\\* 31, found 0F99999999999"):
        Row.of([Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 99999999999)])
