"""Learning rate, weight decay and clipping."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from pipeloom.config import OptimizerConfig
from pipeloom.errors import UserError
from pipeloom.execute.stages.clipping import clipped_step, squared_gradient_norm
from pipeloom.execute.stages.weights import FlatPart, StageWeights
from pipeloom.training.optimizers.fused_adamw import FusedAdamW
from pipeloom.training.optimizers.optimizer import learning_rate, make_optimizer
from pipeloom.workload.optimizers import OPTIMIZERS


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_end():
    config = OptimizerConfig(lr=2.0, lr_warmup_steps=4, lr_min_fraction=0.1)
    rates = [learning_rate(config, step, 20) for step in range(20)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(0.2)
    assert all(before >= after for before, after in itertools.pairwise(rates[4:]))


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    config = OptimizerConfig(lr=1.0, lr_warmup_steps=10)
    assert [learning_rate(config, step, 3) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_only_matrices_decay():
    stage = StageWeights(nn.Linear(3, 2), "none", 1, 0)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.3), stage.parts)
    decays = {p.numel(): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {3 * 2: 0.3, 2: 0.0}


IN_PIECES = [name for name, one in OPTIMIZERS.items() if not one.takes_whole("norm.weight", (6,))]
"""Optimizers of which at least vectors are updated in pieces."""


@pytest.mark.parametrize("name", IN_PIECES)
def test_an_update_of_pieces_is_that_of_the_whole_and_changes_its_state_in_place(name):
    torch.manual_seed(0)
    config = OptimizerConfig(name=name, lr=0.1)
    values, gradients = torch.randn(6), torch.randn(3, 6)
    results = []
    for cuts in ((6,), (2, 4)):
        parts = [nn.Parameter(part.clone()) for part in values.split(cuts)]
        optimizer = make_optimizer(config, [FlatPart(part, 0, decays=True) for part in parts])
        begun = [{key: optimizer.state[part][key] for key in config.rule.state} for part in parts]
        for gradient in gradients:
            for part, its in zip(parts, gradient.split(cuts), strict=True):
                part.grad = its.clone()
            optimizer.step()
        for part, state in zip(parts, begun, strict=True):
            assert set(optimizer.state[part]) - {"step"} == set(state)
            assert all(optimizer.state[part][key] is kept and kept.any() for key, kept in state.items())
        results.append(torch.cat([part.detach() for part in parts]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0], values)


def adamw(parameters):
    return FusedAdamW([{"params": parameters}], lr=0.1, betas=(0.9, 0.95), eps=1e-8)


def sgd(parameters, *, fused=True):
    return torch.optim.SGD(parameters, lr=0.1, fused=fused)


@pytest.mark.parametrize("make", [adamw, sgd, partial(sgd, fused=False)], ids=["adamw", "fused sgd", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_over_parts_equals_clipping_the_whole(make, dtype):
    torch.manual_seed(0)
    kind = {"dtype": dtype}
    first = [nn.Parameter(torch.ones(3, 2, **kind)), nn.Parameter(torch.ones(4, **kind))]
    parts = [first, [nn.Parameter(torch.ones(5, **kind))]]
    optimizers = [make(part) for part in parts]
    whole = [nn.Parameter(p.detach().clone()) for part in parts for p in part]
    reference = make(whole)
    for _ in range(2):
        for copy, original in zip(whole, [p for part in parts for p in part], strict=True):
            original.grad = torch.randn_like(original)
            copy.grad = original.grad.clone()
        norm = sum(squared_gradient_norm([p.grad for p in part]) for part in parts) ** 0.5
        for optimizer, part in zip(optimizers, parts, strict=True):
            clipped_step(optimizer, part, norm, 0.5)
        total = torch.cat([copy.grad.flatten() for copy in whole]).norm()
        for copy in whole:
            copy.grad *= 0.5 / total
        reference.step()
        tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
        for copy, original in zip(whole, [p for part in parts for p in part], strict=True):
            torch.testing.assert_close(copy, original, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_of_many_elements_has_six_digits(dtype):
    torch.manual_seed(0)
    gradients = [torch.randn(3_000_001).to(dtype), torch.randn(7, 5).to(dtype), torch.zeros(0, dtype=dtype)]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert squared_gradient_norm(gradients) == pytest.approx(exact, rel=2e-6)


@pytest.mark.parametrize("limit", [float("inf"), 100.0])
def test_small_gradients_and_no_limit_change_nothing(limit):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clipped_step(sgd([parameter]), [parameter], 5.0, limit)
    assert parameter.grad.tolist() == [3.0, 4.0]
    assert parameter.tolist() == pytest.approx([-0.3, -0.4])


def test_a_setting_that_the_optimizer_refuses_is_one_sentence():
    config, part = OptimizerConfig(name="adafactor", settings=("clip=0.5",)), FlatPart(torch.zeros(4), 0, decays=True)
    with pytest.raises(UserError, match=r"optimizer.name adafactor does not take these optimizer.settings: .*0.5"):
        make_optimizer(config, [part])
