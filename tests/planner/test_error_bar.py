"""What a plan says of its own accuracy: from measurements, or that there are none."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_software, names
from pipeloom.catalog.accuracy import Accuracy, Errors, load_accuracy
from pipeloom.planner.error_bar import error_bar

A100, V100 = load_cluster("dgx-a100"), load_cluster("dgx-1-v100")
CALIBRATED, OWN = load_software("zero-bubble"), load_software("pipeloom")
FEW = Errors(
    rows=3, mean_abs_error=0.05, p90_abs_error=0.08, bias=-0.02, groups=1, pairs=3, pair_error=0.03, order_below=0.5,
    order_above=1.0, median_regret=0.01, worst_regret=34.2,
)  # fmt: skip
MANY = replace(
    FEW, rows=90, mean_abs_error=0.25, groups=0, pairs=0, pair_error=None, order_below=None, order_above=None,
    median_regret=None, worst_regret=None,
)  # fmt: skip
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
    step, comparison = bar.sentences
    assert "the average error is 5.0%, 90% of them are within 8.0% (on average 2.0% too short)" in step
    assert "differ by less than 3.0%, either may be faster. Of 3 pairs" in comparison
    assert "right for 50% of those that differed by less and 100% of those that differed by more" in comparison
    assert bar.tie == 0.03
    assert bar.is_tie(1.0, 1.029)
    assert not bar.is_tie(1.0, 0.96)


@pytest.mark.parametrize(
    "program",
    [OWN, replace(CALIBRATED, efficiency=OWN.efficiency), replace(CALIBRATED, name="mine")],
    ids=["uncalibrated", "own efficiencies", "own name"],
)
def test_any_other_program_has_the_error_of_general_efficiencies_on_the_device(program):
    bar = error_bar(A100, program, KNOWN)
    assert bar.errors == MANY
    assert "measured steps of 2 other programs on a100-sxm-80gb" in bar.rests_on
    assert f"since {program.name} has not been calibrated there" in bar.rests_on
    assert "4.0% for zero-bubble to 31.0% for vtrain-single" in bar.rests_on
    # No two layouts of one question were measured: the error of a step time takes the place of that of a comparison.
    assert bar.tie == 0.25
    assert bar.sentences[1] == "Comparisons: none were measured, so 25.0%, the error of a step time, is taken as a tie."


@pytest.mark.parametrize("program", [CALIBRATED, OWN])
def test_a_device_that_nobody_measured_has_no_figures_and_says_so(program):
    bar = error_bar(V100, program, KNOWN)
    assert bar.errors is None
    assert bar.sentences[0] == f"{bar.rests_on}."
    assert bar.rests_on.startswith("No prediction for v100-sxm-32gb was compared with a measured step")
    assert "31.0% off on average in the worst case measured (vtrain-single on a100-sxm-80gb" in bar.rests_on
    values = bar.to_json()
    assert values.pop("rests_on") == bar.rests_on
    assert values.pop("tie") == 0.25  # the largest of another device
    assert set(values.values()) == {None}
    assert set(values) == set(error_bar(A100, program, KNOWN).to_json()) - {"rests_on", "tie"}


def test_the_catalog_has_every_calibrated_program():
    known = load_accuracy()
    calibrated = [load_software(name) for name in names("software") if load_software(name).sets]
    expected = {(program.name, load_cluster(program.cluster).device.name) for program in calibrated}
    # A program without held-out rows has the error of the general program.
    assert set(known.by_program) <= expected
    assert set(known.by_device) == set(known.general_of) >= {device for _, device in known.by_program}
    for errors in [*known.by_program.values(), *known.by_device.values()]:
        assert 0 < errors.mean_abs_error <= errors.p90_abs_error < 1
        assert abs(errors.bias) <= errors.mean_abs_error
        assert (errors.pairs > 0) == (errors.pair_error is not None)
        if errors.pairs > 100:  # predictions that differ by more than the limit order layouts better than those below
            assert errors.order_below < errors.order_above <= 1
        assert errors.rows > 1


def test_the_speed_at_the_mean_error_is_slower_by_the_bias():
    sentence = error_bar(A100, CALIBRATED, KNOWN).on_speed(1000.0, 0.5)
    assert sentence is not None
    assert (
        "Row 1 has 980 tokens/s and an MFU of 49.0% if its step is as much too short as these are on average"
        in sentence
    )
    assert error_bar(V100, CALIBRATED, KNOWN).on_speed(1000.0, 0.5) is None
