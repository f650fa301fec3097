"""Rows of a plan: layouts that the predictions do not distinguish come first, the simplest of them before all."""

from dataclasses import replace

import pytest

from pipeloom.planner.advice import in_order, is_tie
from pipeloom.planner.error_bar import error_bar
from pipeloom.planner.search import search


@pytest.fixture(scope="module")
def steps_of():
    """Cache of answers."""
    return {}


@pytest.fixture
def found(ask, steps_of):
    """The ten fastest layouts and the error bar."""
    question = ask()
    if not steps_of:
        steps_of[None] = search(question).steps
    return steps_of[None], error_bar(question.cluster, question.software)


def test_without_an_error_the_order_is_that_of_the_step_times(found):
    steps, bar = found
    assert in_order(steps, replace(bar, tie=1e-12)) == list(steps)


def test_within_the_error_the_layout_with_the_fewest_axes_is_first(found):
    steps, bar = found
    rows = in_order(steps, replace(bar, tie=10.0))

    def axes(step):
        return sum(size > 1 for size in (step.run.tp, step.run.pp, step.run.dp))

    assert sorted(map(id, rows)) == sorted(map(id, steps))
    assert axes(rows[0]) == min(map(axes, steps))
    assert [axes(step) for step in rows] == sorted(map(axes, steps))
    assert rows != list(steps)


def test_slower_layouts_follow_in_the_order_of_their_step_times(found):
    steps, bar = found
    limit = steps[4].prediction.step_time_s / steps[0].prediction.step_time_s - 1
    bar = replace(bar, tie=limit)
    rows = in_order(steps, bar)
    num_ties = sum(is_tie(steps[0], step, bar) for step in steps)
    assert 0 < num_ties < len(steps)
    assert set(map(id, rows[:num_ties])) == set(map(id, steps[:num_ties]))
    assert rows[num_ties:] == list(steps[num_ties:])
