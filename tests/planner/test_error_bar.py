"""What a plan states of its own accuracy: from measurements, or that there are none."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software, names
from pipeloom.catalog.accuracy import Accuracy, Errors, load_accuracy
from pipeloom.planner.error_bar import error_bar
from pipeloom.workload.run import Run

A100, V100 = load_cluster("dgx-a100"), load_cluster("dgx-1-v100")
CALIBRATED, OWN = load_software("zero-bubble"), load_software("pipeloom")
FEW = Errors(
    rows=3, mean_abs_error=0.05, p90_abs_error=0.08, bias=-0.02, groups=1, pairs=30, pair_error=0.03, order_below=0.5,
    order_above=1.0, median_regret=0.01, worst_regret=34.2, features=("dp", "tp"), longest=2048,
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
    assert "differ by less than 3.0%, either may be faster. Of 30 pairs" in comparison
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
    assert "measured steps of 2 programs on a100-sxm-80gb" in bar.rests_on
    assert f"since no step of {program.name} there was held out of a calibration" in bar.rests_on
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
    assert "17.5% off in the median of programs and devices, and 31.0% in the worst case measured" in bar.rests_on
    assert "(vtrain-single on a100-sxm-80gb" in bar.rests_on
    values = bar.to_json()
    assert values.pop("rests_on") == bar.rests_on
    assert values.pop("tie") == 0.31  # no pairs were measured elsewhere
    assert values.pop("unlike") == []
    assert bar.cell == "?"
    assert set(values.values()) == {None}
    assert set(values) == set(error_bar(A100, program, KNOWN).to_json()) - {"rests_on", "tie", "unlike"}


def test_the_catalog_has_every_calibrated_program():
    known = load_accuracy()
    calibrated = [load_software(name) for name in names("software") if load_software(name).sets]
    # A program without held-out rows has the error of the general program; others may have rows on several devices.
    assert {name for name, _ in known.by_program} <= {program.name for program in calibrated}
    assert set(known.by_device) == set(known.general_of) >= {device for _, device in known.by_program}
    for errors in [*known.by_program.values(), *known.by_device.values()]:
        assert 0 < errors.mean_abs_error <= errors.p90_abs_error < 1
        assert abs(errors.bias) <= errors.mean_abs_error
        assert (errors.pairs > 0) == (errors.pair_error is not None)
        assert set(errors.features) <= {"tp", "cp", "dp", "pp", "ep", "experts", "fp8"}
        assert errors.longest >= 1024
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
    # Errors are fractions of measured step times: a prediction 5 % too short is a step of 1 / 0.95 times.
    assert "and 950 tokens/s and 47.5% if it is 5.0% too short" in sentence
    assert error_bar(V100, CALIBRATED, KNOWN).on_speed(1000.0, 0.5) is None


RUN = Run(
    shape=load_model("llama-3-8b"), seq=2048, global_batch=64, micro_batch=1, dp=4, tp=2, pp=1, shard="none",
    recompute="none", sequence_parallel=True, attention="flash2", fused_norm=True,
)  # fmt: skip


def test_layouts_like_the_measured_ones_have_their_tie():
    bar = error_bar(A100, CALIBRATED, KNOWN)
    assert bar.of(RUN, replace(RUN, tp=1)) is bar
    assert bar.cell == "5%"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pp": 4}, "pipeline ranks"),
        ({"shape": load_model("mixtral-8x7b")}, "experts"),
        ({"products": "fp8"}, "products in fp8"),
        ({"seq": 8192}, "8,192 tokens in a sequence (at most 2,048)"),
        ({"pp": 4, "cp": 2}, "context ranks or pipeline ranks"),
    ],
)
def test_layouts_with_what_no_measured_one_has_are_named_and_tie_more_widely(change, words):
    bar = error_bar(A100, CALIBRATED, KNOWN).of(RUN, replace(RUN, **change))
    assert bar.tie == 0.25  # that of general efficiencies there
    assert bar.cell == "5%?"
    step, comparison = bar.sentences
    assert step.startswith(f"No measured step has {words}, so the error here may be larger. Step times: the average")
    assert "none of such layouts were measured, so 25.0%" in comparison
    assert bar.to_json()["unlike"] == words.split(" or ")


def test_few_pairs_do_not_decide_a_tie():
    few = replace(KNOWN, by_program={("zero-bubble", "a100-sxm-80gb"): replace(FEW, pairs=7)})
    bar = error_bar(A100, CALIBRATED, few)
    assert bar.tie == 0.05
    assert "only 7 pairs of layouts measured, so 5.0%" in bar.sentences[1]
