"""Experts of a rank in host memory: gathers of the rest and swaps of experts in one row, on several ranks."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_run import small_run

from pipeloom import train
from pipeloom.checkpoint.checkpoint_folder import find_checkpoint
from pipeloom.config import CheckpointConfig, ModelConfig, OptimizerConfig, OutputConfig, ScheduleConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.schedule import Kind
from pipeloom.schedule.stage_swaps import stage_sizes
from pipeloom.training.export import export_weights
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve
from pipeloom.training.stages import stage_amounts
from pipeloom.workload.layout import Layout

TWO = Layout(pp=1, dp=2, ep=2, loops=4, shard="full", num_microbatches=3, microbatch_size=2)


def config_of(folder, name, budget=None, *, layout=TWO, clip=0.5, dtype="float32", tied=False, **checkpoint):
    """A run of four layers with experts; the budget holds that many of the largest experts of a stage."""
    config = small_run(
        folder,
        model=ModelConfig(num_layers=4, hidden_size=16, num_heads=2, experts=4, expert_ffn=32, tied=tied),
        layout=layout,
        schedule=ScheduleConfig(family="breadth-first"),
        optimizer=OptimizerConfig(lr=0.02, lr_warmup_steps=1, clip_grad_norm=clip),
        training=TrainingConfig(steps=3, validation_batches=1, sample_tokens=3, predict=False, dtype=dtype),
        output=OutputConfig(folder=folder / name, trace_step=2),
        checkpoint=CheckpointConfig(**{"final": "checkpoint", **checkpoint}),
    )
    if budget is None:
        return config
    sizes = stage_sizes(stage_amounts(resolve(config, load_data(config.data, 0))))
    schedule = replace(config.schedule, device_budget=str(budget * max(sizes)))
    return replace(config, schedule=schedule)


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def weights(folder):
    export_weights(find_checkpoint(folder), folder / "weights")
    return load_file(folder / "weights" / "model.safetensors")


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def assert_equal(plain, swapped):
    for config in (plain, swapped):
        train(config, quiet=True)
    one, other = plain.output.folder, swapped.output.folder
    assert metrics(one) == metrics(other)
    assert summary(one)["validation_loss"] == summary(other)["validation_loss"]
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert 0 < summary(other)["peak_stage_bytes"] <= swapped.schedule.budget_bytes


@pytest.mark.parametrize(
    ("layout", "settings"),
    [(TWO, {}), (replace(TWO, shard="optimizer"), {"dtype": "bfloat16", "tied": True, "clip": float("inf")})],
    ids=("gathers", "narrow"),
)
def test_swapped_experts_train_to_the_same_bits(tmp_path, layout, settings):
    plain, swapped = (config_of(tmp_path, str(budget), budget, layout=layout, **settings) for budget in (None, 2))
    (row,) = training_schedule(resolve(swapped, load_data(swapped.data, 0))).rows
    assert row.is_kind(Kind.UNSHARD).any()
    assert row.is_kind(Kind.SWAP_IN).sum() == 2 * layout.loops - 2
    assert_equal(plain, swapped)
