"""Steps out of range: found alike on every rank, and left out in a way from which a run resumes."""

import json
import math
from dataclasses import replace

import pytest
from small_run import small_run

from pipeloom.checkpoint.checkpoint_folder import list_checkpoints, read_info
from pipeloom.config import CheckpointConfig, TrainingConfig
from pipeloom.errors import RunError, WorkerError
from pipeloom.runs.run_reading import read_run
from pipeloom.training.checkpoints.saving import Saving
from pipeloom.training.health.spikes import LEAST, Spikes
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout

STEPS = 6
TRAINING = TrainingConfig(
    steps=STEPS, validation_batches=0, sample_tokens=0, predict=False, dtype="float64", stall_timeout_s=20
)
LAYOUT = Layout(pp=1, loops=1, dp=2, shard="optimizer", num_microbatches=1, microbatch_size=1)


CONTEXT = replace(LAYOUT, dp=1, cp=2)


def config_of(folder, policy, layout=LAYOUT, **checkpoint):
    return small_run(
        folder,
        layout=layout,
        training=replace(TRAINING, on_spike=policy),
        checkpoint=CheckpointConfig(final="none", every=2, **checkpoint),
    )


@pytest.fixture
def spoiled(monkeypatch):
    """Rank 1 has a gradient of NaN in some steps of a process, counted from 1."""

    honest = Pipeline.train_step

    def spoil(*numbers):
        calls = []

        def step(pipeline, batch):
            result = honest(pipeline, batch)
            calls.append(1)
            if len(calls) in numbers and pipeline._world.rank == 1:
                next(iter(pipeline.data_parallel.weights.values())).gradient.fill_(math.nan)
            return result

        monkeypatch.setattr(Pipeline, "train_step", step)

    return spoil


def lines(folder):
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in (json.loads(line, parse_constant=pytest.fail) for line in text)}


def test_a_step_is_skipped_on_every_rank_and_a_checkpoint_behind_it_resumes_to_equal_losses(tmp_path, spoiled):
    config = config_of(tmp_path, "skip")
    spoiled(3)
    train(config, quiet=True)
    found = lines(config.output.folder)
    reasons = {step: line["skipped"] for step, line in found.items() if "skipped" in line}
    assert reasons == {3: "step 3: its gradient norm is nan"}
    assert found[3]["grad_norm"] is None
    assert read_run(config.output.folder).metrics[2]["grad_norm"] is None
    assert list(found) == list(range(1, STEPS + 1))
    assert "its gradient norm is nan" in (config.output.folder / "warnings.txt").read_text()
    spoiled(0)
    again = replace(
        config,
        output=replace(config.output, folder=tmp_path / "again"),
        checkpoint=replace(config.checkpoint, resume=list_checkpoints(config.output.folder)[1]),
    )
    train(again, quiet=True)
    for step in (5, 6):
        assert lines(tmp_path / "again")[step]["loss"] == found[step]["loss"]


def test_checkpoints_behind_steps_out_of_range_remove_none_from_before(tmp_path, spoiled):
    config = config_of(tmp_path, "skip", keep=1)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    spoiled(4, 5)
    # The run ends as after a crash, with its last steps out of range: weights that put them there may be broken.
    train(replace(config, training=replace(config.training, steps=5)), quiet=True)
    assert [read_info(one).step for one in list_checkpoints(config.output.folder)] == [3, 4, 5]
    spoiled(0)
    train(replace(config, checkpoint=replace(config.checkpoint, resume=config.output.folder)), quiet=True)
    assert [read_info(one).step for one in list_checkpoints(config.output.folder)] == [6]


def test_a_run_goes_back_to_its_checkpoint_and_leaves_the_batches_out(tmp_path, spoiled):
    config = config_of(tmp_path, "rollback", CONTEXT)
    spoiled(4)
    train(config, quiet=True)
    found = lines(config.output.folder)
    assert list(found) == list(range(1, STEPS + 1))
    assert not any(line.get("skipped") for line in found.values())
    assert "back to step 2" in (config.output.folder / "warnings.txt").read_text()
    last = list_checkpoints(config.output.folder)[-1]
    batch = CONTEXT.batch_size
    assert (read_info(last).step, read_info(last).sequences) == (STEPS, (STEPS + 2) * batch)
    # The same as a run that resumes at step 2 with the batch behind the bad one.
    spoiled(0)
    quiet = config_of(tmp_path, "stop", CONTEXT)
    quiet = replace(quiet, output=replace(quiet.output, folder=tmp_path / "quiet"))
    train(quiet, quiet=True)
    assert lines(tmp_path / "quiet")[2]["loss"] == found[2]["loss"]
    assert lines(tmp_path / "quiet")[3]["loss"] != found[3]["loss"]


def test_a_run_goes_back_behind_a_damaged_checkpoint(tmp_path, spoiled, monkeypatch):
    config, real = config_of(tmp_path, "rollback", CONTEXT), Saving.newest_whole

    def damaged_first(saving):
        if saving._world.rank == 0:
            file = max(list_checkpoints(config.output.folder)[-1].glob("__0_*"))
            file.write_bytes(file.read_bytes()[:-1] + b"!")
        saving._world.wait_for_all()
        return real(saving)

    monkeypatch.setattr(Saving, "newest_whole", damaged_first)
    spoiled(6)  # behind the checkpoints of steps 2 and 4
    train(config, quiet=True)
    warnings = (config.output.folder / "warnings.txt").read_text()
    assert "step-000004 is damaged: " in warnings
    assert "back to step 2" in warnings
    assert list(lines(config.output.folder)) == list(range(1, STEPS + 1))
    assert (config.output.folder / "checkpoints" / "step-000004.damaged").is_dir()


def test_without_a_policy_or_a_checkpoint_the_run_ends(tmp_path, spoiled):
    spoiled(1)
    with pytest.raises((RunError, WorkerError), match="the loss of step 1 is"):
        train(config_of(tmp_path, "stop"), quiet=True)
    spoiled(1)
    config = config_of(tmp_path, "rollback")
    with pytest.raises((RunError, WorkerError), match="there is no checkpoint to go back to"):
        train(replace(config, output=replace(config.output, folder=tmp_path / "other")), quiet=True)


def test_limits_are_multiples_of_the_median_of_good_steps():
    spikes = Spikes(TrainingConfig(on_spike="skip", spike_loss=1.5, spike_grad_norm=4.0))
    assert spikes.problem(1, 100.0, 100.0) is None  # the first steps have nothing to be compared with
    for step in range(2, LEAST + 1):
        assert spikes.problem(step, 2.0, 1.0) is None
    assert "its loss is 3.1, above training.spike_loss 1.5 x 2" in spikes.problem(30, 3.1, 1.0)
    assert "its gradient norm is 4.5, above training.spike_grad_norm 4 x 1" in spikes.problem(31, 2.0, 4.5)
    assert spikes.problem(32, 2.9, 3.9) is None
    for step in range(40, 50):
        assert "its loss is inf" in spikes.problem(step, math.inf, 1.0)
    with pytest.raises(RunError, match="11 steps in a row are out of range, step 50 the last: its loss is inf"):
        spikes.problem(50, math.inf, 1.0)
