"""docs/reproduction/pwemoe.md: its tables are the data file, and its sentences hold."""

from itertools import product
from statistics import fmean

from reproduction import pwemoe
from reproduction.pwemoe import ARITHMETIC, CASES, FEED_FORWARD, FROM_CONSTANTS, FROM_PREFERENCE, INTERPOLATED, SEEDS
from reproduction.tables import fill, read_rows

ROWS = read_rows(pwemoe.NAME)
PAGE = pwemoe.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_the_rows():
    assert fill(PAGE, pwemoe.blocks(ROWS)) == PAGE


def test_a_hypervolume_is_an_area():
    square = [(0.0, 0.0)]
    assert pwemoe.hypervolume(square, (2.0, 3.0)) == 6.0
    assert pwemoe.hypervolume([(1.0, 2.0), (2.0, 1.0)], (3.0, 3.0)) == 3.0
    assert pwemoe.hypervolume([*square, (1.0, 1.0)], (2.0, 3.0)) == 6.0
    assert pwemoe.hypervolume([(4.0, 0.0)], (2.0, 3.0)) == 0.0


def test_the_sentences_hold():
    gains = {steps: [round(one, 3) for one in pwemoe.gains(ROWS, steps)] for steps in CASES}
    near, far = CASES
    assert (min(gains[near]), max(gains[near])) == (0.016, 0.024)
    assert (min(gains[far]), max(gains[far])) == (0.022, 0.046)
    assert [one > 0.02 for one in gains[near]].count(True) == 1
    assert {row["numbers"] for row in ROWS if row["method"] == FROM_PREFERENCE} == {"220"}
    lower = {
        steps: [
            round(
                100
                - 100
                * pwemoe.middle(ROWS, steps, FROM_PREFERENCE, seed)
                / pwemoe.middle(ROWS, steps, INTERPOLATED, seed)
            )
            for seed in SEEDS
        ]
        for steps in CASES
    }
    assert (min(lower[near]), max(lower[near])) == (4, 5)
    assert (min(lower[far]), max(lower[far])) == (13, 17)
    ends = pwemoe.points(ROWS, far, INTERPOLATED)
    assert f"{pwemoe.middle(ROWS, far, INTERPOLATED):.3f}" == "1.897"
    assert f"{fmean((*ends[0.0], *ends[1.0])):.3f}" == "1.755"
    for steps in CASES:
        volumes = {method: pwemoe.volume(ROWS, steps, method) for method in pwemoe.METHODS}
        assert volumes[FROM_PREFERENCE] == max(volumes.values())
        assert max(volumes[FEED_FORWARD], volumes[FROM_CONSTANTS]) < volumes[INTERPOLATED]
        means = {method: pwemoe.middle(ROWS, steps, method) for method in pwemoe.METHODS}
        assert means[FROM_CONSTANTS] - min(means.values()) <= (0.002 if steps == near else 0)
        assert abs(means[ARITHMETIC] - means[INTERPOLATED]) < 0.011
    assert f"{pwemoe.middle(ROWS, far, FROM_CONSTANTS):.3f}" == "1.593"


def test_a_preference_for_one_model_alone_is_that_model():
    for steps, seed, alone in product(CASES, SEEDS, (0.0, 1.0)):
        ends = (pwemoe.points(ROWS, steps, method, seed)[alone] for method in (FROM_PREFERENCE, INTERPOLATED))
        assert next(ends) == next(ends)
