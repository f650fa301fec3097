"""Where a model that is swapped through one device is cut, and how many micro-batches hide the swaps."""

from dataclasses import replace
from itertools import combinations, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.errors import UserError
from pipeloom.planner.stage_swaps import SwapQuestion, plan_swaps, swapped_step
from pipeloom.schedule.stage_swaps import Amounts


def question_of(weights, *, budget, rate=1.0, needs_norm=True, seconds=1.0):
    """Pieces whose time goes with their weights; gradient and state as AdamW has them in single precision."""
    return SwapQuestion(
        forward_s=tuple(seconds * size for size in weights),
        backward_s=tuple(2 * seconds * size for size in weights),
        update_s=tuple(0.1 * seconds * size for size in weights),
        pieces=tuple(Amounts(weights=size, gradient=size, state=2 * size) for size in weights),
        budget=budget,
        bytes_per_s=rate,
        needs_norm=needs_norm,
    )


def brute_force(question, count):
    """The fastest of all cuts that fit."""
    pieces, found = len(question.pieces), []
    for number in range(pieces):
        for borders in combinations(range(1, pieces), number):
            partition = [end - begin for begin, end in pairwise((0, *borders, pieces))]
            try:
                found.append(swapped_step(question, partition, count).step_s)
            except UserError:
                continue
    return min(found)


@st.composite
def questions(draw, most=7):
    weights = draw(st.lists(st.integers(1, 9), min_size=2, max_size=most))
    budget = draw(st.integers(4 * max(weights), 4 * sum(weights)))
    seconds, rate = draw(st.sampled_from([0.1, 0.5, 1.0, 4.0])), draw(st.sampled_from([0.5, 1.0, 4.0]))
    uneven = [draw(st.sampled_from([0.25, 1.0, 1.0, 3.0])) * size for size in weights]
    question = question_of(weights, budget=budget, rate=rate, needs_norm=draw(st.booleans()), seconds=seconds)
    if lent := draw(st.sampled_from([0, 0, 3])):  # a head that borrows the first piece's matrix, and owes its gradient
        *others, head = question.pieces
        tied = (*others, replace(head, borrowed=lent, lent_gradient=lent))
        question = replace(question, pieces=tied, budget=max(budget, 4 * max(weights) + 2 * lent))
    return SwapQuestion(
        **{
            **{name: getattr(question, name) for name in ("update_s", "pieces", "budget", "bytes_per_s", "needs_norm")},
            "forward_s": tuple(uneven),
            "backward_s": tuple(2 * size for size in uneven),
        }
    )


@settings(max_examples=10, deadline=None)
@given(questions(), st.sampled_from([1, 2, 6]))
def test_the_cut_is_close_to_the_best_of_all(question, count):
    """Of 1,471 random tied models two were more than 2 % from the best, at most 4.3 %; of 1,009 others one, 2.1 %."""
    found, is_tied = plan_swaps(question, [count]), question.pieces[-1].lent_gradient > 0
    assert found.num_microbatches == count
    assert found.step_s <= (1.08 if is_tied else 1.04) * brute_force(question, count)


def test_ten_layers_with_a_large_embedding_and_head():
    question = question_of([30, *[8] * 8, 30], budget=4 * 60, rate=2.0)
    for count in (1, 4):
        assert plan_swaps(question, [count]).step_s <= 1.02 * brute_force(question, count)


def test_more_micro_batches_until_the_swaps_hide():
    question = question_of([8] * 8, budget=4 * 20, rate=1.0, needs_norm=False)
    plans = [plan_swaps(question, [count]) for count in (1, 2, 4, 8, 16, 32)]
    used = [plan.utilization for plan in plans]
    assert used == sorted(used)
    assert [plan.schedule.max_resident for plan in plans] == [80] * 6
    found = plan_swaps(question, [1, 2, 4, 8, 16, 32, 64, 128])
    assert (
        found.utilization
        >= 0.95
        > next(plan for plan in plans if plan.num_microbatches == found.num_microbatches // 2).utilization
    )
    assert found.hidden > 0.5


def test_a_visit_that_lasts_as_long_as_the_next_load_uses_the_device_nearly_all_the_time():
    """Eight stages, two resident; a load takes what a forward visit takes: only the ends of the step are exposed."""
    count = 64
    question = SwapQuestion(
        forward_s=(1.0,) * 8,
        backward_s=(2.0,) * 8,
        update_s=(0.0,) * 8,
        pieces=(Amounts(weights=1),) * 8,
        budget=2,
        bytes_per_s=1 / count,
        needs_norm=False,
    )
    step = swapped_step(question, (1,) * 8, count)
    computes_s = 8 * 3 * count
    assert step.step_s == computes_s + 2 * count  # the first load, and the last stage on its way home
    assert step.utilization == pytest.approx(24 / 26)


def test_the_number_of_stages_may_be_given():
    question = question_of([8] * 8, budget=4 * 32)
    assert len(plan_swaps(question, [4], num_stages=5).partition) == 5
    with pytest.raises(UserError, match="no partition into 1 stages has every stage within 128 bytes"):
        plan_swaps(question, [4], num_stages=1)
    with pytest.raises(UserError, match="the largest piece of the model takes 32 bytes, the budget is 31 bytes"):
        plan_swaps(question_of([8] * 8, budget=31), [4])


def test_the_gradient_that_a_head_lends_has_room_on_the_first_stage():
    plain = question_of([2, 2, 2], budget=9)
    tied = replace(plain, pieces=(*plain.pieces[:-1], replace(plain.pieces[-1], borrowed=0.5, lent_gradient=0.5)))
    assert plan_swaps(tied, [1]).partition == (1, 1, 1)
    with pytest.raises(UserError, match="the largest piece of the model takes 10 bytes, the budget is 9 bytes"):
        plan_swaps(replace(tied, pieces=(*tied.pieces[:-1], replace(tied.pieces[-1], weights=0, lent_gradient=2))), [1])


def test_less_room_is_taken_where_it_is_faster():
    """Where moving takes longest, stages that stay move everything in one direction first and then in the other."""
    question = question_of([8] * 8, budget=7 * 32, rate=1.0, seconds=0.01)
    found = plan_swaps(question, [2])
    assert found.schedule.max_resident < question.budget
    assert found.step_s < 0.95 * swapped_step(question, found.partition, 2).step_s
