"""Baselines are exact where their assumption holds."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.accuracy.baselines import constant_mfu, log_linear, mean_error
from pipeloom.accuracy.rows import read_rows
from pipeloom.cost.flops import shape_model_flops

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]


def rows(took_s):
    runs = [
        replace(ROW.run, dp=dp, tp=tp, pp=1, loops=1, global_batch=64 * batch)
        for dp in (1, 2, 4)
        for tp in (1, 2)
        for batch in (1, 2)
    ]
    return [replace(ROW, run=run, step_time_s=took_s(run)) for run in runs]


def test_a_constant_utilization_is_found():
    measured = rows(lambda run: 2e-14 * run.global_batch * shape_model_flops(run.shape, run.seq) / run.num_devices)
    found = constant_mfu(measured[:6], lambda row: 1e14)
    assert mean_error(measured, found) == pytest.approx(0, abs=1e-9)
    assert found(measured[0]) == pytest.approx(measured[0].step_time_s)


def test_a_product_of_powers_is_found_and_what_does_not_vary_counts_nothing():
    measured = rows(lambda run: run.global_batch / run.dp**0.9 / run.tp**0.8)
    found = log_linear(measured)
    assert mean_error(measured, found) < 0.01
    assert found(replace(measured[0], run=replace(measured[0].run, seq=measured[0].run.seq * 2))) == pytest.approx(
        found(measured[0])
    )
