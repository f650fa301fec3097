"""What is simulated, planned and printed is what is trained: the same rows, byte for byte, or the same refusal."""

import re
from dataclasses import replace
from functools import cache

import pytest
from any_runs import COUNT, DATA, TRAINED, context_runs, runs
from thinned import thinned

from pipeloom.cli import main
from pipeloom.config.file import format_run, parse_run, read_run_file
from pipeloom.errors import UserError
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.predict.describe import load_run
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.recipe import build, schedule_text
from pipeloom.schedule import Kind
from pipeloom.system.files import parse_toml
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve
from pipeloom.training.stages import StageSizes

PARTS = 3
"""Of the runs that are drawn; the first is compared at every commit."""


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
    assert printed(run_of(step, config)) == step.schedule_text
    return step.schedule_text


def run_of(step, config):
    """The run that a plan writes of a step."""
    text = format_run(run_config(step, None, config.machine.cluster, "pipeloom"))
    again, problems = parse_run(parse_toml(text, "it"))
    assert problems == []
    return replace(again, optimizer=config.optimizer)  # which a plan leaves to its reader


def outcome(make, config):
    """The file, or the message of the refusal."""
    try:
        return make(config)
    except UserError as error:
        return f"refused: {error}"


@cache
def drawn(part):
    """Pairs of a run and what it trains with; computed once."""
    return [(config, outcome(trained, config)) for config in runs()[part::PARTS]]


every_part = pytest.mark.parametrize("part", thinned(range(PARTS), PARTS))
every_command = pytest.mark.parametrize("make", [simulated, printed, planned])


@every_part
def test_the_runs_are_drawn_over_every_knob(part):
    refused = [found for _, found in drawn(part) if found.startswith("refused")]
    assert 1 < len(refused) < COUNT / PARTS / 3
    assert {config.schedule.family for config, _ in drawn(part)} == set(TRAINED)
    kinds = {kind for _, found in drawn(part) for kind in re.findall(r"\b\d+([A-Z_]+)", found)}
    assert kinds == set(Kind)


@every_part
@every_command
def test_every_command_has_the_rows_that_are_trained_or_the_same_refusal(part, make):
    for config, expected in drawn(part):
        assert outcome(make, config) == expected, config


@every_part
@every_command
def test_every_command_has_the_rows_that_ranks_with_shared_sequences_train(part, make):
    for config in context_runs(24)[part::PARTS]:
        assert outcome(make, config) == outcome(trained, config), config


def dualpipe_v():
    """A run of two ranks, one of which moves activations to the other in other places on CPUs than on GPUs."""
    return load_run(
        model={"family": "gpt2", "num_layers": 6, "hidden_size": 16, "num_heads": 4, "vocab_size": 257},
        data={"seq_len": 32},
        layout={"pp": 2, "num_microbatches": 2, "microbatch_size": 2, "token_slices": 2},
        schedule={"family": "dualpipe-v", "balance": True},
        training={"dtype": "bfloat16", "device": "cuda"},
        machine={"cluster": "dgx-a100"},
    )


@every_part
@every_command
def test_every_command_has_the_rows_of_training_device_whatever_devices_the_cluster_has(part, make):
    """Kernels of CPUs keep other bytes than those of GPUs, and activations move by bytes."""
    moving = [config for config, text in drawn(part) if "_bytes" in text and not text.startswith("refused")]
    differing = 0
    for config in [dualpipe_v(), *moving[::2]]:
        other = "cpu" if config.training.device == "cuda" else "cuda"
        unlike = replace(config, training=replace(config.training, device=other))
        expected = outcome(trained, unlike)
        assert outcome(make, unlike) == expected, unlike
        differing += expected != outcome(trained, config)
    assert differing > 1


@pytest.fixture
def with_file(tmp_path):
    """A run with a schedule file."""

    def give(config, text):
        file = tmp_path / "schedule.txt"
        file.write_text(text, encoding="utf-8")
        return replace(config, schedule=replace(config.schedule, file=file))

    return give


@every_part
def test_a_schedule_file_is_executed_as_it_is(with_file, part):
    for config, text in drawn(part):
        if not text.startswith("refused"):
            given = with_file(config, text)
            assert outcome(trained, given) == text
            assert outcome(simulated, given) == text


@every_part
def test_moves_that_are_placed_by_seconds_are_executed_where_they_were_planned(with_file, part):
    others = []
    for config, text in drawn(part):
        if "_bytes" in text and not text.startswith("refused"):
            placed = predict_step(config, by_seconds=True).schedule_text
            assert outcome(trained, with_file(config, placed)) == placed
            others.append(placed != text)
    assert 0 < sum(others) < len(others)


@every_part
def test_token_slices_that_a_simulation_chooses_are_trained(with_file, part):
    """Wherever the drawn slices can be, a budget too small for whole sequences among them."""
    chosen, whole_fits = set(), set()
    pairs = [pair for pair in drawn(part) if pair[0].layout.token_slices]
    for config in [config for config, text in pairs if not text.startswith("refused")][::2]:
        step = predict_step(with_slices(config, "auto"))
        again = run_of(step, config)
        assert trained(again) == step.schedule_text == trained(with_file(again, step.schedule_text))
        chosen.add(len(step.run.slices))
        whole_fits.add(not outcome(trained, with_slices(config, None)).startswith("refused"))
    if part == 0:  # the other parts are more draws of the same check
        assert len(chosen) > 1
        assert whole_fits == {True, False}


def with_slices(config, token_slices):
    return replace(config, layout=replace(config.layout, token_slices=token_slices))


def test_commands_write_what_the_functions_return(tmp_path, capsys):
    config, text = next(pair for pair in drawn(0) if "OFFLOAD" in pair[1] and not pair[1].startswith("refused"))
    run, out = tmp_path / "run.toml", tmp_path / "schedule.txt"
    run.write_text(format_run(config), encoding="utf-8")
    assert main(["simulate", str(run), "--schedule-out", str(out)]) == 0
    capsys.readouterr()
    assert main(["schedule", "--run", str(run), "--format", "text"]) == 0
    assert out.read_text(encoding="utf-8") == capsys.readouterr().out == text
    assert read_run_file(run)[0] == config
