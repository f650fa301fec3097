"""Profiled seconds in notes beside those of the cost model."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.accuracy.rows import read_rows
from profiled import modeled, pairs, profiled

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]
NOTE = "profiled ms: T_F=18.5 T_B=18 T_W=9.5 T_comm=0.6; first and last stage hold one layer less"


def test_seconds_of_a_note():
    assert profiled(replace(ROW, note=NOTE)) == pytest.approx((0.0185, 0.018, 0.0095, 0.0006))
    assert profiled(replace(ROW, note="T_F=18.5 T_B=18")) is None


def test_both_are_means_over_the_rows_of_a_searched_schedule():
    run = replace(ROW.run, dp=1, tp=1, pp=4, micro_batch=1, global_batch=16)
    rows = [replace(ROW, run=run, schedule=name, note=NOTE) for name in ("1f1b", "zb-1p", "zb-2p")]
    rows[2] = replace(rows[2], note=NOTE.replace("18.5", "19.5"))
    ((model, (measured, ours)),) = pairs(rows).items()
    assert (model, measured.forward) == (run.shape.name, pytest.approx(0.019))
    assert ours == pytest.approx(modeled(rows[1]))
    assert ours.input + ours.weight == pytest.approx(2 * ours.forward, rel=0.5)
    assert ours.weight > 0
