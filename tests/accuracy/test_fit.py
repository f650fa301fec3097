"""Calibration finds the efficiencies that made the rows."""

import tomllib
from dataclasses import replace
from datetime import date
from math import log
from pathlib import Path

import pytest

from pipeloom.accuracy.compare import compare, measure
from pipeloom.accuracy.fit import DRAG_S, estimates, first_guess, fit, to_toml, write
from pipeloom.accuracy.prior import NAMES, RANGES, Estimate, Prior, pooled, shipped
from pipeloom.accuracy.rows import read_rows
from pipeloom.accuracy.schedules import predict
from pipeloom.catalog import load_cluster, load_software, source_of
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Efficiency
from pipeloom.errors import UserError

ROWS = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")
CLUSTER = load_cluster("dgx-a100")
PROGRAM = load_software("megatron-2021")
PRIOR = Prior()


def table_of(program, sizes=(1, 2, 4, 8, 16)):
    """The example's rows as the program would run them, with several micro-batches: enough to outweigh the pull."""
    rows = [replace(row, run=replace(row.run, micro_batch=size, global_batch=512)) for row in ROWS for size in sizes]
    return [
        replace(row, step_time_s=predict(Placed(row.run, CLUSTER, program), row.schedule).prediction.step_time_s)
        for row in rows
    ]


def test_a_fit_recovers_given_efficiencies(tmp_path):
    pytest.importorskip("scipy")
    true = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.7, tensor_bus=0.45))
    result = fit(table_of(true), CLUSTER, PROGRAM, ["matmul", "tensor_bus"], prior=PRIOR)
    assert result.software.efficiency.matmul == pytest.approx(0.7, rel=0.03)
    assert result.software.efficiency.tensor_bus == pytest.approx(0.45, rel=0.06)
    assert result.error_after < 0.01 < result.error_before
    file = tmp_path / "program.toml"
    write(result, file, "table.csv", "a test")
    again = load_software(str(file))
    assert again.efficiency.matmul == pytest.approx(result.software.efficiency.matmul, rel=1e-3)
    assert replace(again, efficiency=PROGRAM.efficiency) == PROGRAM
    assert source_of("software", str(file)) == "a test"


def test_without_a_cluster_each_row_has_that_of_its_device():
    pytest.importorskip("scipy")
    true = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.7))
    rows = [replace(row, device=device) for row in ROWS for device in ("a100-sxm-80gb", "h100-sxm-80gb")]
    outcomes = compare(rows, None, true).outcomes
    measured = [replace(outcome.row, step_time_s=outcome.step_time_s) for outcome in outcomes]
    result = fit(measured, None, PROGRAM, ["matmul"], prior=PRIOR)
    assert result.software.efficiency.matmul == pytest.approx(0.7, rel=0.05)
    assert result.error_after < 0.03
    assert fit(measured, CLUSTER, PROGRAM, ["matmul"], prior=PRIOR).error_after > 0.2


def test_the_file_states_the_source_of_its_values(tmp_path):
    pytest.importorskip("scipy")
    result = fit(ROWS, CLUSTER, PROGRAM, ["matmul"], prior=PRIOR)
    provenance = tomllib.loads(to_toml(result, "table.csv"))["provenance"]
    assert provenance["by"] == "pipeloom validate --fit"
    assert (provenance["table"], provenance["cluster"], provenance["rows"]) == ("table.csv", "dgx-a100", 6)
    assert provenance["sets"] == ["korthikanti-2205.05198-table5", "megatron-2104.04473-table1"]
    assert "gpt-22b" in provenance["models"]
    assert provenance["date"] == str(date.today())
    assert provenance["mean_abs_error_before"] == pytest.approx(result.error_before, rel=1e-3)
    assert provenance["mean_abs_error_after"] == pytest.approx(result.error_after, rel=1e-3)
    start = f"{PROGRAM.efficiency.matmul:.4g}, {RANGES['matmul'][0]} to {RANGES['matmul'][1]}"
    assert provenance["start_and_bounds"] == {"matmul": start}


def test_a_program_fitted_on_some_models_predicts_the_others():
    pytest.importorskip("scipy")
    true = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.75, memory=0.6, tensor_bus=0.5))
    small, large = (
        [row for row in table_of(true, (1, 4, 16)) if (row.run.shape.hidden < 5000) is is_small]
        for is_small in (True, False)
    )
    result = fit(small, CLUSTER, first_guess(PROGRAM, PRIOR), prior=PRIOR)
    before, after = (
        measure(compare(large, CLUSTER, program).outcomes).mean_abs_error
        for program in (first_guess(PROGRAM, PRIOR), result.software)
    )
    assert after < 0.05
    assert after < before / 3


