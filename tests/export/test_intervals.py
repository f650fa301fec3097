"""Checkpoints of programs that count steps, where the run counts seconds."""

import pytest
from launch_runs import CLUSTER, command_of, run_of, values_of, written_for

from pipeloom.export.job import Site, make_job

FLAGS = {"megatron": "--save-interval", "torchtitan": "--checkpoint.interval"}
OWN = {"MEGATRON": "/megatron", "DATA": "mock", "TOKENIZER": "/tokenizer", "DATASET": "c4"}


def written(target, folder, **sections):
    """The words of the script, and its sentence about the clock."""
    done = written_for(target, folder, **sections)
    about = [one for one in done.notes.differs if one.startswith("checkpoint.every_s")]
    return command_of(next(file for file in done.files if file.suffix == ".sh"), **OWN), about


@pytest.mark.parametrize("target", FLAGS)
def test_the_clock_becomes_steps_by_the_predicted_step_time(tmp_path, target):
    step_s = make_job(run_of(), CLUSTER, Site()).step_s
    found, about = written(target, tmp_path, checkpoint={"every_s": 7.5 * step_s})
    assert values_of(found, FLAGS[target]) == ["7"]
    (sentence,) = about
    assert "7 steps, an estimate from the predicted step time" in sentence
    assert sentence in " ".join((tmp_path / f"{target}.sh").read_text().replace("\n#   ", " ").split())
    # A step that takes longer than the clock allows is the shortest interval.
    assert values_of(written(target, tmp_path, checkpoint={"every_s": step_s / 9})[0], FLAGS[target]) == ["1"]


@pytest.mark.parametrize("target", FLAGS)
def test_a_long_run_without_any_setting_has_checkpoints(tmp_path, target):
    large = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16}
    found, about = written(target, tmp_path, model=large, training={"steps": 100_000})
    (interval,) = values_of(found, FLAGS[target])
    assert 1 < int(interval) < 10_000
    assert len(about) == 1


@pytest.mark.parametrize("target", FLAGS)
def test_an_interval_of_steps_stays_and_the_clock_is_named_only_where_it_is_shorter(tmp_path, target):
    step_s = make_job(run_of(), CLUSTER, Site()).step_s
    found, about = written(target, tmp_path, checkpoint={"every": 5})
    assert (values_of(found, FLAGS[target]), about) == (["5"], [])
    found, about = written(target, tmp_path, checkpoint={"every": 5, "every_s": 4 * step_s})
    assert values_of(found, FLAGS[target]) == ["5"]
    assert "the 5 steps of checkpoint.every alone" in about[0]


@pytest.mark.parametrize("target", FLAGS)
def test_without_a_clock_there_is_one_after_the_last_step(tmp_path, target):
    found, about = written(target, tmp_path, checkpoint={"every_s": 0})
    assert (values_of(found, FLAGS[target]), about) == (["200"], [])


def test_the_state_of_the_optimizer_is_in_every_checkpoint_of_torchtitan(tmp_path):
    found, _ = written("torchtitan", tmp_path)
    assert {"--checkpoint.enable", "--checkpoint.no-last_save_model_only"} <= set(found)


def unwritten(done):
    """What the files state about checkpoints in the background."""
    return [one for one in done.notes.left_out if one.startswith("checkpoint.background")]


def test_torchtitan_writes_checkpoints_beside_training_where_the_run_does(tmp_path):
    found, _ = written("torchtitan", tmp_path)
    assert values_of(found, "--checkpoint.async_mode") == ["async"]
    assert not unwritten(written_for("torchtitan", tmp_path))
    assert "--checkpoint.async_mode" not in written("torchtitan", tmp_path, checkpoint={"background": False})[0]


ASYNC = {"--async-save", "--use-persistent-ckpt-worker"}


@pytest.mark.parametrize(
    ("sections", "is_async", "sentence"),
    [
        ({"checkpoint": {"grace_s": 0}}, True, None),
        # torchrun sends SIGTERM to the process that writes, too.
        ({}, False, "with checkpoint.grace_s 0"),
        ({"checkpoint": {"background": False, "grace_s": 0}}, False, None),
        (
            {"checkpoint": {"grace_s": 0}, "layout": {"pp": 1, "loops": 1, "dp": 4, "shard": "full"}},
            False,
            "as always with Megatron-LM's FSDP",
        ),
    ],
)
def test_megatron_writes_checkpoints_beside_training_where_none_is_written_after_a_signal(
    tmp_path, sections, is_async, sentence
):
    found, _ = written("megatron", tmp_path, **sections)
    assert ASYNC & set(found) == (ASYNC if is_async else set())
    about = unwritten(written_for("megatron", tmp_path, **sections))
    assert len(about) == (sentence is not None)
    assert all(sentence in one for one in about)
    assert ("--exit-signal-handler" in found) == (sections.get("checkpoint", {}).get("grace_s") != 0)
