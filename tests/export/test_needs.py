"""A model from elsewhere is trained with what the user sets: nothing is invented, and nothing starts without it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from launch_runs import CLUSTER, command_of, run_of, values_of

from pipeloom.config import CheckpointConfig, ModelConfig, RunConfig, ScheduleConfig
from pipeloom.config.file import read_run_file
from pipeloom.export import hand_over
from pipeloom.workload.layout import Layout

MODEL = """
name = "elsewhere"
layers = 10
hidden = 64
heads = 4
kv_heads = 2
ffn = 192
family = "llama"
vocab = 512
tied = false
"""
RECIPE = {
    "OPTIMIZER_LR": "2e-4",
    "OPTIMIZER_LR_WARMUP_STEPS": "30",
    "TRAINING_STEPS": "500",
    "MODEL_ROPE_THETA": "500000",
    "MODEL_NORM_EPS": "1e-06",
}
OWN = {"DATA_PATH": "/texts", "DATA_TOKENIZER": "bpe"}
MEGATRON = {"MEGATRON": "/megatron", "DATA": "--data-path /tokens"}
TORCHTITAN = {"TOKENIZER": "/tokenizer", "DATASET": "c4"}
SCRIPTS = {
    "torchrun": ("torchrun.sh", {**RECIPE, **OWN}),
    "torchtitan": ("torchtitan.sh", {**RECIPE, **TORCHTITAN}),
    "megatron": ("megatron.sh", {**RECIPE, **MEGATRON}),
}


@pytest.fixture
def elsewhere(tmp_path):
    """A run of a model file, without a recipe."""
    file = tmp_path / "model.toml"
    file.write_text(MODEL)
    return RunConfig(
        model=ModelConfig(file=file),
        layout=Layout(pp=4, loops=1, num_microbatches=8),
        schedule=ScheduleConfig(family="1f1b"),
    )


def start(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, whose launcher only leaves a file behind."""
    probe = script.with_name("probe")
    probe.write_text(f"#!/bin/bash\ntouch {script.with_name('started')}\n")
    probe.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(probe), **variables}
    return subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=10, check=False
    )


@pytest.mark.parametrize("target", SCRIPTS)
def test_a_script_names_everything_that_is_missing_and_starts_nothing(tmp_path, elsewhere, target):
    (written,) = hand_over(elsewhere, CLUSTER, tmp_path / "out", [target]).written
    name, variables = SCRIPTS[target]
    assert {need.name for need in written.notes.needs} == variables.keys()
    script = tmp_path / "out" / name
    done = start(script)
    assert done.returncode == 2
    assert all(f"  {need.name}: {need.what}" in done.stderr for need in written.notes.needs)
    assert not script.with_name("started").exists()
    for left_out in variables:
        some = {variable: value for variable, value in variables.items() if variable != left_out}
        done = start(script, **some)
        assert (done.returncode, done.stderr.count("\n")) == (2, 2)
        assert f"  {left_out}: " in done.stderr
    assert start(script, **variables).returncode in (0, 75)  # 75: the probe trains no step
    assert script.with_name("started").exists()


@pytest.mark.parametrize("target", SCRIPTS)
def test_nothing_of_the_demo_is_written_for_another_model(tmp_path, elsewhere, target):
    (written,) = hand_over(elsewhere, CLUSTER, tmp_path / "out", [target]).written
    text = "\n".join(file.read_text() for file in written.files)
    assert "0.003" not in text
    assert "10000" not in text
    assert "SET" in text
    assert "optimizer.weight_decay 0.1" in text.replace("\n# ", " ")


def test_what_is_set_becomes_flags_of_this_program(tmp_path, elsewhere):
    hand_over(elsewhere, CLUSTER, tmp_path / "out", ["torchrun"])
    found = command_of(tmp_path / "out" / "torchrun.sh", **RECIPE, **OWN)
    assert values_of(found, "--optimizer.lr") == ["2e-4"]
    assert values_of(found, "--model.rope_theta") == ["500000"]
    assert values_of(found, "--data.path") == ["/texts"]


