"""Updates of stages within the step give the weights, to the bit, of updates behind it, and free their gradients."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from any_runs import DATA, runs
from families import TRAINING, fitting
from one_process import OneProcess
from thinned import thinned

from pipeloom import load_run, predict_step
from pipeloom.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
    find_problems,
)
from pipeloom.errors import ConfigError, UserError
from pipeloom.predict.memory import memory_by_rank
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.schedule import Kind
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve
from pipeloom.workload.layout import Layout

STEPS = 2
LEVELS = ("none", "optimizer", "gradients", "full")


def run_of(update, name="lomo", *, family="auto", loops=2, tied=False, dtype="float32", placement=None, **layout):
    optimizer = {"clip": "none", **layout.pop("optimizer", {})}
    config = RunConfig(
        model=ModelConfig(num_layers=2 if loops < 3 else 4, hidden_size=8, num_heads=2, ffn_size=12, tied=tied),
        data=DataConfig(seq_len=8),
        layout=Layout(**{"pp": 2, "loops": loops, "num_microbatches": 3, "microbatch_size": 1, **layout}),
        schedule=ScheduleConfig(family=family, placement=placement),
        optimizer=OptimizerConfig(name=name, lr=0.5, update=update, **optimizer),
        training=TrainingConfig(dtype=dtype),
    )
    return resolve(config, DATA)


def train(config, steps=STEPS):
    """The shards of every rank, the norm of each step, the last results."""
    ranks, norms = OneProcess(config), []
    for _ in range(steps):
        for updates in ranks.updates:
            updates.begin_step(0.5)
        results = ranks.step()
        squares = [sum(each) for each in zip(*(updates.squares() for updates in ranks.updates), strict=True)]
        norms.append(sum(squares))
        for updates in ranks.updates:
            updates.end_step(squares, 0.5)
    shards = [one.shard.clone() for pipeline in ranks.pipelines for one in pipeline.data_parallel.weights.values()]
    return shards, norms, results, ranks


def check(config):
    """Both ways of one run; the ranks of that within the step, and its results."""
    within = replace(config, optimizer=replace(config.optimizer, update="stage"))
    (plain, norms, *_), (found, own_norms, results, ranks) = train(config), train(within)
    assert norms == pytest.approx(own_norms, rel=1e-6)
    assert all(map(torch.equal, found, plain))
    first = OneProcess(config)
    begin = [one.shard for pipeline in first.pipelines for one in pipeline.data_parallel.weights.values()]
    # A shard may have no parameter: those of whole matrices are uneven.
    assert 2 * sum(map(torch.equal, found, begin)) < len(begin)
    return ranks, results


CASES = list(product(TRAINING, LEVELS))


@pytest.mark.parametrize(("family", "level"), thinned(CASES, 9))
def test_every_family_and_level_train_to_the_same_bits(family, level):
    sizes = fitting(family, 2)
    layout = {"dp": 2, "shard": level} if level != "none" else {"dp": 2}
    ranks, results = check(run_of("step", family=family, **sizes, **layout))
    for pipeline, result in zip(ranks.pipelines, results, strict=True):
        row = pipeline.schedule.rows[pipeline._place.pipeline]
        assert row.is_kind(Kind.UPDATE).sum() == len(pipeline.data_parallel.weights)
        assert result.held.gradients_bytes > 0


OF_THREE = [family for family in TRAINING if fitting(family, 3)["loops"] == 3]
ALTERNATE = {"depth-first", "hybrid", "interleaved-zb"}
"""Looped families that come back to a stage after backwards of others, so that each stage has a gradient at once."""


@pytest.mark.parametrize("family", OF_THREE)
def test_of_three_stages_two_have_a_gradient_at_once_unless_the_order_alternates(family):
    # With two micro-batches of two ranks all these families have one order.
    _, _, results, ranks = train(run_of("stage", family=family, loops=3, num_microbatches=4, dp=2, shard="full"), 1)
    for pipeline, result in zip(ranks.pipelines, results, strict=True):
        sizes = sorted(4 * one.order.size for one in pipeline.data_parallel.weights.values())
        assert len(sizes) == 3
        assert result.held.gradients_bytes == sum(sizes if family in ALTERNATE else sizes[-2:])


OTHERS = {
    "tied": {"tied": True, "dp": 2, "shard": "full"},
    "tied, one replica": {"tied": True},
    "tied, on a V": {"tied": True, "dp": 2, "shard": "gradients", "placement": "v"},
    "tensor and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "context parallel": {"pp": 1, "cp": 2, "shard": "full"},
    "copies of shards": {"pp": 1, "dp": 4, "replicate": 2, "shard": "full"},
    "bfloat16": {"dp": 2, "shard": "optimizer", "dtype": "bfloat16"},
    "bfloat16, one rank": {"pp": 1, "dtype": "bfloat16"},
    "clipped stages": {"dp": 2, "optimizer": {"clip": "stage", "clip_grad_norm": 0.001}},
    "token slices": {"token_slices": 2},
    "adamw": {"name": "adamw", "dp": 2, "shard": "full"},
    "adalomo": {"name": "adalomo", "dp": 2, "shard": "gradients"},
    "muon": {"name": "muon", "dp": 2, "shard": "optimizer"},
}


@pytest.mark.parametrize("case", thinned(list(OTHERS), 3))
def test_other_runs_train_to_the_same_bits(case):
    check(run_of("step", **OTHERS[case]))


@pytest.mark.parametrize(("family", "most"), [("breadth-first", 2), ("depth-first", 4)])
def test_gradients_take_the_memory_of_two_stages(family, most):
    layout = {"pp": 1, "dp": 2, "shard": "full", "loops": 4, "num_microbatches": 2}
    _, _, results, ranks = train(run_of("stage", family=family, **layout), 1)
    plain = OneProcess(run_of("step", family=family, **layout))
    for pipeline, result in zip(ranks.pipelines, results, strict=True):
        weights = pipeline.data_parallel.weights.values()
        sizes = sorted(4 * one.order.size for one in weights)
        assert result.held.gradients_bytes <= sum(sizes[-most:])
        assert result.held.gradients == most
        assert all(one.gradients_bytes == 0 for one in weights)
    held = [result.held.gradients_bytes for result in plain.step()]
    assert max(held) == sum(sizes) > (results[0].held.gradients_bytes if most < 4 else 0)


@pytest.mark.parametrize(("family", "level"), thinned(list(product(("breadth-first", "1f1b"), LEVELS)), 3))
def test_predicted_bytes_of_gradients_are_those_held(family, level):
    loops = fitting(family, 3)["loops"]
    config = run_of("stage", family=family, loops=loops, dp=2, shard=level)
    sizes = sizes_in_training(config)
    _, _, results, ranks = train(config, 1)
    schedule = ranks.pipelines[0].schedule
    predicted = memory_by_rank(sizes.run, sizes.software, schedule, 2)
    for pipeline, result in zip(ranks.pipelines, results, strict=True):
        assert result.held.gradients_bytes == predicted[pipeline._place.pipeline].gradients_bytes


def test_an_update_is_behind_the_backwards_that_hide_its_reduction():
    alone = training_schedule(run_of("stage", pp=1, loops=3, family="breadth-first"))
    row = [str(action) for action in alone.rows[0]]
    assert [row[row.index(f"{stage}UPDATE") - 1] for stage in (2, 1, 0)] == ["2B2", "1B2", "0B2"]
    several = training_schedule(run_of("stage", pp=1, loops=3, dp=2, family="breadth-first"))
    row = [str(action) for action in several.rows[0]]
    assert row[row.index("2UPDATE") - 1 :][:3] == ["1REDUCE_GRAD", "2UPDATE", "0B0"]
    assert row[-2:] == ["1UPDATE", "0UPDATE"]


def test_a_simulated_step_has_the_updates_in_the_rows():
    steps = {}
    for update in ("step", "stage"):
        config = load_run(
            model={"num_layers": 6},
            layout={"pp": 2, "loops": 4, "num_microbatches": 4},
            optimizer={"name": "lomo", "clip": "none", "update": update},
            machine={"cluster": "dgx-a100"},
        )
        steps[update] = predict_step(config)
    plain, within = steps["step"], steps["stage"]
    assert plain.prediction.terms.optimizer_s > 0 == within.prediction.terms.optimizer_s
    assert plain.trace.end_s < within.trace.end_s
    seconds = [0.0, 0.0]
    for span in within.trace.spans:
        seconds[span.rank] += (span.end_s - span.start_s) * (span.action.kind is Kind.UPDATE)
    assert max(seconds) == pytest.approx(plain.prediction.terms.optimizer_s, rel=1e-9)
    assert {span.action.kind for span in within.trace.spans} - {span.action.kind for span in plain.trace.spans} == {
        Kind.UPDATE
    }


REFUSED = {
    "whole gradient is not known": {"optimizer": {"update": "stage"}},
    "needs each stage's whole gradient": {
        "optimizer": {"update": "stage", "clip": "stage"},
        "layout": {"dp": 2, "shard": "full"},
    },
    "since each stage is reduced once": {
        "optimizer": {"update": "stage", "clip": "none"},
        "layout": {"dp": 2, "shard": "full"},
        "schedule": {"gradient_buffers": 1},
    },
    "which does so without it": {
        "optimizer": {"update": "stage", "clip": "none"},
        "layout": {"pp": 1, "loops": 3},
        "schedule": {"device_budget": "1MiB"},
    },
    "which decides by all gradients": {
        "optimizer": {"update": "stage", "clip": "none"},
        "training": {"on_spike": "skip"},
    },
    "clips nothing with optimizer.clip_grad_norm inf": {"optimizer": {"clip": "stage", "clip_grad_norm": float("inf")}},
    "no effect without an optimizer.clip other than none": {"optimizer": {"clip": "none", "clip_grad_norm": 1.0}},
    "optimizer.update stage needs machine.software pipeloom": {
        "optimizer": {"update": "stage", "clip": "none"},
        "machine": {"software": "megatron-core"},
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_needs_all_gradients_is_refused(words):
    with pytest.raises(ConfigError) as found:
        predict_step(load_run(**REFUSED[words]))
    assert words in str(found.value)
    assert len(found.value.problems) == 1


@cache
def drawn_runs():
    """Runs of at most four ranks over every knob of a schedule, updated within the step."""
    found = []
    for config in runs():
        optimizer = replace(config.optimizer, lr=0.01, clip="none", update="stage")
        schedule = replace(config.schedule, gradient_buffers=None, device_budget=None)
        config = replace(config, optimizer=optimizer, schedule=schedule)
        if config.training.device == "cpu" and config.layout.num_ranks <= 4 and not find_problems(config, trains=False):
            found.append(config)
    return found[:24]


@pytest.mark.parametrize("number", thinned(range(24), 12))
def test_drawn_runs_train_to_the_same_bits_in_the_rows_that_are_simulated(number):
    config = drawn_runs()[number]
    try:
        step = predict_step(config, by_seconds=False)
    except UserError:
        return  # such as a budget that cannot be kept
    resolved = resolve(config, DATA)
    assert training_schedule(resolved).rows == step.schedule.rows
    check(resolved)
