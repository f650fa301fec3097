"""Of the layouts that somebody measured, the one whose step is simulated fastest is nearly the fastest."""

from collections import defaultdict
from pathlib import Path

import pytest

from pipeloom.accuracy.compare import cluster_of, program_of
from pipeloom.accuracy.measures import top1_regret
from pipeloom.accuracy.rows import read_rows
from pipeloom.families import Choice
from pipeloom.predict.fast import FAMILY_OF
from pipeloom.predict.step import Order, simulate_step

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured.csv"


def simulated_s(row):
    run, (_, software) = row.run, program_of(row)
    family = FAMILY_OF[run.schedule] if run.pp > 1 else "gpipe"
    choice = Choice(family=family, pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)
    return simulate_step(run, cluster_of(row, software), software, Order(choice=choice)).prediction.step_time_s


@pytest.mark.skipif(not MEASURED.exists(), reason="the published measurements are not here")
@pytest.mark.parametrize(
    ("begin", "most_devices", "num_groups", "target"), [("layouts-", 128, 11, 0.01), ("nanotron-", 16, 2, 0.03)]
)
def test_mean_regret_of_what_is_simulated_fastest(begin, most_devices, num_groups, target):
    groups = defaultdict(list)
    for row in read_rows(MEASURED):
        if row.set_name.startswith(begin) and row.step_time_s is not None and row.run.num_devices <= most_devices:
            groups[row.group].append((row.step_time_s, simulated_s(row)))
    regrets = [top1_regret(*zip(*pairs, strict=True)) for pairs in groups.values() if len(pairs) > 1]
    assert len(regrets) == num_groups
    assert sum(regrets) / num_groups <= target
