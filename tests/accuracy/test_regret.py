"""Of the layouts that somebody measured, the one whose step is predicted fastest is nearly the fastest."""

from pathlib import Path
from statistics import fmean

import pytest

from pipeloom.accuracy.compare import compare, rankings
from pipeloom.accuracy.rows import read_rows

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured.csv"


@pytest.mark.skipif(not MEASURED.exists(), reason="the published measurements are not here")
@pytest.mark.parametrize(
    ("begin", "most_devices", "num_groups", "target"), [("layouts-", 128, 11, 0.01), ("nanotron-", 16, 2, 0.03)]
)
def test_mean_regret_of_what_is_predicted_fastest(begin, most_devices, num_groups, target):
    rows = [
        row for row in read_rows(MEASURED) if row.set_name.startswith(begin) and row.run.num_devices <= most_devices
    ]
    regrets = [ranking.regret for ranking in rankings(compare(rows).outcomes)]
    assert len(regrets) == num_groups
    assert fmean(regrets) <= target
