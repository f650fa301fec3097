"""What ``layout.loops auto`` chooses from, and what refuses it."""

from dataclasses import replace

import pytest

from pipeloom import load_run
from pipeloom.config import RunConfig, ScheduleConfig, TrainingConfig, decided_problems, find_problems
from pipeloom.config.automatic_loops import candidates
from pipeloom.workload.layout import Layout

AUTO = RunConfig(layout=Layout(pp=2, loops="auto"))


def names(config):
    return [(run.layout.num_loops, run.family) for runs in candidates(config) for run in runs]


def test_candidates_are_those_for_which_the_model_has_pieces_the_simplest_first():
    first = [(1, "1f1b"), (1, "breadth-first"), (1, "zb-h2")]
    assert names(AUTO) == [*first, (2, "breadth-first"), (4, "breadth-first")]


def test_a_named_family_is_the_only_one_of_the_candidates():
    config = replace(AUTO, schedule=ScheduleConfig(family="depth-first"))
    assert names(config) == [(1, "depth-first"), (2, "depth-first"), (4, "depth-first")]


def test_auto_of_a_family_with_one_number_is_that_number():
    assert load_run(layout={"loops": "auto"}, schedule={"family": "zb-v"}).layout.loops == 2


def test_training_takes_auto():
    assert not find_problems(AUTO, trains=False)


@pytest.mark.parametrize(
    ("name", "changed"),
    {
        "layout.pp 1": replace(AUTO, layout=Layout(pp=1, loops="auto")),
        "layout.partition": replace(AUTO, layout=replace(AUTO.layout, partition=(5, 5))),
        "layout.token_slices": replace(AUTO, layout=replace(AUTO.layout, token_slices="auto")),
        "schedule.keep": replace(AUTO, schedule=ScheduleConfig(keep=(1, 1))),
        "schedule.balance": replace(AUTO, schedule=ScheduleConfig(balance=True)),
        "training.compile": replace(AUTO, training=TrainingConfig(compile=True)),
        "training.predict false": replace(AUTO, training=TrainingConfig(predict=False)),
    }.items(),
)
def test_auto_is_refused_with_what_it_does_not_compare(name, changed):
    (problem,) = [one for one in find_problems(changed, trains=False) if one.startswith("layout.loops auto")]
    assert name in problem


def test_work_that_measures_no_run_refuses_auto_by_name():
    assert decided_problems(AUTO, trains=False) == [
        "layout.loops auto: only `pipeloom train` measures what it chooses by; set a number of layout.loops"
    ]
