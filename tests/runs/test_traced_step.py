"""The choice of the traced step."""

import pytest

from pipeloom.config import OutputConfig, RunConfig, TrainingConfig
from pipeloom.runs.traced_step import BEGINS, median_step, steps_before, traced_candidates


@pytest.mark.parametrize(
    ("first", "steps", "begun", "candidates"),
    [
        (10, 200, 0, [10, 11, 12, 13, 14]),
        (10, 200, 50, [60, 61, 62, 63, 64]),
        (10, 13, 0, [10, 11, 12]),  # of four steps that are left, three have one in the middle
        (10, 11, 0, [10]),
        (10, 3, 0, [3]),
        (10, 60, 55, [60]),
    ],
)
def test_candidates_are_an_odd_number_of_steps_of_the_run(first, steps, begun, candidates):
    config = RunConfig(training=TrainingConfig(steps=steps), output=OutputConfig(trace_step=first))
    assert list(traced_candidates(config, begun)) == candidates


def test_the_steps_of_a_run_with_its_layout_begin_at_the_last_step_that_is_marked():
    metrics = [{"step": 1, BEGINS: True}, {"step": 2}, {"step": 3, BEGINS: True}, {"step": 4}]
    assert [steps_before(metrics[:number]) for number in (0, 2, 3, 4)] == [None, 0, 2, 2]
    assert steps_before([{"step": 1}]) is None  # of an older version


def test_an_outlier_is_never_chosen():
    for slow in range(10, 15):
        times_s = {step: 0.1 + step / 1000 for step in range(1, 20)} | {slow: 9.0}
        chosen = median_step(range(10, 15), times_s)
        assert chosen != slow
        assert sorted(times_s[step] for step in range(10, 15))[2] == times_s[chosen]


def test_nothing_is_chosen_before_all_candidates_have_ended():
    assert median_step(range(3, 6), {3: 1.0, 4: 1.0}) is None
