"""Rows that are lengthened in their steady state are those that the clock makes of the longer step."""

import random

import numpy as np
import pytest

from pipeloom.families.greedy import Task, Way
from pipeloom.families.steady import lengthened
from pipeloom.schedule import Placement

WAYS = [
    *(Way(family=family, patience=patience) for family in ("1f1b", "zb-v") for patience in (0.0, 1.0)),
    *(Way(rule=rule, patience=1.0) for rule in ((0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 1, 2))),
]


def task(draw, num_microbatches, *, is_v):
    pp = 4
    placement = Placement.v(pp, 2) if is_v else Placement.looped(pp, 1)
    stages = placement.num_stages
    forward, first = draw.randint(25, 38), draw.randint(28, 40)
    return Task(
        placement=placement,
        num_microbatches=num_microbatches,
        forward_s=[forward] * stages,
        input_s=[first] * stages,
        weight_s=[100 - forward - first] * stages,
        boundary_s=[draw.choice((0, 1, 4, 8))] * (stages - 1),
        budgets=[float(stages)] * pp,
        pending=[draw.choice((0.4, 0.7, 1.0))] * stages,
    )


@pytest.mark.parametrize("is_v", [False, True])
def test_lengthened_rows_are_those_of_the_clock(is_v):
    seen = {"steady": 0, "other": 0}
    for seed in range(12):
        long, short = (task(random.Random(seed), count, is_v=is_v) for count in (31, 16))
        for way in WAYS:
            timed, expected = way._clocked(short), way._clocked(long)
            found = None if timed is None else lengthened(timed, 31 - 16)
            if found is None:
                seen["other"] += 1
                continue
            seen["steady"] += 1
            assert expected is not None
            for row, starts, own, own_starts in zip(
                found.rows, found.starts, expected.rows, expected.starts, strict=True
            ):
                assert all(map(np.array_equal, row.arrays, own.arrays))
                assert starts == pytest.approx(own_starts, rel=1e-12)
    assert min(seen.values()) > 5


def test_a_step_that_is_too_short_is_not_lengthened():
    timed = Way(family="1f1b")._clocked(task(random.Random(0), 2, is_v=False))
    assert timed is not None
    assert lengthened(timed, 5) is None
