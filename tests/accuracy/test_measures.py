"""Measures against brute force and against values worked out by hand."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.accuracy.compare import Comparison, Outcome, measure, rank_correlation, rankings, top_regret
from pipeloom.accuracy.rows import read_rows

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]


NUMBERS = count(1000)


def outcomes(*pairs, **changes):
    """An outcome for each (measured, predicted), all of different layouts."""
    row = replace(ROW, **changes)
    runs = [replace(row.run, micro_batch=next(NUMBERS)) for _ in pairs]
    return [
        Outcome(replace(row, run=run, step_time_s=measured), predicted, 1e9, fits=True)
        for run, (measured, predicted) in zip(runs, pairs, strict=True)
    ]


def test_a_layout_that_was_measured_twice_is_one_of_a_ranking_with_its_mean_time():
    first, other = outcomes((10, 5), (8, 6))
    again = replace(first, row=replace(first.row, step_time_s=14, note="compiled"))
    (ranking,) = rankings([first, other, again])
    assert (ranking.layouts, ranking.first.step_time_s) == (2, 12)
    assert rankings([first, again]) == []
    # Errors are those of all rows.
    assert measure([first, other, again]).timed_rows == 3


def test_rows_with_an_observation_are_listed_apart():
    first, other = outcomes((10, 5), (8, 8))
    tree = Comparison((replace(first, is_observed=True), other), {}).to_json()
    assert (tree["observed"]["rows"], tree["observed"]["mean_abs_error"]) == (1, 0.5)
    assert (tree["physics"]["rows"], tree["physics"]["mean_abs_error"]) == (1, 0)


def test_errors_are_fractions_of_the_measured_time():
    part = measure(outcomes((10, 11), (10, 9), (10, 10), (20, 26)))
    assert part.mean_abs_error == pytest.approx(0.125)
    assert part.median_abs_error == pytest.approx(0.1)
    assert part.bias == pytest.approx(0.075)
    assert part.p90_abs_error == pytest.approx(0.1 + 0.2 * 0.7)


def test_regret_is_what_the_layout_ranked_first_cost_more_than_the_best():
    assert measure(outcomes((10, 5), (8, 6), (12, 7))).mean_top1_regret == pytest.approx(0.25)
    assert measure(outcomes((10, 7), (8, 6))).mean_top1_regret == 0


def test_the_regret_of_seconds_is_that_of_the_first_of_them():
    assert top_regret([10, 8, 12], [5, 6, 7]) == pytest.approx(0.25)
    assert top_regret([8], [3]) == 0
    assert top_regret([10, 8, 12, 9], [5, 6, 7, 4], 3) == 0
    assert top_regret([10, 8, 12, 9], [5, 7, 6, 4], 3) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"attention": "flash2"}, 2),  # somebody who chooses a layout has the kernels that there are
        ({"fused_norm": False}, 2),
        ({"precision": "bf16"}, 2),
        ({"global_batch": 64}, 2),
        ({"sequence_parallel": True}, 1),
        ({"recompute": "full"}, 1),
        ({"shard": "optimizer"}, 1),
        ({"micro_batch": 2}, 1),
    ],
)
def test_kernels_make_a_group_and_what_is_chosen_with_the_layout_does_not(changes, groups):
    others = outcomes((100, 1), (100, 2), run=replace(ROW.run, **changes))
    part = measure([*outcomes((10, 5), (8, 6)), *others])
    assert part.groups == groups
    assert part.mean_top1_regret == pytest.approx(0.125 if groups == 2 else 11.5)


def test_a_ranking_reports_what_was_first_what_was_fastest_and_what_did_not_run():
    timed = outcomes((10, 5), (8, 6))
    out = Outcome(replace(ROW, is_ok=False, step_time_s=None), 4.0, 1e9, fits=True)
    (ranking,) = rankings([*timed, out])
    assert (ranking.layouts, ranking.first.step_time_s, ranking.fastest.step_time_s) == (2, 10, 8)
    assert ranking.is_first_oom
    assert measure([*timed, out]).oom_first == 1
    for other in (replace(out, fits=False), replace(out, step_time_s=5.5)):
        assert measure([*timed, other]).oom_first == 0
    assert rankings(timed[:1]) == []


def test_groups_are_not_mixed():
    other = outcomes((100, 1), (100, 2), set_name="other")
    part = measure([*outcomes((10, 5), (8, 6)), *other])
    assert part.mean_top1_regret == pytest.approx(0.125)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=3, max_size=12))
def test_rank_correlation_is_that_of_the_ranks_by_counting(pairs):
    first, second = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))

    def ranks(values):
        return [sum(o < v for o in values) + (sum(o == v for o in values) + 1) / 2 for v in values]

    got = rank_correlation(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert got is None
    else:
        one, two = (np.array(ranks(list(side))) for side in (first, second))
        one, two = one - one.mean(), two - two.mean()
        assert got == pytest.approx((one * two).sum() / np.sqrt((one**2).sum() * (two**2).sum()))


def test_agreement_counts_what_fits_and_what_does_not():
    fits, fails = outcomes((10, 10), (10, 10))
    out = Outcome(replace(ROW, is_ok=False, step_time_s=None), 1.0, 1e12, fits=False)
    assert measure([fits, out]).oom_agreement == 1
    assert measure([fits, replace(fails, fits=False), out, replace(out, fits=True)]).oom_agreement == 0.5
    assert measure([out]).mean_abs_error is None


def test_nothing_measured_gives_no_numbers():
    assert measure([]).oom_agreement is None
