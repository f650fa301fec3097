"""Layouts that do not work with other settings of a run are not searched, and refused where a limit names them."""

import json
from dataclasses import replace

import pytest
from planned_model import MODEL

from pipeloom.cli import main
from pipeloom.config import RunConfig, TrainingConfig, find_problems
from pipeloom.errors import UserError
from pipeloom.planner.fewer_nodes import without_ranks
from pipeloom.predict.describe import load_run

RUN = (
    MODEL
    + """
layout.num_microbatches = 4
machine.cluster = "dgx-a100"
"""
)
EXPERTS = "model.experts = 8\n"
COMPILE, CHECK = "training.compile = true\n", "training.check_every = 5\n"
NARROW = 'optimizer.name = "lomo"\noptimizer.wide_weights = false\n'


@pytest.fixture
def planned(tmp_path, capsys):
    """Plan a run file with more lines and with flags -> exit status, layouts, the written run, all other text."""

    def plan(lines, *flags):
        file, folder = tmp_path / "run.toml", tmp_path / "planned"
        file.write_text(RUN + lines)
        status = main(["plan", str(file), "--no-explain", "--json", "--out", str(folder), *flags])
        out, err = capsys.readouterr()
        answer = {} if status == 2 else json.loads(out)
        return status, answer, folder / "run.toml", " ".join(err.split())

    return plan


@pytest.mark.parametrize(
    ("lines", "flags"),
    [
        (EXPERTS + CHECK, ()),
        (CHECK, ("--tp", "2", "4")),
        (EXPERTS + COMPILE, ("--ep", "2")),
        (COMPILE, ("--pp", "4", "--micro-batch", "4", "--families", "depth-first")),
    ],
)
def test_a_run_with_the_setting_is_planned_without_what_it_refuses(planned, lines, flags):
    status, answer, file, err = planned(lines, "--devices", "4", *flags)
    assert status == 0, err
    assert find_problems(load_run(file), trains=False) == []
    assert COMPILE not in lines or not any(one["token_slices"] or one["ep_overlap"] for one in answer["layouts"])
    assert CHECK not in lines or all(one["ep"] == 1 and one["pp"] * one["dp"] > 1 for one in answer["layouts"])


@pytest.mark.parametrize(
    ("lines", "flags", "problem"),
    [
        (
            EXPERTS + CHECK,
            ("--ep", "2"),
            "ep above 1 cannot be searched: layout.ep does not work with training.check_every",
        ),
        (EXPERTS + COMPILE, ("--ep-overlap", "on"), "layout.ep_overlap does not work with training.compile"),
        (COMPILE, ("--strategies", "slices"), "strategy slices cannot be searched: training.compile compiles for"),
        (COMPILE, ("--strategies", "swap"), "schedule.device_budget does not work with training.compile"),
        (NARROW, ("--strategies", "swap"), "optimizer.wide_weights false does not work with schedule.device_budget"),
        ('training.on_spike = "skip"', ("--strategies", "swap"), "does not work with training.on_spike skip"),
        (CHECK, ("--tp", "4"), "training.check_every has no effect without layout.pp x layout.dp of at least 2"),
    ],
)
def test_a_limit_that_the_run_refuses_is_an_error_with_the_setting(planned, lines, flags, problem):
    status, _, file, err = planned(lines, "--devices", "4", *flags)
    assert (status, file.exists()) == (2, False)
    assert problem in err


def test_a_model_that_fits_only_where_it_is_swapped_names_the_setting_in_its_way(planned):
    large = ["--devices", "1", "--model", "llama-3-70b", "--global-batch", "1"]
    status, answer, _, err = planned('training.on_spike = "skip"\n', *large)
    assert status == 1, err
    assert (
        "Stages could be swapped through the device one after the other, but schedule.device_budget does not work with "
        "training.on_spike skip; leave one of them out."
    ) in answer["advice"]


def test_no_layout_without_slow_ranks_is_planned_for_a_run_with_other_prices():
    config = replace(RunConfig(), training=TrainingConfig(freeze_layers=1))
    with pytest.raises(UserError, match=r"^training\.freeze_layers: the search prices"):
        without_ranks(config, 1, 1.0)
