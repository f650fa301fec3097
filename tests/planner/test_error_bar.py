"""What a plan says of its own accuracy: from measurements, or that there are none."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_software, names
from pipeloom.catalog.accuracy import Accuracy, Errors, load_accuracy
from pipeloom.planner.error_bar import error_bar

A100, V100 = load_cluster("dgx-a100"), load_cluster("dgx-1-v100")
CALIBRATED, OWN = load_software("zero-bubble"), load_software("pipeloom")
FEW = Errors(
    rows=3, mean_abs_error=0.05, p90_abs_error=0.08, bias=-0.02, groups=1, median_regret=0.01, worst_regret=34.2
)
MANY = replace(FEW, rows=90, mean_abs_error=0.25, groups=0, median_regret=None, worst_regret=None)
KNOWN = Accuracy(
    table="mine.csv",
    date="2026-01-02",
    by_program={("zero-bubble", "a100-sxm-80gb"): FEW},
    by_device={"a100-sxm-80gb": MANY},
    general_of={"a100-sxm-80gb": {"zero-bubble": 0.04, "vtrain-single": 0.31}},
)


def test_a_calibrated_program_has_its_error_on_held_out_rows():
    bar = error_bar(A100, CALIBRATED, KNOWN)
    assert bar.errors == FEW
    assert bar.rests_on.startswith("3 measured steps of zero-bubble on a100-sxm-80gb, held out of the calibration")
    assert "mine.csv, 2026-01-02" in bar.rests_on
    assert bar.text.startswith(
        "the average error of predicted step times is 5.0%, 90% of them are within 8.0% (on average 2.0% too short)"
    )
    assert "the layout that was predicted fastest took 1.0% longer than the fastest in the median" in bar.text
    assert bar.tie == 0.05
    assert bar.is_tie(1.0, 1.049)
    assert not bar.is_tie(1.0, 0.94)


@pytest.mark.parametrize(
    "program",
    [OWN, replace(CALIBRATED, efficiency=OWN.efficiency), replace(CALIBRATED, name="mine")],
    ids=["uncalibrated", "own efficiencies", "own name"],
)
def test_any_other_program_has_the_error_of_general_efficiencies_on_the_device(program):
    bar = error_bar(A100, program, KNOWN)
    assert bar.errors == MANY
    assert f"{program.name} has not been calibrated on a100-sxm-80gb" in bar.rests_on
    assert "4.0% for zero-bubble to 31.0% for vtrain-single" in bar.rests_on
    assert "predicted fastest" not in bar.text


@pytest.mark.parametrize("program", [CALIBRATED, OWN])
def test_a_device_that_nobody_measured_has_no_figures_and_says_so(program):
    bar = error_bar(V100, program, KNOWN)
    assert bar.errors is None
    assert bar.text == bar.rests_on
    assert bar.rests_on.startswith("no prediction for v100-sxm-32gb was compared with a measured step")
    assert "31.0% off on average in the worst case measured (vtrain-single on a100-sxm-80gb" in bar.rests_on
    values = bar.to_json()
    assert values.pop("rests_on") == bar.rests_on
    assert values.pop("tie") == 0.31  # the largest error of another device
    assert set(values.values()) == {None}
    assert set(values) == set(error_bar(A100, program, KNOWN).to_json()) - {"rests_on", "tie"}


def test_the_catalog_knows_every_program_that_was_calibrated():
    known = load_accuracy()
    calibrated = [load_software(name) for name in names("software") if load_software(name).sets]
    expected = {(program.name, load_cluster(program.cluster).device.name) for program in calibrated}
    assert set(known.by_program) == expected
    assert set(known.by_device) == {device for _, device in expected} == set(known.general_of)
    for errors in [*known.by_program.values(), *known.by_device.values()]:
        assert 0 < errors.mean_abs_error <= errors.p90_abs_error < 1
        assert abs(errors.bias) <= errors.mean_abs_error
        assert errors.rows > 1
