"""Layers whose products add their weight gradients to the sum: the gradients of autograd, without its additions."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.config import ModelConfig
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.model import build_stage
from pipeloom.model.deferred import OwnGradients, gradients_by_autograd
from pipeloom.model.parallel_layers import ColumnParallelLinear

VOCAB, SEQ = 30, 8
CONFIG = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=24).resolve(VOCAB)
BLOCKS = replace(CONFIG, density=0.5, density_block=4)
MODELS = [CONFIG, replace(CONFIG, family="gpt2", norm_eps=1e-5), replace(CONFIG, tied=True), BLOCKS]


def make(config, recompute="none", dtype=torch.float64):
    model = build_stage(config, range(4), max_positions=SEQ, seed=0, dtype=dtype, device="cpu")
    model.set_recompute((recompute,) * 2)
    return model


def backwards(model, count=2):
    if model.head.output is None:
        model.borrow(model.embedding.tokens.weight)
    for seed in range(count):
        tokens = torch.randint(VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(seed))
        model(tokens).square().mean().backward()


def with_weights(model, **options):
    weights = StageWeights(model, "none", 1, 0, **options)
    weights.open_gradient(torch.empty(weights.order.size, dtype=torch.float64))
    return weights


@pytest.fixture
def _adds_all(monkeypatch):
    monkeypatch.setattr(OwnGradients, "least_added", 0)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_adds_all")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("config", MODELS, ids=["llama", "gpt2", "tied", "blocks"])
def test_sums_of_micro_batches_are_those_of_autograd(config, recompute):
    adding, plain = make(config, recompute), make(config, recompute)
    backwards(plain)
    with_weights(adding)
    backwards(adding)
    for (name, one), other in zip(adding.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.usefixtures("_adds_all")
def test_a_product_adds_where_autograd_makes_a_gradient_and_then_adds_it():
    counts = {}
    for name in ("adds", "autograd"):
        model = make(CONFIG)
        with_weights(model)
        with Names() as names:
            if name == "adds":
                backwards(model, 1)
            else:
                with gradients_by_autograd(model):
                    backwards(model, 1)
        counts[name] = names.counts
    # Seven matrices of each layer, and the head's; the embedding adds its rows.
    assert counts["autograd"]["add_"] - counts["adds"]["add_"] == 2 * 7 + 2
    assert counts["adds"]["index_add_"] == 1
    assert counts["adds"].total() < counts["autograd"].total()


def test_small_frozen_and_mixed_weights_are_left_to_autograd():
    def adding(model):
        return [part for part in model.modules() if getattr(part, "adds", False)]

    small = make(CONFIG)
    StageWeights(small, "none", 1, 0)
    # Column-parallel layers are computed with their neighbors.
    assert all(isinstance(part, ColumnParallelLinear) for part in adding(small))
    assert len(adding(small)) == 2 * 5 + 1
    large = replace(CONFIG, ffn_size=2**18 // 16)
    model = make(large, dtype=torch.float32)
    for parameter in model.layers["0"].parameters():
        parameter.requires_grad = False
    StageWeights(model, "none", 1, 0)
    ours, attention = model.layers["1"].feed_forward, model.layers["1"].attention
    feed_forward = [ours.gate, ours.up, ours.down]
    others = [attention.query, attention.key, attention.value, model.head.output]
    assert {id(part) for part in adding(model)} == {id(part) for part in (*feed_forward, *others)}
    mixed = make(large, dtype=torch.float32)
    StageWeights(mixed, "none", 1, 0, dtype=torch.bfloat16)
    assert adding(mixed) == []


@pytest.mark.usefixtures("_adds_all")
def test_without_a_sum_the_backward_returns_the_gradients():
    adding, plain = make(CONFIG), make(CONFIG)
    weights = with_weights(adding)
    weights.close_gradient()
    for model in (adding, plain):
        backwards(model, 1)
    for one, other in zip(adding.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
