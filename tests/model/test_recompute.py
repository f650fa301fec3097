"""What a layer keeps for its backward, by what it recomputes, and the same gradients whatever that is."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeloom.config import ModelConfig
from pipeloom.cost.memory import kept_bytes
from pipeloom.cost.software import Software
from pipeloom.model import build_stage
from pipeloom.workload.model import shape_of
from pipeloom.workload.run import Run

LAYERS, SEQS, TOKENS = 4, 2, 64


def model_of(family, num_kv_heads=2):
    sizes = {"num_layers": LAYERS, "hidden_size": 64, "num_heads": 4, "num_kv_heads": num_kv_heads, "vocab_size": 50}
    return ModelConfig(family=family, **sizes).resolve(50)


def layers_of(model, recompute, dtype=torch.float32):
    stage = build_stage(
        model, range(1, LAYERS + 1), max_positions=TOKENS, seed=0, dtype=dtype, device=torch.device("cpu")
    )
    stage.set_recompute(recompute if isinstance(recompute, tuple) else (recompute,) * LAYERS)
    return stage


def kept(stage, dtype=torch.float32):
    """Bytes of every storage that autograd keeps of a forward, parameters left out; for each layer."""
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    tensor = torch.randn(SEQS, TOKENS, 64, dtype=dtype, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stage(tensor)
    return sum(sizes.values()) / LAYERS


def predicted(model, recompute, **changes):
    """What the cost model computes for a layer."""
    run = Run(
        shape=shape_of(model),
        seq=TOKENS,
        micro_batch=SEQS,
        recompute=recompute,
        precision="fp32",
        **changes,
    )
    return kept_bytes(run, Software(name="", norm_copy_bytes=4, fuses_gates=True))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_layer_keeps_what_the_cost_model_says(family, num_kv_heads, recompute):
    """Within 2 %: statistics of norms, one number for each token and head of attention, and rotary tables."""
    model = model_of(family, num_kv_heads)
    found, expected = kept(layers_of(model, recompute)), predicted(model, recompute)
    assert expected <= found <= 1.02 * expected


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_more_recomputation_keeps_less(family, kernel):
    model = model_of(family)
    with sdpa_kernel(kernel):
        none, selective, full = (kept(layers_of(model, recompute)) for recompute in ("none", "selective", "full"))
    assert full < selective < none
    scores = SEQS * model.num_heads * TOKENS * TOKENS * 4
    statistics = SEQS * model.num_heads * TOKENS * 4
    if kernel is SDPBackend.MATH:
        assert none - selective >= scores  # softmax's output; the scaled copies of queries and keys go as well
    else:
        assert none - selective == statistics  # of a kernel that keeps no scores, this is all there is to save


def test_each_layer_may_choose():
    model = model_of("llama")
    mixed = kept(layers_of(model, ("none", "full", "full", "selective")))
    each = [kept(layers_of(model, recompute)) for recompute in ("none", "full", "full", "selective")]
    assert mixed == pytest.approx(sum(each) / 4, rel=0.01)  # rotary tables are shared


@pytest.mark.parametrize("recompute", ["selective", "full", ("full", "none", "selective", "full")])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_the_same_bits(family, recompute):
    found = []
    for choice in ("none", recompute):
        stage = layers_of(model_of(family), choice, torch.float64)
        torch.manual_seed(1)
        tensor = torch.randn(SEQS, TOKENS, 64, dtype=torch.float64, requires_grad=True)
        stage(tensor).square().sum().backward()
        found.append([tensor.grad, *(p.grad for p in stage.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_without_gradients_nothing_is_recomputed(recompute, monkeypatch):
    monkeypatch.setattr("pipeloom.model.run_part.checkpoint", None)
    stage = layers_of(model_of("gpt2"), recompute)
    with torch.no_grad():
        stage(torch.randn(SEQS, TOKENS, 64))


def test_the_core_of_attention_runs_twice_and_no_projection_does(monkeypatch):
    calls = {"core": 0, "linear": 0}

    def counted(name, function):
        def call(*inputs, **settings):
            calls[name] += 1
            return function(*inputs, **settings)

        return call

    functional = torch.nn.functional
    for recompute, core, linear in (("none", 1, 1), ("selective", 2, 1), ("full", 2, 2)):
        calls.update(core=0, linear=0)
        with monkeypatch.context() as patch:
            core_of = counted("core", functional.scaled_dot_product_attention)
            patch.setattr(functional, "scaled_dot_product_attention", core_of)
            patch.setattr(functional, "linear", counted("linear", functional.linear))
            tensor = torch.randn(SEQS, TOKENS, 64, requires_grad=True)
            layers_of(model_of("gpt2"), recompute)(tensor).sum().backward()
        assert calls["core"] == core * LAYERS
        matrices = 6 * LAYERS
        # full ends with the last product's input, so that one is not done again
        assert calls["linear"] == matrices if linear == 1 else matrices < calls["linear"] <= 2 * matrices
