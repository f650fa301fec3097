"""Experts of a rank in host memory: gathers of the rest and swaps of experts in one row, on several ranks."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_run import small_run

from pipeloom import train
from pipeloom.analysis.summary import communication
from pipeloom.checkpoint.checkpoint_folder import FOLDER, find_checkpoint
from pipeloom.config import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    ScheduleConfig,
    TrainingConfig,
    find_problems,
)
from pipeloom.cost.costs import Costs
from pipeloom.data.text import load_data
from pipeloom.errors import UserError
from pipeloom.predict.memory import memory_by_rank
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.predict.stage_swaps import swapped_memory
from pipeloom.predict.step import recipe_of
from pipeloom.schedule import Kind
from pipeloom.schedule.stage_swaps import Amounts, stage_sizes
from pipeloom.simulation import simulate
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve
from pipeloom.training.stages import StageSizes, stage_amounts
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
    [
        pytest.param(TWO, {}, id="gathers"),
        pytest.param(
            replace(TWO, shard="optimizer"),
            {"dtype": "bfloat16", "tied": True, "clip": float("inf")},
            id="narrow",
            marks=pytest.mark.long,
        ),
    ],
)
def test_swapped_experts_train_to_the_same_bits(tmp_path, layout, settings):
    plain, swapped = (config_of(tmp_path, str(budget), budget, layout=layout, **settings) for budget in (None, 2))
    (row,) = training_schedule(resolve(swapped, load_data(swapped.data, 0))).rows
    assert row.is_kind(Kind.UNSHARD).any()
    assert row.is_kind(Kind.SWAP_IN).sum() == 2 * layout.loops - 2
    # A prediction before the first step brings every stage, moves it and updates it.
    assert_equal(plain, replace(swapped, training=replace(swapped.training, predict=True)))
    found = summary(swapped.output.folder)
    assert found["predicted_step_time_s"] > 0
    assert found["swap_s"] > 0


def test_a_pipeline_swaps_experts_and_a_checkpoint_goes_on_without_a_budget(tmp_path):
    four = replace(TWO, pp=2, loops=2)
    plain, swapped = (config_of(tmp_path, str(budget), budget, layout=four, tied=True, every=2) for budget in (None, 2))
    assert_equal(plain, swapped)
    resumed = replace(
        config_of(tmp_path, "resumed", tied=True),
        checkpoint=CheckpointConfig(final="checkpoint", resume=swapped.output.folder / FOLDER / "step-000002"),
    )
    train(resumed, quiet=True)
    assert metrics(resumed.output.folder)[-1][1] == pytest.approx(metrics(plain.output.folder)[-1][1], rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_closed_forms_are_the_bytes_of_the_tensors_and_memory_is_that_of_the_budget(tmp_path, dtype):
    config = config_of(tmp_path, "run", 2, dtype=dtype, layout=replace(TWO, pp=2, loops=2))
    config = resolve(config, load_data(config.data, 0))
    counted, sizes = StageSizes(config).stages(), sizes_in_training(config)
    assert sizes.stages() == counted
    assert recipe_of(sizes.run, sizes.software, config.knobs()) == config.recipe()
    schedule = training_schedule(config)
    before = memory_by_rank(sizes.run, sizes.software, schedule, 2)
    after = swapped_memory(before, sizes.run, sizes.software, schedule)
    for rank, (all_there, here) in enumerate(zip(before, after, strict=True)):
        own = sum(counted[stage].total for stage in schedule.placement.stages_of(rank))
        left = all_there.total_bytes - here.total_bytes
        assert own - config.schedule.budget_bytes <= left < own


def test_nothing_is_exposed_where_a_visit_is_longer_than_both_loads(tmp_path):
    """Gathers, reductions and swaps of all that there is of a stage's experts, each as long as half a visit."""
    config = resolve(config_of(tmp_path, "run", 2), load_data(small_run(tmp_path).data, 0))
    schedule, each = training_schedule(config), config.layout.num_microbatches
    move = Amounts(weights=each / 8, gradient=each / 8, state=each / 4)
    trace = simulate(schedule, Costs(1, 2, unshard_s=each / 2, reduce_s=each / 2, move=move))
    compute = sorted(trace.compute(), key=lambda span: span.start_s)
    begin_s, end_s = compute[0].start_s, compute[-1].end_s
    assert begin_s == max(move.total, each / 2)  # the first gather and the first load
    assert end_s - begin_s == 3 * each * schedule.num_stages
    busy = {str(use.lane): use.num_actions for use in communication(trace)}
    assert min(busy[lane] for lane in ("data-parallel", "from host", "to host")) > 2 * schedule.num_stages - 3
    late = simulate(schedule, Costs(1, 2, unshard_s=2.5 * each, move=move))
    assert late.end_s > trace.end_s


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            replace(TWO, ep=1),
            "found layout.dp 2; use layout.dp 1, layout.ep 2 to swap experts alone, or leave the budget out",
        ),
        (replace(TWO, tp=2), "schedule.device_budget swaps experts without layout.tp 2"),
        (replace(TWO, shard="none"), "found layout.shard none; use optimizer, gradients or full"),
        (replace(TWO, loops=1), "needs layout.loops of at least 2"),
    ],
)
def test_what_cannot_be_swapped_is_refused(tmp_path, layout, words):
    config = replace(config_of(tmp_path, "run", 2), layout=layout)
    assert any(words in problem for problem in find_problems(config))


def test_budgets_below_one_expert_and_stages_without_experts_are_refused(tmp_path):
    config = config_of(tmp_path, "run", 2)
    data = load_data(config.data, 0)
    small = replace(config, schedule=replace(config.schedule, device_budget="9kB"))
    with pytest.raises(UserError, match="the device budget is 9 KB, but stage 0 takes"):
        training_schedule(resolve(small, data))
    some = replace(config, model=replace(config.model, expert_every=2))
    with pytest.raises(UserError, match=r"and these stages have none: 0, 2;"):
        training_schedule(resolve(some, data))
