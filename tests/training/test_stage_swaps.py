"""A model several times larger than its budget trains on one process as it would without one."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch._dynamo  # imported once here, not once in every process
from safetensors.torch import load_file
from small_run import small_run
from thinned import thinned

from pipeloom.analysis.memory import memory_over_time
from pipeloom.analysis.summary import communication
from pipeloom.checkpoint.checkpoint_folder import FOLDER, find_checkpoint
from pipeloom.config import CheckpointConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.errors import UserError, WorkerError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.runs.run_folder import RunFolder
from pipeloom.schedule import Kind
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.schedule.stage_swaps import stage_sizes, stage_stays
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.schedules import forward_schedule, training_schedule
from pipeloom.training.session import resolve
from pipeloom.training.stages import piece_bytes, stage_amounts
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout

STEPS = 3


def config_of(folder, budget=None, *, dtype="float32", tied=False, clip=0.5, loops=10, **checkpoint):
    """A run of eight layers in ten stages; the budget is in parts of the whole model's weights and state."""
    config = small_run(
        folder,
        model=ModelConfig(num_layers=8, hidden_size=16, num_heads=2, tied=tied),
        layout=Layout(pp=1, loops=loops, num_microbatches=3, microbatch_size=2),
        optimizer=OptimizerConfig(lr=0.02, lr_warmup_steps=1, clip_grad_norm=clip),
        training=TrainingConfig(steps=STEPS, validation_batches=1, sample_tokens=3, predict=False, dtype=dtype),
        checkpoint=CheckpointConfig(**{"final": "checkpoint", **checkpoint}),
    )
    if budget is None:
        return config
    whole = sum(stage_sizes(stage_amounts(resolve(config, load_data(config.data, 0)))))
    return replace(config, schedule=ScheduleConfig(device_budget=f"{int(whole * budget)}"))


def train(jobs, rendezvous, rank, size):
    """One trainer after the other; what each had on the device at most, with its budget."""
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    found = {}
    for folder, config in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(
            resolve(config, load_data(config.data, 0)), world, load_data(config.data, 0), RunFolder(folder)
        )
        peaks = []
        honest = trainer._pipeline.train_step
        trainer._pipeline.train_step = lambda batch, honest=honest, peaks=peaks: noted(honest(batch), peaks)
        result = trainer.run()
        store = trainer._pipeline.store
        live = 0 if store is None else sum(home._storage.nbytes() for home in store._home_of.values())
        found[folder.name] = {"held": peaks, "live": live, "trace": result.measured, "predicted": result.predicted}
    world.leave()
    return found


def noted(result, peaks):
    peaks.append(result.held.swapped_bytes)
    return result


def train_all(folder, configs):
    load_data(next(iter(configs.values())).data, 0)
    return run_workers(partial(train, [(folder / name, config) for name, config in configs.items()]), 1)[0]


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def weights(folder):
    out = folder / "weights"
    if not out.exists():
        export_weights(find_checkpoint(folder), out)
    return load_file(out / "model.safetensors")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", thinned(["bfloat16", "float32", "float64"], 3))
def test_a_model_of_four_budgets_trains_to_the_same_bits(tmp_path, dtype):
    configs = {}
    cases = product((False, True), (0.5, float("inf"))) if dtype == "float32" else ((False, float("inf")), (True, 0.5))
    for tied, clip in cases:
        for budget in (None, 0.3 if tied else 0.25):
            name = f"tied {tied} clip {clip} {budget}"
            configs[name] = config_of(tmp_path, budget, dtype=dtype, tied=tied, clip=clip)
    found = train_all(tmp_path, configs)
    for plain, swapped in list(pairwise(configs))[::2]:
        assert metrics(tmp_path / swapped) == metrics(tmp_path / plain)
        for name in ("sample.txt",):
            assert (tmp_path / swapped / name).read_text() == (tmp_path / plain / name).read_text()
        losses = [
            json.loads((tmp_path / run / "summary.json").read_text())["validation_loss"] for run in (plain, swapped)
        ]
        assert losses[0] == losses[1]
        mine, theirs = weights(tmp_path / swapped), weights(tmp_path / plain)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        budget = configs[swapped].schedule.budget_bytes
        assert len(found[swapped]["held"]) == STEPS
        assert 0 < max(found[swapped]["held"]) <= budget
        assert found[swapped]["live"] == 0  # in the end everything is at rest
        whole = sum(stage_sizes(stage_amounts(resolve(configs[swapped], load_data(configs[swapped].data, 0)))))
        assert whole >= (4 if "tied False" in swapped else 3) * budget


