"""A stage's parameters in one flat buffer, and the shards of it."""

import pytest
import torch
from torch import nn

from pipeloom.execute.stages.clipping import clipped_step
from pipeloom.execute.stages.flat_order import FlatOrder
from pipeloom.execute.stages.weights import StageWeights


def stage():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 5), nn.Linear(5, 2)).double()


def test_what_decays_comes_first_and_the_end_is_filled_up():
    order = FlatOrder.of(stage().named_parameters(), 4)
    assert list(order.shapes) == ["1.weight", "2.weight", "0.weight", "0.bias", "1.bias", "2.bias"]
    assert [place.decays for place in order.places] == [True, True, False, False, False, False]
    assert order.size == 40  # 38 elements


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("level", ["optimizer", "gradients", "full"])
def test_shards_together_are_the_parameters_and_each_element_decays_as_its_parameter(level, num_shards):
    expected = dict(stage().named_parameters())
    shards = [StageWeights(stage(), level, num_shards, index) for index in range(num_shards)]
    order = shards[0].order
    whole = order.views(torch.cat([one.shard for one in shards]))
    assert all(torch.equal(whole[name], parameter) for name, parameter in expected.items())
    marks = torch.zeros(order.size, dtype=torch.float64)
    for one in shards:
        assert sum(part.parameter.numel() for part in one.parts) == one.shard.numel()
        with torch.no_grad():
            for part in one.parts:
                part.parameter.fill_(1.0 if part.decays else 2.0)
    marks = order.views(torch.cat([one.shard for one in shards]))
    for name, parameter in expected.items():
        assert marks[name].unique().tolist() == [1.0 if parameter.ndim == 2 else 2.0]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
@pytest.mark.parametrize("matrices", [("1.weight",), ("2.weight", "1.weight")])
def test_whole_matrices_are_in_one_shard_and_nothing_is_lost(num_shards, matrices):
    expected = dict(stage().named_parameters())
    takes = lambda name, shape: name in matrices  # noqa: E731
    shards = [StageWeights(stage(), "full", num_shards, index, is_whole=takes) for index in range(num_shards)]
    order = shards[0].order
    assert order.size == num_shards * shards[0].shard.numel()
    views = order.views(torch.cat([one.shard for one in shards]))
    assert all(torch.equal(views[name], parameter) for name, parameter in expected.items())
    whole = {part.name: part for one in shards for part in one.parts if part.name is not None}
    assert {*whole} == {*matrices}
    assert all(torch.equal(part.parameter, expected[name]) for name, part in whole.items())
    assert all(part.parameter.grad.shape == expected[name].shape for name, part in whole.items())
    assert sum(part.parameter.numel() for one in shards for part in one.parts) == order.size


def test_without_sharding_the_optimizer_works_on_the_weights_that_compute():
    module = stage()
    weights = StageWeights(module, "none", 1, 0)
    with torch.no_grad():
        for part in weights.parts:
            part.parameter.fill_(7.0)
    assert all((parameter == 7.0).all() for parameter in module.parameters())


@pytest.mark.parametrize("level", ["none", "optimizer", "gradients"])
def test_only_weights_that_are_sharded_at_all_times_are_dropped(level):
    weights = StageWeights(stage(), level, 1, 0)
    weights.drop()
    assert weights.is_held
    shard = 0 if level == "none" else 38 * 8
    assert weights.weights_bytes - shard == weights.whole.untyped_storage().nbytes() == 38 * 8


def test_dropped_weights_hold_no_memory_and_come_back_to_the_same_storage():
    weights = StageWeights(stage(), "full", 2, 0)
    assert weights.weights_bytes - weights.shard.nbytes == weights.whole.untyped_storage().nbytes() == 0
    view = next(weights.module.parameters())
    weights.hold()
    weights.whole.fill_(3.0)
    assert weights.weights_bytes - weights.shard.nbytes == 38 * 8
    assert view.unique().tolist() == [3.0]


def test_gradients_add_up_in_the_buffer_from_zero():
    module = stage()
    weights = StageWeights(module, "gradients", 2, 1)
    buffer = torch.full((weights.order.size,), 9.0, dtype=torch.float64)
    weights.open_gradient(buffer)
    inputs = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(2):
        module(inputs).sum().backward()
    weights.close_gradient()
    plain = stage()
    plain(inputs).sum().backward()
    for name, view in weights.order.views(buffer).items():
        torch.testing.assert_close(view, 2 * dict(plain.named_parameters())[name].grad)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("level", ["none", "optimizer", "gradients", "full"])
def test_frozen_parameters_are_a_segment_without_gradient_and_update(level, dtype):
    expected = {name: one.clone() for name, one in stage().named_parameters()}
    frozen = {"0.weight", "0.bias", "1.weight"}

    def begun():
        module = stage()
        for name, one in module.named_parameters():
            one.requires_grad_(name not in frozen)
        return module

    shards = [StageWeights(begun(), level, 2, index, dtype=dtype) for index in range(2)]
    for one in shards:
        assert {*one.order.shapes} == {*expected} - frozen
        assert {*one.frozen.order.shapes} == frozen
        assert sum(part.parameter.numel() for part in one.parts) == one.shard.numel()
        assert one.frozen.shard.dtype == (dtype or torch.float64)
        assert len(one.gathers) == (2 if level == "full" else 1)
    held = [one.frozen.shard for one in shards]
    found = shards[0].frozen.order.views(torch.cat(held) if level == "full" else held[0])
    assert all(torch.equal(found[name], expected[name].to(dtype or torch.float64)) for name in frozen)


def test_a_stage_that_trains_nothing_has_no_part():
    module = stage().requires_grad_(requires_grad=False)
    weights = StageWeights(module, "full", 2, 1)
    assert weights.parts == []
    assert weights.gradients_bytes == 0
    assert [whole.numel() for whole, _ in weights.gathers] == [weights.frozen.order.size]
    assert weights.weights_bytes == weights.frozen.shard.nbytes
    weights.hold()
    assert weights.weights_bytes == weights.frozen.shard.nbytes + weights.frozen.nbytes


def test_a_rank_without_trained_weights_has_nothing_to_clip():
    for parameters in ([], [nn.Parameter(torch.ones(2), requires_grad=False)]):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
        clipped_step(optimizer, parameters, 2.0, 1.0)
