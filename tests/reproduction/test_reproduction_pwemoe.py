"""docs/reproduction/pwemoe.md: its tables are the data file, and its sentences hold."""

from statistics import fmean

from reproduction import pwemoe
from reproduction.pwemoe import ARITHMETIC, CASES, FEED_FORWARD, FROM_CONSTANTS, FROM_PREFERENCE, INTERPOLATED
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
    above = [pwemoe.volume(ROWS, steps, FROM_PREFERENCE) - pwemoe.volume(ROWS, steps, INTERPOLATED) for steps in CASES]
    assert [round(one, 3) for one in above] == [0.017, 0.032]
    assert {row["numbers"] for row in ROWS if row["method"] == FROM_PREFERENCE} == {"220"}
    lower = [
        1 - pwemoe.middle(ROWS, steps, FROM_PREFERENCE) / pwemoe.middle(ROWS, steps, INTERPOLATED) for steps in CASES
    ]
    assert [round(100 * one) for one in lower] == [6, 16]
    far = CASES[-1]
    ends = pwemoe.points(ROWS, far, INTERPOLATED)
    assert f"{pwemoe.middle(ROWS, far, INTERPOLATED):.3f}" == "1.916"
    assert f"{fmean((*ends[0.0], *ends[1.0])):.3f}" == "1.771"
    for steps in CASES:
        volumes = {method: pwemoe.volume(ROWS, steps, method) for method in pwemoe.METHODS}
        assert volumes[FROM_PREFERENCE] == max(volumes.values())
        assert max(volumes[FEED_FORWARD], volumes[FROM_CONSTANTS]) < volumes[INTERPOLATED]
        means = {method: pwemoe.middle(ROWS, steps, method) for method in pwemoe.METHODS}
        assert means[FROM_CONSTANTS] == min(means.values())
        assert abs(means[ARITHMETIC] - means[INTERPOLATED]) < 0.011
        ends = pwemoe.points(ROWS, steps, INTERPOLATED), pwemoe.points(ROWS, steps, FROM_PREFERENCE)
        assert 0 < ends[1][1.0][0] - ends[0][1.0][0] < 0.2
        assert 0 < ends[1][0.0][1] - ends[0][0.0][1] < 0.2
    assert f"{pwemoe.middle(ROWS, far, FROM_CONSTANTS):.3f}" == "1.589"
