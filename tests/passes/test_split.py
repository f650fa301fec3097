"""The pass that splits backwards: where the halves stand, and that nobody waits longer for the first ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import one_rank_schedules

from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import add_unshard, lower, split_backward
from pipeloom.schedule import Kind, parse_schedule
from pipeloom.simulation import simulate


def texts(schedule, rank=0):
    return " ".join(map(str, schedule.rows[rank]))


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (0, "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"),
        (1, "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2"),
        (2, "0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"),
        (None, "0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"),
    ],
)
def test_the_second_half_is_so_many_backwards_later(delay, expected):
    assert texts(split_backward(make_schedule("1f1b", pp=2, num_microbatches=3), delay)) == expected


@given(one_rank_schedules(), st.integers(0, 5) | st.none())
def test_every_backward_is_split_once_and_halves_stay(schedule, delay):
    compute = parse_schedule(texts(schedule))
    found = split_backward(compute, delay)
    assert found.split_stages == frozenset(range(schedule.num_stages))
    assert not found.rows[0].is_kind(Kind.BACKWARD).any()
    plain = {a for a in compute.rows[0] if a.kind is not Kind.BACKWARD}
    assert plain <= set(found.rows[0])
    as_one = [a._replace(kind=Kind.BACKWARD_INPUT) if a.kind is Kind.BACKWARD else a for a in compute.rows[0]]
    assert [a for a in found.rows[0] if a in set(as_one)] == as_one


def test_delayed_weights_fill_the_bubble_of_one_forward_one_backward():
    """The gradient of an input goes out earlier by its other half (arXiv 2401.10241, section 2)."""
    costs = Costs(forward_s=1, backward_s=2)
    whole = make_schedule("1f1b", pp=4, num_microbatches=8)
    ends = [simulate(one, costs).end_s for one in (whole, split_backward(whole), split_backward(whole, 3))]
    assert ends[0] == 8 * 3 + 3 * 3
    assert ends[1] == 8 * 3 + 3 * 2  # each stage hands the gradient on when half of its backward is done
    assert ends[2] <= ends[1]


def test_a_delay_lets_the_promise_fall_and_none_keeps_it():
    whole = make_schedule("1f1b", pp=4, num_microbatches=8)
    assert split_backward(whole).max_stage_inputs == whole.max_stage_inputs == (4, 3, 2, 1)
    assert split_backward(whole, 2).max_stage_inputs is None
    assert split_backward(whole, 2).peak_stage_inputs == (6, 5, 4, 3)


def test_weights_at_the_end_of_the_row_are_not_gathered_for():
    whole = make_schedule("breadth-first", pp=2, loops=4, num_microbatches=4)
    gathers = [
        sum(row.is_kind(Kind.UNSHARD).sum() for row in add_unshard(lower(one), 1, 1).rows)
        for one in (whole, split_backward(whole), split_backward(whole, None))
    ]
    assert gathers == [2 * 7] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: split_backward(s, -1), "delay must be at least 0, found -1"),
        (lambda s: split_backward(lower(s)), "start from a compute-only schedule"),
    ],
)
def test_what_cannot_be_split_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        change(make_schedule("1f1b", pp=2, num_microbatches=2))
