"""What is simulated, planned and printed is what is trained: the same rows, byte for byte, or the same refusal."""

import re
from dataclasses import replace
from functools import cache

import pytest
from any_runs import COUNT, DATA, TRAINED, runs

from pipeloom.cli import main
from pipeloom.config.file import format_run, parse_run, read_run_file
from pipeloom.errors import UserError
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.recipe import build, schedule_text
from pipeloom.schedule import Kind
from pipeloom.system.files import parse_toml
from pipeloom.training.pipeline import training_schedule
from pipeloom.training.session import resolve
from pipeloom.training.stages import StageSizes


def trained(config):
    """The file that a run's folder has."""
    config = resolve(config, DATA)
    schedule = training_schedule(config)
    return schedule_text(config.recipe(), schedule, StageSizes(config))


def simulated(config):
    return predict_step(config).schedule_text


def printed(config):
    recipe, sizes = config.recipe(), sizes_in_training(config)
    return schedule_text(recipe, build(recipe, sizes), sizes)


def planned(config):
    """What a plan writes of the same step, and what its run file trains with."""
    step = predict_step(config)
    again, problems = parse_run(parse_toml(format_run(run_config(step, None, "laptop", "pipeloom")), "it"))
    assert problems == []
    again = replace(again, optimizer=config.optimizer)  # which a plan leaves to its reader
    assert printed(again) == step.schedule_text
    return step.schedule_text


def outcome(make, config):
    """The file, or the message of the refusal."""
    try:
        return make(config)
    except UserError as error:
        return f"refused: {error}"


@cache
def outcomes():
    """For each run what it trains with; computed once."""
    return [outcome(trained, config) for config in runs()]


def test_the_runs_are_drawn_over_every_knob():
    refused = [found for found in outcomes() if found.startswith("refused")]
    assert 5 < len(refused) < COUNT / 3
    assert {config.schedule.family for config in runs()} == set(TRAINED)
    kinds = {kind for found in outcomes() for kind in re.findall(r"\b\d+([A-Z_]+)", found)}
    assert kinds == set(Kind)


@pytest.mark.parametrize("make", [simulated, printed, planned])
def test_every_command_has_the_rows_that_are_trained_or_the_same_refusal(make):
    for config, expected in zip(runs(), outcomes(), strict=True):
        assert outcome(make, config) == expected, config


def test_a_schedule_file_is_executed_as_it_is(tmp_path):
    file = tmp_path / "schedule.txt"
    for config, text in zip(runs(), outcomes(), strict=True):
        if not text.startswith("refused"):
            file.write_text(text, encoding="utf-8")
            given = replace(config, schedule=replace(config.schedule, file=file))
            assert outcome(trained, given) == text
            assert outcome(simulated, given) == text


def test_commands_write_what_the_functions_return(tmp_path, capsys):
    pairs = zip(runs(), outcomes(), strict=True)
    config, text = next(pair for pair in pairs if "OFFLOAD" in pair[1] and not pair[1].startswith("refused"))
    run, out = tmp_path / "run.toml", tmp_path / "schedule.txt"
    run.write_text(format_run(config), encoding="utf-8")
    assert main(["simulate", str(run), "--schedule-out", str(out)]) == 0
    capsys.readouterr()
    assert main(["schedule", "--run", str(run), "--format", "text"]) == 0
    assert out.read_text(encoding="utf-8") == capsys.readouterr().out == text
    assert read_run_file(run)[0] == config