def test_what_was_measured_is_what_the_schedule_says(tmp_path):
    """Live bytes counted by the store are those that the report finds in the schedule and the measured trace."""
    config = config_of(tmp_path, 0.25)
    resolved = resolve(config, load_data(config.data, 0))
    found = train_all(tmp_path, {"run": config})["run"]
    schedule, trace, amounts = training_schedule(resolved), found["trace"], stage_amounts(resolved)
    held = HeldBytes(always_bytes=(0.0,), kept=KeptBytes([0.0] * schedule.num_stages), stages=amounts)
    (curve,) = memory_over_time(schedule, trace, held)
    assert (
        0 < curve.peak_bytes <= max(found["held"])
    )  # the trace is of one step, and ends later than the memory is free
    assert curve.peak_parts["resident stages"] == curve.peak_bytes
    uses = {str(use.lane): use for use in communication(trace)}
    assert uses["from host"].num_actions == uses["to host"].num_actions == len(stage_stays(schedule.rows[0]))
    assert all(0 <= use.hidden_s <= use.busy_s for use in uses.values())
    assert {span.action.kind for span in trace.compute()} == {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE}


@pytest.mark.timeout(300)
def test_a_checkpoint_goes_on_with_a_budget_and_without(tmp_path):
    saved = {
        name: config_of(tmp_path, budget, dtype="float64", tied=True, every=2)
        for name, budget in (("plain", None), ("swapped", 0.3))
    }
    train_all(tmp_path, saved)
    jobs = {}
    for old in saved:
        for new, config in saved.items():
            resume = tmp_path / old / FOLDER / "step-000002"
            jobs[f"{old} -> {new}"] = replace(config, checkpoint=CheckpointConfig(final="checkpoint", resume=resume))
    train_all(tmp_path, jobs)
    for name in jobs:
        assert metrics(tmp_path / name) == metrics(tmp_path / "plain")[2:]
        mine, theirs = weights(tmp_path / name), weights(tmp_path / name.split()[0])
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_stages_may_be_at_rest_in_files_which_are_gone_in_the_end(tmp_path):
    plain, swapped = config_of(tmp_path), config_of(tmp_path, 0.25)
    files = replace(swapped, schedule=replace(swapped.schedule, swap_folder=tmp_path / "here" / "there"))
    train_all(tmp_path, {"plain": plain, "files": files})
    assert metrics(tmp_path / "files") == metrics(tmp_path / "plain")
    assert list((tmp_path / "here" / "there").iterdir()) == []


def fails(job, rendezvous, rank, size):
    """A run that fails in its first step, with everything of it still there."""
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    config = resolve(job, load_data(job.data, 0))
    trainer = Trainer(config, world, load_data(job.data, 0), RunFolder(job.output.folder))

    def stop(_):
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(job.schedule.swap_folder) in maps.read_text()  # the stages are in files there
        os.kill(os.getpid(), signal.SIGKILL)

    trainer._pipeline.train_step = stop
    trainer.run()


def test_a_run_that_is_killed_leaves_no_file_of_a_stage(tmp_path):
    config, folder = config_of(tmp_path, 0.25), tmp_path / "swaps"
    config = replace(config, schedule=replace(config.schedule, swap_folder=folder))
    config.output.folder.mkdir()
    load_data(config.data, 0)
    with pytest.raises(WorkerError, match="SIGKILL"):
        run_workers(partial(fails, config), 1)
    assert list(folder.iterdir()) == []


