"""Stages compute in bfloat16, the optimizer updates float32: at every sharding level, over every family."""

from dataclasses import replace

import pytest
import torch
from families import SOME, fitting
from gloo import differences_over_gloo
from replicas import adamw, cluster_of, parts_of
from small_run import small_run
from torch import nn
from toy import WIDTH, objective

from pipeloom.config import ModelConfig, ScheduleConfig, TrainingConfig
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.training.equivalence import TOLERANCES
from pipeloom.workload.layout import Layout

LEVELS = [("none", None), ("optimizer", None), ("gradients", None), ("full", None), ("full", 2)]
ROUNDING = 2.0**-8
"""Between two neighbors of a number in bfloat16, relative to it."""


def narrow(level="none", num_shards=1, module=None):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if module is None else module
    return module, StageWeights(module, level, num_shards, 0, dtype=torch.bfloat16)


@pytest.mark.parametrize("level", ["none", "optimizer", "gradients", "full"])
def test_the_module_computes_narrow_and_the_optimizer_updates_wide(level):
    module, weights = narrow(level, num_shards=1 if level == "none" else 2)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert weights.whole.dtype == torch.bfloat16
    parts = [part.parameter for part in weights.parts]
    assert {t.dtype for part in parts for t in (part, part.grad)} == {torch.float32}
    assert weights.copy_bytes == 4 * weights.shard.numel()
    assert weights.weights_bytes == weights.whole.untyped_storage().nbytes() == (0 if level == "full" else 2 * 40)


def test_first_weights_are_not_rounded_for_the_optimizer():
    module = nn.Linear(4, 4)
    drawn = module.weight.detach().clone()
    _, weights = narrow(module=module)
    views = weights.order.views(weights.shard)
    assert torch.equal(views["weight"], drawn)
    assert torch.equal(module.weight, drawn.bfloat16())
    assert not torch.equal(module.weight.float(), drawn)


def test_in_one_type_nothing_is_held_twice():
    for dtype in (torch.float32, torch.float64):
        module = nn.Linear(4, 4, dtype=dtype)
        weights = StageWeights(module, "none", 1, 0, dtype=dtype)
        assert weights.shard is weights.whole
        assert not module.weight._post_accumulate_grad_hooks


def test_updates_that_bfloat16_would_lose_add_up():
    module, weights = narrow(module=nn.Linear(1, 1, bias=False))
    (decayed,) = [part.parameter for part in weights.parts]
    with torch.no_grad():
        decayed.fill_(1.0)
    weights.refresh()
    optimizer = torch.optim.SGD([decayed], lr=ROUNDING / 64)
    for _ in range(128):
        decayed.grad.fill_(1.0)
        before = module.weight.item()
        optimizer.step()
        weights.refresh()
        assert before - ROUNDING <= module.weight.item() <= before
    assert decayed.item() == 1.0 - 2 * ROUNDING
    assert module.weight.item() == 1.0 - 2 * ROUNDING
    assert torch.tensor(1.0).bfloat16() - ROUNDING / 64 == 1.0  # one of these updates in bfloat16


def test_gradients_of_micro_batches_add_up_wide():
    module, weights = narrow(module=nn.Linear(1, 1, bias=False))
    weights.open_gradient(weights.gradient)
    for _ in range(600):
        module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad is None
    weights.close_gradient()
    assert weights.gradient.item() == 600  # bfloat16 goes no further than 256 in steps of 1
    module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert weights.gradient.item() == 600  # nothing is added to a gradient that is closed
    assert module.weight.grad is None


def wide_steps(toy, num_steps):
    """Losses and parameters of one process in float32, from the same weights and inputs."""
    modules = toy.modules()
    named = {(stage, name): p for stage, m in enumerate(modules) for name, p in m.named_parameters()}
    optimizer = adamw(parts_of(named.values()))
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        each = [objective(nn.Sequential(*modules)(x.float()), number) for number, x in enumerate(toy.inputs())]
        sum(each).backward()
        losses.append(float(sum(each).detach()))
        optimizer.step()
    return losses, named


@pytest.mark.parametrize("family", SOME)
def test_three_steps_are_close_to_float32_and_alike_at_every_level(family):
    loops = fitting(family, 2)["loops"]
    found = []
    for shard, replicate in LEVELS:
        layout = Layout(pp=2, loops=loops, dp=4, shard=shard, replicate=replicate, num_microbatches=2)
        cluster = cluster_of(layout, family, dtype=torch.bfloat16)
        losses = [sum(float(loss) for result in cluster.step() for loss in result.outputs.values()) for _ in range(3)]
        expected, named = wide_steps(cluster.toy, 3)
        assert losses == pytest.approx(expected, rel=0.05)
        found.append((losses, cluster.parameters()))
        for parameters in found[-1][1]:
            assert all(tensor.dtype == torch.float32 for tensor in parameters.values())
            worst = max(float((tensor - named[name]).detach().abs().max()) for name, tensor in parameters.items())
            assert worst < 0.1  # of three updates of at most 0.05 each
    for losses, parameters in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-2)
        for mine, first in zip(parameters, found[0][1], strict=True):
            assert all(torch.allclose(mine[name], tensor, atol=2e-2) for name, tensor in first.items())


@pytest.mark.parametrize("buffers", [1, 2])
def test_gathered_weights_are_narrow_and_gradient_buffers_wide(buffers):
    layout = Layout(pp=2, loops=4, dp=2, shard="full", num_microbatches=4)
    cluster = cluster_of(layout, "depth-first", dtype=torch.bfloat16, gradient_buffers=buffers, residency=2)
    elements = WIDTH * WIDTH + WIDTH
    for result in cluster.step():
        held = result.held
        assert held.gathered <= 2
        assert held.weights_bytes == held.gathered * elements * 2
        assert held.gradients <= buffers
        assert held.gradients_bytes >= buffers * elements * 4


MODEL = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # tracing reads it, and continues
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_those_of_float32_but_for_rounding_over_gloo(tmp_path, family):
    narrow = TrainingConfig(dtype="bfloat16")
    cases = [
        (narrow, Layout(pp=2, loops=2, num_microbatches=4), ScheduleConfig()),
        (narrow, Layout(pp=1, loops=3, dp=2, shard="full", num_microbatches=2), ScheduleConfig(residency=1)),
        (narrow, Layout(pp=1, loops=2, dp=2, shard="none", num_microbatches=2, recompute="full"), ScheduleConfig()),
    ]
    if family == "llama":  # compiled code meets the hooks of narrow gradients in the same way whatever the layers are
        traced = TrainingConfig(dtype="bfloat16", compile=True, compile_backend="aot_eager")
        cases.append((traced, Layout(pp=1, loops=2, dp=2, shard="full", num_microbatches=2), ScheduleConfig()))
    configs = [
        small_run(tmp_path, model=replace(MODEL, family=family), training=training, layout=layout, schedule=order)
        for training, layout, order in cases
    ]
    for found in differences_over_gloo(configs, 2):
        assert 1e-3 < max(found.values()) < TOLERANCES["bfloat16"]
        assert found["loss"] < 1e-3
        assert found["gradient norm"] < 1e-2
