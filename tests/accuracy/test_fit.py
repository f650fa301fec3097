"""Calibration finds the efficiencies that made the rows."""

import tomllib
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from pipeloom.accuracy.compare import compare, measure
from pipeloom.accuracy.fit import DRAG_S, RANGES, first_guess, fit, to_toml, write
from pipeloom.accuracy.rows import read_rows
from pipeloom.accuracy.schedules import predict
from pipeloom.catalog import load_cluster, load_software, source_of
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Efficiency
from pipeloom.errors import UserError

ROWS = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")
CLUSTER = load_cluster("dgx-a100")
PROGRAM = load_software("megatron-2021")


def table_of(program):
    """The example's rows as the program would run them, with several micro-batches: enough to outweigh the pull."""
    sizes = (1, 2, 4, 8, 16)
    rows = [replace(row, run=replace(row.run, micro_batch=size, global_batch=512)) for row in ROWS for size in sizes]
    return [
        replace(row, step_time_s=predict(Placed(row.run, CLUSTER, program), row.schedule).prediction.step_time_s)
        for row in rows
    ]


def test_a_fit_recovers_given_efficiencies(tmp_path):
    pytest.importorskip("scipy")
    true = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.7, tensor_bus=0.45))
    result = fit(table_of(true), CLUSTER, PROGRAM, ["matmul", "tensor_bus"])
    assert result.software.efficiency.matmul == pytest.approx(0.7, rel=0.03)
    assert result.software.efficiency.tensor_bus == pytest.approx(0.45, rel=0.06)
    assert result.error_after < 0.01 < result.error_before
    file = tmp_path / "program.toml"
    write(result, file, "table.csv", "a test")
    again = load_software(str(file))
    assert again.efficiency.matmul == pytest.approx(result.software.efficiency.matmul, rel=1e-3)
    assert replace(again, efficiency=PROGRAM.efficiency) == PROGRAM
    assert source_of("software", str(file)) == "a test"


def test_the_file_states_the_source_of_its_values(tmp_path):
    pytest.importorskip("scipy")
    result = fit(ROWS, CLUSTER, PROGRAM, ["matmul"])
    told = tomllib.loads(to_toml(result, "table.csv"))["provenance"]
    assert told["by"] == "pipeloom validate --fit"
    assert (told["table"], told["cluster"], told["rows"]) == ("table.csv", "dgx-a100", 6)
    assert told["sets"] == ["korthikanti-2205.05198-table5", "megatron-2104.04473-table1"]
    assert "gpt-22b" in told["models"]
    assert told["date"] == str(date.today())
    assert told["mean_abs_error_before"] == pytest.approx(result.error_before, rel=1e-3)
    assert told["mean_abs_error_after"] == pytest.approx(result.error_after, rel=1e-3)
    start = f"{PROGRAM.efficiency.matmul:.4g}, {RANGES['matmul'][0]} to {RANGES['matmul'][1]}"
    assert told["start_and_bounds"] == {"matmul": start}


def test_a_program_fitted_on_some_models_predicts_the_others():
    pytest.importorskip("scipy")
    true = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.75, memory=0.6, tensor_bus=0.5))
    small, large = (
        [row for row in table_of(true) if (row.run.shape.hidden < 5000) is is_small] for is_small in (True, False)
    )
    result = fit(small, CLUSTER, first_guess(PROGRAM))
    before, after = (
        measure(compare(large, CLUSTER, program).outcomes).mean_abs_error
        for program in (first_guess(PROGRAM), result.software)
    )
    assert after < 0.05
    assert after < before / 3


def test_a_first_guess_keeps_the_facts_and_forgets_the_efficiencies():
    nanotron = load_software("nanotron")
    guess = first_guess(nanotron)
    assert replace(guess, efficiency=nanotron.efficiency) == nanotron
    assert guess.efficiency == Efficiency(drag_s=DRAG_S)
    assert first_guess(PROGRAM).efficiency == Efficiency()


def test_an_efficiency_at_its_bound_is_reported():
    pytest.importorskip("scipy")
    slow = [replace(row, step_time_s=row.step_time_s * 3) for row in table_of(PROGRAM)]
    assert fit(slow, CLUSTER, PROGRAM, ["matmul"]).at_bounds == ("matmul",)
    inside = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.8))
    assert fit(table_of(inside), CLUSTER, PROGRAM, ["matmul"]).at_bounds == ()


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(UserError, match="nothing to fit"):
        fit([replace(ROWS[0], is_ok=False)], CLUSTER, PROGRAM)
    with pytest.raises(UserError, match="cannot fit luck; known: matmul"):
        fit(ROWS, CLUSTER, PROGRAM, ["luck"])