def test_a_prediction_leaves_no_trace_in_the_training(tmp_path):
    """It brings every stage, moves it and updates it; losses, weights and what is owed are as without."""
    plain, config = config_of(tmp_path, tied=True), config_of(tmp_path, 0.3, tied=True, loops=5)
    plain = replace(plain, layout=config.layout)
    requested = replace(config, training=replace(config.training, predict=True))
    found = train_all(tmp_path, {"plain": plain, "predicted": requested})["predicted"]
    assert metrics(tmp_path / "predicted") == metrics(tmp_path / "plain")
    mine, theirs = weights(tmp_path / "predicted"), weights(tmp_path / "plain")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert max(found["held"]) <= config.schedule.budget_bytes
    predicted, measured = found["predicted"], found["trace"]
    assert sorted(str(span.action) for span in predicted.spans) == sorted(str(span.action) for span in measured.spans)
    lasts = {
        kind: sum(span.end_s - span.start_s for span in predicted.spans if span.action.kind is kind)
        for kind in (Kind.SWAP_IN, Kind.SWAP_OUT, Kind.UPDATE)
    }
    assert min(lasts.values()) > 0


def test_a_budget_for_everything_swaps_each_stage_once(tmp_path):
    config = config_of(tmp_path, 1.0)
    schedule = training_schedule(resolve(config, load_data(config.data, 0)))
    assert len(stage_stays(schedule.rows[0])) == schedule.num_stages
    train_all(tmp_path, {"all": config, "plain": config_of(tmp_path)})
    assert metrics(tmp_path / "all") == metrics(tmp_path / "plain")


def test_recomputed_layers_are_swapped_too(tmp_path):
    plain, swapped = config_of(tmp_path, tied=True), config_of(tmp_path, 0.3, tied=True)
    layout = replace(plain.layout, recompute="full")
    train_all(tmp_path, {"plain": replace(plain, layout=layout), "swapped": replace(swapped, layout=layout)})
    assert metrics(tmp_path / "swapped") == metrics(tmp_path / "plain")


def test_sizes_are_those_of_the_tensors(tmp_path):
    for dtype in ("float32", "bfloat16"):
        config = resolve(config_of(tmp_path, 0.5, tied=True, dtype=dtype), load_data(small_run(tmp_path).data, 0))
        found = run_workers(partial(_amounts, config), 1)[0]
        assert found == stage_amounts(config)
        assert sum(piece_bytes(config)) == sum(int(one.total) for one in stage_amounts(config))


def _amounts(config, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    trainer = Trainer(config, world, load_data(config.data, 0), RunFolder(config.output.folder))
    found = tuple(trainer._pipeline.store.amounts(stage) for stage in range(config.layout.num_stages))
    trainer._pipeline.close()
    world.leave()
    return found


def test_a_stage_that_does_not_fit_is_named_with_what_helps(tmp_path):
    config = resolve(config_of(tmp_path), load_data(small_run(tmp_path).data, 0))
    sizes = stage_sizes(stage_amounts(config))
    small = replace(config, schedule=ScheduleConfig(device_budget=f"{max(sizes) - 1}"))
    with pytest.raises(UserError) as refused:
        training_schedule(small)
    words = str(refused.value)
    assert f"stage {sizes.index(max(sizes))} takes" in words
    assert "use more loops" in words
    assert "Traceback" not in words


def test_an_evaluation_moves_weights_alone(tmp_path):
    config = resolve(config_of(tmp_path, 0.25), load_data(small_run(tmp_path).data, 0))
    (row,) = forward_schedule(config, 2).rows
    assert len(stage_stays(row)) == config.layout.num_stages
    assert all(not stay.taken for stay in stage_stays(row))
