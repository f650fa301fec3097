"""Optimizers equal references that are written out here, under every level of sharding; rates of the rate."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from any_runs import DATA
from one_process import OneProcess
from thinned import thinned

from pipeloom.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from pipeloom.cost.matrices import stage_shards
from pipeloom.execute.stages.batch import Batch
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.training.equivalence import reference_gradients
from pipeloom.training.optimizers.optimizer import learning_rate
from pipeloom.training.optimizers.update_rules import orthogonal
from pipeloom.training.session import resolve
from pipeloom.training.stages import stage_of
from pipeloom.workload.layout import Layout
from pipeloom.workload.optimizers import OPTIMIZERS

STEPS = 20
LAYOUTS = {
    "none": Layout(pp=1, loops=2, dp=2, num_microbatches=1, microbatch_size=1),
    "optimizer": Layout(pp=2, loops=1, dp=2, shard="optimizer", num_microbatches=2, microbatch_size=1),
    "gradients": Layout(pp=1, loops=2, dp=2, shard="gradients", num_microbatches=1, microbatch_size=1),
    "full": Layout(pp=1, loops=2, dp=2, shard="full", num_microbatches=1, microbatch_size=1),
    "hybrid": Layout(pp=1, loops=2, dp=4, replicate=2, shard="full", num_microbatches=1, microbatch_size=1),
    "context": Layout(pp=1, loops=2, cp=2, shard="full", num_microbatches=1, microbatch_size=1),
}


def config_of(name, layout, **settings):
    config = RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=8, num_heads=2, ffn_size=12),
        data=DataConfig(seq_len=8),
        layout=layout,
        optimizer=OptimizerConfig(name=name, **{"lr": 0.01, **settings}),
        training=TrainingConfig(dtype="float64"),
    )
    return resolve(config, DATA)


def newton_schulz(matrix):
    """Five quintic steps, written for the smaller side."""
    x = matrix / np.linalg.norm(matrix)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(matrix.T).T
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * (square @ x) + 2.0315 * (square @ (square @ x))
    return x


def muon(name, weight, gradient, state, step):
    rate, decay = 0.01, 0.1 if weight.ndim > 1 else 0.0
    weight = weight * (1 - rate * decay)
    if weight.ndim > 1 and name.startswith("layers."):
        state["m"] = 0.95 * state.get("m", 0.0) + 0.05 * gradient
        change = newton_schulz(0.05 * gradient + 0.95 * state["m"])
        return weight - rate * 0.2 * max(weight.shape) ** 0.5 * change
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * gradient
    state["v"] = 0.95 * state.get("v", 0.0) + 0.05 * gradient**2
    mean, square = state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.95**step)
    return weight - rate * mean / (np.sqrt(square) + 1e-8)


def adafactor(_, weight, gradient, state, step):
    """Arithmetic of arXiv 1804.04235, algorithms 4 to 6, with the decay rate 1 - t^-0.8."""
    kept, squares = 1 - step**-0.8, gradient**2
    size = max(1e-3, np.sqrt(np.mean(weight**2))) * min(0.01, step**-0.5)
    weight = weight * (1 - 0.01 * (0.1 if weight.ndim > 1 else 0.0))
    if gradient.ndim > 1:
        state["r"] = kept * state.get("r", 0.0) + (1 - kept) * squares.mean(1, keepdims=True)
        state["c"] = kept * state.get("c", 0.0) + (1 - kept) * squares.mean(0, keepdims=True)
        second = state["r"] * state["c"] / state["r"].mean()
    else:
        state["v"] = second = kept * state.get("v", 0.0) + (1 - kept) * squares
    change = gradient / np.sqrt(np.maximum(second, np.finfo(float).eps ** 2))
    return weight - size * change / max(1.0, np.sqrt(np.mean(change**2)))


def lomo(_, weight, gradient, state, step):
    return weight * (1 - 0.5 * (0.1 if weight.ndim > 1 else 0.0)) - 0.5 * gradient


def adalomo(_, weight, gradient, state, step):
    """Arithmetic of arXiv 2310.10195, algorithm 1, with lomo-optim's constants."""
    kept, squares = 1 - step**-0.8, gradient**2 + 1e-30
    if gradient.ndim > 1:
        state["r"] = kept * state.get("r", 0.0) + (1 - kept) * squares.mean(1)
        state["c"] = kept * state.get("c", 0.0) + (1 - kept) * squares.mean(0)
        second = np.outer(state["r"], state["c"]) / state["r"].mean()
    else:
        state["v"] = second = kept * state.get("v", 0.0) + (1 - kept) * squares
    change = gradient / np.sqrt(second)
    change = change / max(1.0, np.sqrt(np.mean(change**2)))
    rate = 0.01 * max(1e-3, np.sqrt(np.mean(weight**2)))
    return weight * (1 - rate * (0.1 if weight.ndim > 1 else 0.0)) - rate * change


RULES = {
    "muon": (muon, {}),
    "adafactor": (adafactor, {"weight_decay": 0.1}),
    "lomo": (lomo, {"weight_decay": 0.1, "lr": 0.5}),
    "adalomo": (adalomo, {"weight_decay": 0.1}),
}
WHOLE = [name for name in RULES if OPTIMIZERS[name].matrices is not None]


