"""The model's code is as lean as a plain one: operators and kept bytes of a forward and backward."""

from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from peers.plain import PlainLlama, plain_names
from pipeloom.model.transformer import Transformer
from pipeloom.workload.model import ModelConfig

CONFIG = ModelConfig(family="llama", num_layers=8, hidden_size=48, num_heads=6).resolve(61)
TOKENS = torch.arange(2 * 32).reshape(2, 32) % 61


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def models():
    """pipeloom's model, and a plain one with its weights."""
    ours, plain = Transformer(CONFIG, 32), PlainLlama(CONFIG, 32)
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            torch.nn.init.normal_(weight, std=0.1)
        for own, name in plain_names(CONFIG).items():
            plain.get_parameter(own).copy_(weights[name])
    return ours, plain


def loss_of(model):
    return functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())


def test_the_plain_model_is_the_same_function(models):
    ours, plain = models
    for model in models:
        loss_of(model).backward()
    assert torch.allclose(ours(TOKENS), plain(TOKENS), atol=1e-5)
    for own, name in plain_names(CONFIG).items():
        expected, found = plain.get_parameter(own).grad, ours.get_parameter(name).grad
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-6), name


def test_a_step_has_the_products_of_a_plain_loop_and_fewer_operators(models):
    counts = []
    for model in models:
        with Operators() as operators:
            loss_of(model).backward()
        counts.append(operators.counts)
    ours, plain = counts
    # A sum of gradients for a common input is part of its products.
    products = ours["aten.mm.default"] + ours["aten.addmm_.default"]
    assert products == plain["aten.mm.default"] == 3 * (7 * CONFIG.num_layers + 1)
    # A plain loop has its rotary table once and for all; a stage makes it in each forward.
    table = 20
    assert ours.total() <= plain.total() + table
    assert ours["aten.mul.Tensor"] <= plain["aten.mul.Tensor"]


def test_a_step_keeps_fewer_bytes_than_a_plain_loop(models):
    def kept_bytes(model):
        parameters = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model)
        return sum(found.values()), loss

    (ours, _), (plain, _) = map(kept_bytes, models)
    assert ours < plain
