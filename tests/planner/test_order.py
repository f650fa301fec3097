"""Rows of a plan: layouts that the predictions do not distinguish come first, the simplest of them before all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeloom.cli.plan_text import _on_order
from pipeloom.planner.choice import SIMPLER, choice_order, in_order, is_tie, simplest
from pipeloom.planner.comparison import Alternative
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


def axes(step):
    return sum(size > 1 for size in (step.run.tp, step.run.pp, step.run.dp))


def test_the_simplest_within_the_error_has_the_fewest_axes(found):
    steps, bar = found
    assert axes(simplest(steps, replace(bar, tie=10.0))) == min(map(axes, steps))
    assert simplest(steps, replace(bar, tie=1e-12)) is steps[0]


def test_simplicity_decides_the_order_where_the_times_hardly_differ(found):
    steps, bar = found
    rows = in_order(steps, replace(bar, tie=10.0))
    assert sorted(map(id, rows)) == sorted(map(id, steps))
    near = [step for step in steps if step.prediction.step_time_s < steps[0].prediction.step_time_s * (1 + SIMPLER)]
    assert set(map(id, rows[: len(near)])) == set(map(id, near))
    assert rows[len(near) :] == list(steps[len(near) :])
    assert axes(rows[0]) == min(map(axes, near))


def test_within_the_margin_the_simplest_is_first_and_the_others_follow_by_time(found):
    runs = [step.run for step in found[0]]
    plain = replace(runs[0], tp=1, pp=1, loops=1, layers_by_stage=None, dp=runs[0].num_devices)
    piped = replace(plain, pp=2, dp=plain.dp // 2)
    named = [(piped, "1f1b", "none"), (piped, "zb-h1", "none"), (plain, "1f1b", "none"), (plain, "1f1b", "keep")]
    kinds = [Alternative(*one, filled=0.5) for one in named]
    times_s = [1.0, 1.01, 1.02, 1.03]
    assert choice_order(times_s, kinds, 1e-12) == [0, 1, 2, 3]
    assert choice_order(times_s, kinds, 0.025) == [2, 0, 1, 3]
    assert choice_order(times_s, kinds, 1.0) == [2, 0, 1, 3]
    assert choice_order([4.0, 3.0, 2.0, 1.0], kinds, 1e-12) == [3, 2, 1, 0]


@pytest.mark.parametrize(("filled", "first"), [((0.8, 0.5, 0.8), 1), ((0.51, 0.5, 0.51), 0), ((0.5, 0.5, 0.1), 0)])
def test_of_layouts_with_equally_many_axes_the_one_with_more_room_is_first(found, filled, first):
    """Not by less than the error of predicted memory, and not with one more axis."""
    run = replace(found[0][0].run, tp=1, pp=1, loops=1, layers_by_stage=None, dp=8)
    tensor, piped, both = replace(run, tp=2, dp=4), replace(run, pp=2, dp=4), replace(run, tp=2, pp=2, dp=2)
    layouts = [Alternative(one, "1f1b", "none", room) for one, room in zip((tensor, piped, both), filled, strict=True)]
    assert choice_order([1.0, 1.001, 1.002], layouts, SIMPLER)[0] == first


def test_slower_layouts_follow_in_the_order_of_their_step_times(found):
    steps, bar = found
    limit = steps[4].prediction.step_time_s / steps[0].prediction.step_time_s - 1
    bar = replace(bar, tie=limit)
    rows = in_order(steps, bar)
    num_ties = sum(is_tie(steps[0], step, bar) for step in steps)
    assert 0 < num_ties < len(steps)
    assert set(map(id, rows[:num_ties])) == set(map(id, steps[:num_ties]))
    assert rows[num_ties:] == list(steps[num_ties:])


@pytest.mark.parametrize("has_simpler", [False, True])
def test_row_1_is_called_the_simplest_only_without_advice_on_a_simpler_layout(has_simpler):
    steps = (object(), object())
    plan = SimpleNamespace(
        error_bar=SimpleNamespace(tie=0.02), num_equivalent=2, rows=steps, steps=steps, best=steps[0],
        simplest=steps[0], has_simpler=has_simpler,
    )  # fmt: skip
    assert ("Row 1 is the simplest of them." in _on_order(plan)) != has_simpler


def test_the_simplest_row_is_the_simplest_of_the_rows_alone():
    steps = tuple(SimpleNamespace(prediction=SimpleNamespace(step_time_s=seconds)) for seconds in (1.0, 1.01))
    plan = SimpleNamespace(
        error_bar=SimpleNamespace(tie=0.02), num_equivalent=2, rows=steps, steps=steps, best=steps[0],
        simplest=steps[1], has_simpler=True,
    )  # fmt: skip
    assert _on_order(plan).endswith("The simplest of these rows is row 2, 1.0% slower by prediction.")