def weights_of(ranks):
    """Every parameter of the model from the shards of the first copy."""
    found = {}
    for rank, pipeline in enumerate(ranks.pipelines):
        if not pipeline.is_first_replica:
            continue
        (group,) = [one for one in ranks.config.layout.shard_groups() if rank in one]
        for stage, weights in pipeline.data_parallel.weights.items():
            parts = [ranks.pipelines[other].data_parallel.weights[stage].shard for other in group]
            whole = parts[0] if ranks.config.layout.shard == "none" else torch.cat(parts)
            found |= {name: view.clone() for name, view in weights.order.views(whole).items()}
    return found


@pytest.mark.parametrize(("rule", "level"), thinned(list(product(RULES, LAYOUTS)), 5))
def test_twenty_steps_equal_the_reference_under_every_level(rule, level):
    reference, settings = RULES[rule]
    config = config_of(rule, LAYOUTS[level], **settings)
    ranks = OneProcess(config)
    whole = stage_of(config, range(4), "cpu")
    state = {name: {} for name, _ in whole.named_parameters()}
    for step in range(1, STEPS + 1):
        ranks.step()
        for optimizer, pipeline in zip(ranks.optimizers, ranks.pipelines, strict=True):
            optimizer.step()
            pipeline.data_parallel.refresh()
        batch = Batch.of(ranks._windows, config.layout.dp * config.layout.num_microbatches, torch.device("cpu"))
        whole.zero_grad()
        for number, tokens in enumerate(batch.inputs):
            batch.loss(whole(tokens), number).backward()
        with torch.no_grad():
            for name, one in whole.named_parameters():
                one.copy_(torch.from_numpy(reference(name, one.numpy(), one.grad.numpy(), state[name], step)))
    found, first = weights_of(ranks), dict(stage_of(config, range(4), "cpu").named_parameters())
    assert found.keys() == state.keys()
    for name, one in whole.named_parameters():
        assert (found[name] - one).abs().max() < 1e-12, name
        assert (first[name] - one).abs().max() > 1e-6, name


@pytest.mark.parametrize("rule", WHOLE)
@pytest.mark.parametrize("level", LAYOUTS)
def test_shards_and_state_are_those_that_are_predicted(rule, level):
    config = config_of(rule, LAYOUTS[level])
    config = replace(config, training=replace(config.training, dtype="float32"))
    ranks, sizes = OneProcess(config), sizes_in_training(config)
    predicted = stage_shards(sizes.run, sizes.software)
    for pipeline, optimizer in zip(ranks.pipelines, ranks.optimizers, strict=True):
        held = sum(one.numel() for state in optimizer.state.values() for key, one in state.items() if key != "step")
        stages = pipeline.data_parallel.weights
        place = pipeline.data_parallel._groups.shard.index if config.layout.shard != "none" else 0
        assert held == sum(predicted[stage].state[place] for stage in stages)
        assert all(
            one.order.size == predicted[stage].size * len(predicted[stage].state) for stage, one in stages.items()
        )


def test_orthogonal_is_near_the_nearest_orthogonal_matrix():
    matrix = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.3
    assert torch.nn.functional.cosine_similarity(found.flatten(), (left @ right).flatten(), dim=0) > 0.98


def of_torch(style, steps, rising, least):
    """The same rate from PyTorch's schedulers."""
    from torch.optim import lr_scheduler as torch_schedules

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    left = steps - 1 - rising
    kinds = {
        "cosine": lambda: torch_schedules.CosineAnnealingLR(optimizer, left, 0.5 * least),
        "linear": lambda: torch_schedules.LinearLR(optimizer, 1.0, least, left),
        "constant": lambda: torch_schedules.ConstantLR(optimizer, 1.0),
    }
    warm = torch_schedules.LinearLR(optimizer, 1 / rising, 1.0, rising - 1)
    both, rates = torch_schedules.SequentialLR(optimizer, [warm, kinds[style]()], [rising]), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_rates_are_those_of_torch(style):
    config = OptimizerConfig(lr=0.5, lr_warmup_steps=4, lr_decay_style=style, lr_min_fraction=0.2)
    found = [learning_rate(config, step, 30) for step in range(30)]
    assert found == pytest.approx(of_torch(style, 30, 4, 0.2), rel=1e-12)


def test_a_rate_warms_up_stays_and_decays():
    config = OptimizerConfig(lr=1.0, lr_warmup_steps=2, lr_decay_style="wsd", lr_min_fraction=0.0, lr_wsd_decay_steps=4)
    assert [learning_rate(config, step, 12) for step in range(12)] == [0.5, *[1.0] * 7, 0.75, 0.5, 0.25, 0.0]
    usual = replace(config, lr_wsd_decay_steps=None)
    assert [learning_rate(usual, step, 20) for step in (17, 18, 19)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("tp", [1, 2])
def test_z_loss_is_that_of_autograd_under_tensor_parallelism(tp):
    layout = Layout(pp=2, loops=1, tp=tp, num_microbatches=2, microbatch_size=1)
    config = config_of("adamw", layout)
    config = replace(config, training=replace(config.training, z_loss=0.1))
    ranks = OneProcess(config)
    results = ranks.step()
    assert max(ranks.differences(results).values()) < 1e-12
    batch = Batch.of(ranks._windows, 2, torch.device("cpu"))
    whole, total = stage_of(config, range(4), "cpu"), 0.0
    for tokens, targets in zip(batch.inputs, batch.targets, strict=True):
        logits = whole(tokens).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        total += (loss + 0.1 * logits.logsumexp(-1).square().sum()) / batch.num_valid
    total.backward()
    expected = reference_gradients(config, batch)
    assert expected.loss == pytest.approx(total.item(), rel=1e-12)
    for name, one in whole.named_parameters():
        assert torch.allclose(expected.by_name[name], one.grad, rtol=1e-10, atol=1e-14), name
