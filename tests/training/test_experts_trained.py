"""Runs with experts whose losses are those of one rank: swapped stages, moved activations, updates within the step."""

import json
from dataclasses import replace
from statistics import median

import pytest
from resumed import losses, train_all
from small_run import small_run
from thinned import thinned

from pipeloom.config import CheckpointConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from pipeloom.report.contents import _headline
from pipeloom.runs.run_reading import read_run
from pipeloom.workload.layout import Layout

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, ffn_size=24, experts=4, expert_every=2, shared_experts=1)
BATCH, BIAS = replace(MODEL, balance_weight=0.5), replace(MODEL, balance="bias", balance_rate=0.1)
FEW = replace(BATCH, expert_capacity=0.6)
ONE = Layout(pp=1, loops=1, num_microbatches=4, microbatch_size=1)
TWO = replace(ONE, pp=2, loops=2)
REPLICAS = Layout(pp=1, loops=2, dp=2, shard="full", num_microbatches=2, microbatch_size=1)
SHARED = Layout(pp=1, loops=2, dp=4, ep=2, shard="full", num_microbatches=1, microbatch_size=1)
ADALOMO = {"name": "adalomo", "clip": "none"}
RUNS = {
    "compared by replicas": (BIAS, replace(REPLICAS, shard="none"), {}, {}, {"check_every": 1}),
    "swapped": (BATCH, replace(ONE, loops=3), {}, {"device_budget": "700kB"}, {}),
    "compared over a pipeline": (
        BIAS,
        Layout(pp=2, dp=2, loops=1, num_microbatches=2, microbatch_size=1),
        {},
        {},
        {"check_every": 1},
    ),
    "moved": (BATCH, TWO, {}, {"balance": True}, {}),
    "updated within the step": (BATCH, TWO, {**ADALOMO, "update": "stage"}, {}, {}),
    "whole matrices of shards": (BATCH, REPLICAS, {"name": "muon"}, {}, {}),
    "experts over ranks": (BIAS, replace(SHARED, shard="gradients"), {"clip_grad_norm": 0.5}, {}, {}),
    "experts over ranks, with a capacity": (FEW, SHARED, {}, {}, {}),
    "a capacity, some frozen": (FEW, TWO, {}, {}, {"freeze_layers": 2}),
    "experts over all ranks": (BATCH, replace(SHARED, ep=4), {"clip": "stage"}, {}, {}),
    "experts over ranks of shards": (BATCH, SHARED, {"name": "muon"}, {}, {}),
    "experts over ranks, some frozen": (BATCH, SHARED, {}, {}, {"freeze_layers": 3}),
    "experts over ranks, lomo": (BATCH, replace(SHARED, shard="none"), {"name": "adalomo", "clip": "none"}, {}, {}),
}


@pytest.mark.parametrize("name", thinned(RUNS, len(RUNS)))
def test_losses_are_those_of_one_rank(tmp_path, name):
    model, layout, optimizer, schedule, training = RUNS[name]

    def run(layout, optimizer, schedule, training):
        return small_run(
            tmp_path,
            model=model,
            layout=layout,
            optimizer=OptimizerConfig(lr=0.02, lr_warmup_steps=1, **optimizer),
            schedule=ScheduleConfig(**schedule),
            training=TrainingConfig(
                steps=3, validation_batches=0, sample_tokens=0, predict=False, dtype="float64", **training
            ),
            checkpoint=CheckpointConfig(final="none"),
        )

    behind = {key: value for key, value in optimizer.items() if key != "update"}
    folders = tmp_path / "one", tmp_path / "other"
    alone = replace(ONE, loops=layout.loops) if optimizer.get("clip") == "stage" else ONE
    still = {key: value for key, value in training.items() if key == "freeze_layers"}
    runs = run(alone, behind, {}, still), run(layout, optimizer, schedule, training)
    train_all(dict(zip(folders, runs, strict=True)))
    expected, found = map(losses, folders)
    assert found == pytest.approx(expected, rel=1e-11)
    assert len(set(expected.values())) == 3
    if layout.ep > 1:
        lines = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
        assert all(1 <= line["expert_rank_load"] <= min(layout.ep, line["expert_load"]) for line in lines)
        (card,) = (one for one in _headline(read_run(folders[1]), {}, None) if one["name"] == "load of experts")
        assert card["measured"] == f"{median(line['expert_rank_load'] for line in lines):.2f}"
        assert card["predicted"] == "1.00"


def test_a_capacity_drops_tokens_of_training_alone(tmp_path):
    def run(model, steps):
        return small_run(
            tmp_path,
            model=model,
            layout=ONE,
            optimizer=OptimizerConfig(lr=1e-12),
            training=TrainingConfig(steps=steps, validation_batches=1, sample_tokens=4, predict=False, dtype="float64"),
            checkpoint=CheckpointConfig(final="none"),
        )

    folders = tmp_path / "all", tmp_path / "few"
    train_all(dict(zip(folders, (run(BATCH, 2), run(FEW, 2)), strict=True)))
    every, few = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders
    )
    assert all("expert_dropped" not in one for one in every)
    # An expert takes at most 3 of 4 tokens, the mean: equal loads would lose a quarter, unequal ones lose more.
    assert all(0.25 <= one["expert_dropped"] < 0.8 for one in few)
    assert few[0]["loss"] != every[0]["loss"]
    of_text = [json.loads((folder / "summary.json").read_text())["validation_loss"] for folder in folders]
    assert of_text[0] == pytest.approx(of_text[1], rel=1e-9)
