"""``make plan-demo``: what it runs is what was simulated, and its figures are what they are called."""

from dataclasses import replace
from pathlib import Path

import pytest

import plan_demo
from pipeloom.planner.search import search
from pipeloom.training.schedules import training_schedule

QUESTION = plan_demo.question_of(Path("laptop"))
FOUND = plan_demo.layouts(QUESTION)


def test_the_space_has_every_axis_and_the_planners_first_choice_is_in_it():
    assert len(FOUND) >= 12
    axes = {(one.run.pp, one.run.tp, one.run.dp) for one in FOUND}
    assert axes == {(4, 1, 1), (2, 1, 2), (1, 1, 4), (2, 2, 1), (1, 2, 2)}
    best = search(QUESTION).best
    assert (best.run, best.knobs) in [(one.run, one.knobs) for one in FOUND]


@pytest.mark.parametrize("chosen", FOUND, ids=lambda chosen: " ".join(plan_demo.label(chosen)))
def test_what_runs_is_what_was_simulated(chosen, tmp_path):
    config = plan_demo.config_of(chosen.simulate(), tmp_path)
    assert config.layout.num_ranks == plan_demo.PROCESSES
    assert config.layout.batch_size == plan_demo.BATCH
    assert training_schedule(config) == chosen.simulate().schedule


def test_disturbed_steps_count_only_where_there_is_nothing_better():
    entry = plan_demo.OpenNode(FOUND[0].simulate())
    timed = [plan_demo.Timed(seconds, foreign) for seconds, foreign in ((9.0, 0.5), (1.0, 0.0), (2.0, 0.01))]
    entry.timed += timed
    assert not entry.is_enough
    assert entry.median_s == 2.0
    entry.timed += [plan_demo.Timed(3.0, 0.02), plan_demo.Timed(8.0, 0.9)]
    assert entry.is_enough
    assert entry.counted == [1.0, 2.0, 3.0]


def test_the_rank_correlation_of_the_same_order_is_one_and_of_its_reverse_minus_one():
    assert plan_demo.rank_correlation([1, 2, 5], [10, 20, 21]) == 1
    assert plan_demo.rank_correlation([1, 2, 5], [3, 2, 1]) == -1
    assert plan_demo.rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)


def test_a_busy_first_choice_is_reported_as_a_miss(capsys):
    entries = [plan_demo.OpenNode(one.simulate()) for one in FOUND[:3]]
    ranked = sorted(entries, key=lambda entry: entry.predicted_s)
    ranked = [
        replace(entry, step=entry.step, timed=[plan_demo.Timed(s, 0.0)] * 3)
        for entry, s in zip(ranked, (2, 1, 3), strict=True)
    ]
    from rich.console import Console

    assert not plan_demo.print_answer(Console(width=120), ranked, ranked[0].step)
    assert "regret of the first choice: 100.0%, to be at most 5%: missed" in capsys.readouterr().out


@pytest.mark.long
def test_the_search_is_exhaustive_in_effect_where_ranks_share_cores():
    crowded = replace(QUESTION.cluster, name="crowded", devices_per_node=4, cores_per_node=2)
    question = replace(QUESTION, cluster=crowded)
    pruned, every = search(question), search(question, prunes=False)
    assert [(step.run, step.knobs) for step in pruned.steps] == [(step.run, step.knobs) for step in every.steps]
    alone = search(QUESTION).steps[0].prediction.step_time_s
    assert pruned.steps[0].prediction.step_time_s > 1.5 * alone