def test_what_is_set_becomes_flags_of_megatron_with_what_follows_from_it(tmp_path, elsewhere):
    without_clock = replace(elsewhere, checkpoint=CheckpointConfig(every_s=0))
    hand_over(without_clock, CLUSTER, tmp_path / "out", ["megatron"])
    found = command_of(tmp_path / "out" / "megatron.sh", **RECIPE, **MEGATRON)
    wanted = {"lr": "2e-4", "min-lr": "2e-05", "lr-warmup-iters": "30", "train-iters": "500", "save-interval": "500",
              "rotary-base": "500000", "norm-epsilon": "1e-06", "data-path": "/tokens"}  # fmt: skip
    assert {name: values_of(found, f"--{name}") for name in wanted} == {name: [text] for name, text in wanted.items()}
    assert "--mock-data" not in found
    assert "--mock-data" in command_of(tmp_path / "out" / "megatron.sh", **RECIPE, **{**MEGATRON, "DATA": "mock"})


def test_what_is_set_reaches_the_module_of_torchtitan(tmp_path, elsewhere, monkeypatch):
    without_clock = replace(elsewhere, checkpoint=CheckpointConfig(every_s=0))
    hand_over(without_clock, CLUSTER, tmp_path / "out", ["torchtitan"])
    found = command_of(tmp_path / "out" / "torchtitan.sh", **RECIPE, **TORCHTITAN)
    assert values_of(found, "--checkpoint.interval") == ["500"]
    assert values_of(found, "--training.steps")[0] == "500"
    assert values_of(found, "--dataloader.dataset") == ["c4"]
    constants = (tmp_path / "out" / "torchtitan_run.py").read_text().split("\nfrom functools")[0]
    for name, text in RECIPE.items():
        monkeypatch.setenv(name, text)
    module: dict = {}
    exec(constants, module)
    assert (module["LR"], module["LR_WARMUP_STEPS"], module["ROPE_THETA"]) == (2e-4, 30, 5e5)
    assert module["NORM_EPS"] == 1e-6


def test_a_setting_of_the_run_file_is_not_required_again(tmp_path, elsewhere):
    (written,) = hand_over(elsewhere, CLUSTER, tmp_path / "out", ["torchrun"]).written
    run_file, script = written.files
    text = run_file.read_text().replace("# SET: lr = ...", "lr = 2e-4").replace("# SET: steps = ...", "steps = 500")
    run_file.write_text(text)
    config, problems = read_run_file(run_file)
    assert (problems, config.optimizer.lr, config.training.steps) == ([], 2e-4, 500)
    done = start(script)
    assert "OPTIMIZER_LR:" not in done.stderr
    assert "TRAINING_STEPS" not in done.stderr
    assert "OPTIMIZER_LR_WARMUP_STEPS:" in done.stderr


def test_a_slurm_job_that_lacks_settings_ends_and_is_not_queued_again(tmp_path, elsewhere):
    (written,) = hand_over(elsewhere, CLUSTER, tmp_path / "out", ["slurm"]).written
    folder = tmp_path / "out"
    for name in ("srun", "scontrol"):
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{folder}/calls\n')
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7",
                   "SLURM_JOB_NODELIST": "node-1"}  # fmt: skip
    words = ["bash", str(folder / "pipeloom.sbatch")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 2
    assert "DATA_PATH: " in done.stderr
    assert {line.split()[1] for line in (folder / "calls").read_text().splitlines()} == {"show"}
    assert {need.name for need in written.notes.needs} == {*RECIPE, *OWN}
    done = subprocess.run(words, env={**environment, **RECIPE, **OWN}, capture_output=True, timeout=10, check=False)
    assert done.returncode == 0
    assert "srun" in (folder / "calls").read_text()


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_a_run_that_states_its_model_needs_nothing(tmp_path, target):
    (written,) = hand_over(run_of(), CLUSTER, tmp_path, [target]).written
    assert written.notes.needs == ()
