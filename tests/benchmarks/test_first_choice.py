"""The regret of a plan's first row among measured layouts, and the order that chooses it."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from first_choice import Measured, mean_regret, measured_groups
from pipeloom.accuracy.compare import Outcome
from pipeloom.accuracy.rows import read_rows
from pipeloom.planner.choice import SIMPLER
from pipeloom.planner.question import HEADROOM

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]
MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured.csv"


def outcome(measured_s, predicted_s, filled=0.5, **run):
    return Outcome(replace(ROW, step_time_s=measured_s, run=replace(ROW.run, **run)), predicted_s, 1e9, filled)


def test_the_regret_is_that_of_the_layout_that_leaves_the_headroom():
    group = Measured(ROW.group, [[outcome(10, 10, 0.95)], [outcome(12, 11, 0.9)], [outcome(11, 12, 0.5)]], tie=0.0)
    assert group.regret(0.0, 0.0) == 0
    assert group.regret(0.08, 0.0) == pytest.approx(0.2)
    assert group.regret(0.2, 0.0) == pytest.approx(0.1)
    assert group.regret(0.08, 0.0, of_fitting=True) == pytest.approx(1 / 11)
    assert group.regret(0.6, 0.0) is None
    assert isnan(mean_regret([group], 0.6, 0.0))


def test_a_simpler_layout_is_chosen_within_the_margin_alone():
    wide = {"tp": 2, "pp": 4, "dp": 2}
    group = Measured(ROW.group, [[outcome(10, 10.0, **wide)], [outcome(11, 10.2, tp=1, pp=1, dp=16)]], tie=0.05)
    assert group.regret(0.0, 0.01) == 0
    assert group.regret(0.0, 0.03) == pytest.approx(0.1)
    assert group.regret(0.0, None) == pytest.approx(0.1)


def test_rows_of_one_layout_count_with_their_mean():
    other = outcome(11, 9, tp=1, pp=1, dp=16)
    group = Measured(ROW.group, [[outcome(9, 10), outcome(11, 10)], [other]], tie=0.0)
    assert group.regret(0.0, 0.0) == pytest.approx(0.1)


def test_a_group_has_several_layouts_not_several_rows_of_one(tmp_path):
    head, first, *_ = (Path(__file__).parents[2] / "examples" / "measured.csv").read_text().splitlines()
    table = tmp_path / "measured.csv"
    table.write_text("\n".join([head, first, first]))
    assert list(measured_groups([table])) == []
    table.write_text("\n".join([head, first, first, first.replace(",none,16,512,", ",none,8,512,")]))
    (found,) = measured_groups([table])
    assert [len(rows) for rows in found.layouts] == [2, 1]


@pytest.mark.skipif(not MEASURED.exists(), reason="the published measurements are not here")
def test_the_first_row_is_within_a_percent_of_the_fastest_in_the_sets_of_calibrated_programs():
    groups = list(measured_groups([MEASURED], ("layouts-", "zero-bubble-")))
    assert len(groups) == 30
    assert mean_regret(groups, HEADROOM, SIMPLER) <= 0.01
