"""The table of step times with experts has the range of each, and counts the rounds within the error."""

from types import SimpleNamespace

from experts_step import LAYOUTS, row_of


def test_a_row_has_ranges_and_counts_the_rounds_within_the_error():
    rounds = [
        SimpleNamespace(predicted_step_time_s=predicted, step_time_s=measured)
        for predicted, measured in ((0.1, 0.11), (0.1, 0.12), (0.2, 0.16))
    ]
    sizes = [str(size) for size in (LAYOUTS[0].ep, LAYOUTS[0].pp, LAYOUTS[0].dp)]
    assert row_of(LAYOUTS[0], rounds) == [*sizes, "100 to 200", "110 to 160", "1.10 (0.80 to 1.20)", "1 of 3"]
    assert {layout.ep for layout in LAYOUTS} == {2, 4}