def test_a_first_guess_keeps_the_facts_and_forgets_the_efficiencies():
    nanotron = load_software("nanotron")
    guess = first_guess(nanotron, PRIOR)
    assert replace(guess, efficiency=nanotron.efficiency) == nanotron
    assert guess.efficiency == Efficiency(drag_s=DRAG_S)
    assert first_guess(PROGRAM, PRIOR).efficiency == Efficiency()


@pytest.mark.long
def test_an_efficiency_at_its_bound_is_reported():
    pytest.importorskip("scipy")
    slow = [replace(row, step_time_s=row.step_time_s * 3) for row in table_of(PROGRAM)]
    assert fit(slow, CLUSTER, PROGRAM, ["matmul"], prior=PRIOR).at_bounds == ("matmul",)
    inside = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.8))
    assert fit(table_of(inside), CLUSTER, PROGRAM, ["matmul"], prior=PRIOR).at_bounds == ()


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(UserError, match="nothing to fit"):
        fit([replace(ROWS[0], is_ok=False)], CLUSTER, PROGRAM, prior=PRIOR)
    with pytest.raises(UserError, match="cannot fit luck; known: matmul"):
        fit(ROWS, CLUSTER, PROGRAM, ["luck"], prior=PRIOR)


def test_what_the_rows_do_not_determine_keeps_the_general_value():
    pytest.importorskip("scipy")
    true = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.7))
    prior = replace(PRIOR, center=replace(PROGRAM.efficiency, step_s=2e-3))
    start = first_guess(PROGRAM, prior)
    result = fit(table_of(true)[:5], CLUSTER, start, ["matmul", "step_s"], prior=prior)
    assert result.software.efficiency.step_s == pytest.approx(2e-3, rel=0.02)
    assert result.software.efficiency.matmul == pytest.approx(0.7, rel=0.05)
    assert result.variances["step_s"] > 0.9 * prior.width("step_s") ** 2
    assert result.variances["matmul"] < 0.3 * prior.width("matmul") ** 2


@pytest.mark.long
def test_a_narrow_prior_outweighs_few_rows_and_many_rows_outweigh_it():
    pytest.importorskip("scipy")
    slow = table_of(replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, matmul=0.6)))
    narrow = Prior(PROGRAM.efficiency, {"matmul": 0.05})
    few, many = (fit(rows, CLUSTER, PROGRAM, ["matmul"], prior=narrow) for rows in (slow[:1], slow))
    changes = [log(result.software.efficiency.matmul / PROGRAM.efficiency.matmul) for result in (few, many)]
    assert changes[1] < changes[0] / 2 < 0


def test_the_prior_is_the_median_of_the_programs_and_as_wide_as_they_differ():
    alike = [{"matmul": Estimate(0.7, 0.0001)}] * 8
    unlike = [{"matmul": Estimate(value, 0.0001)} for value in (0.6, 0.9) * 4]
    same, different = (pooled(programs, PRIOR) for programs in (alike, unlike))
    assert same.center.matmul == pytest.approx(0.7)
    assert different.center.matmul == pytest.approx(0.9)  # the first prior, above both, counts as one program
    assert same.width("matmul") < PRIOR.width("matmul")
    assert different.width("matmul") > 1.5 * same.width("matmul")
    assert same.center.launch == pytest.approx(PRIOR.center.launch)
    assert same.width("launch") == pytest.approx(PRIOR.width("launch"))


def test_one_program_that_is_unlike_all_others_does_not_move_the_prior():
    usual = [{"flash2": Estimate(value, 0.0001)} for value in (0.44, 0.45, 0.46, 0.47)]
    slow = {"flash2": Estimate(0.1, 0.0001)}
    assert pooled([*usual, slow], PRIOR).center.flash2 == pytest.approx(PRIOR.center.flash2, rel=0.03)


def test_what_no_program_determines_is_as_wide_as_before():
    unknown = [{"launch": Estimate(PRIOR.center.launch, PRIOR.width("launch") ** 2)}] * 8
    assert pooled(unknown, PRIOR).width("launch") == pytest.approx(PRIOR.width("launch"))


def test_a_fit_is_an_estimate_for_the_prior():
    pytest.importorskip("scipy")
    found = estimates(fit(ROWS, CLUSTER, PROGRAM, ["matmul", "launch"], prior=PRIOR))
    assert 0 < found["matmul"].variance < PRIOR.width("matmul") ** 2
    assert found["launch"].variance == pytest.approx(PRIOR.width("launch") ** 2, rel=0.05)


def test_the_prior_of_the_catalog_has_every_efficiency_inside_its_bounds():
    prior = shipped()
    assert set(prior.widths) == set(NAMES)
    for name in NAMES:
        assert RANGES[name][0] < getattr(prior.center, name) < RANGES[name][1]
