"""Compiled stages: the same gradients, with weights that are dropped and gathered and with layers that recompute.

Without a setting nothing is generated, only traced (``aot_eager``): that needs no compiler.
"""

import pytest
import torch
from thinned import thinned
from torch._dynamo.utils import counters

from pipeloom.config import ModelConfig
from pipeloom.model import build_stage
from pipeloom.model.compile import as_written, compile_pieces
from pipeloom.system.toolchain import toolchain_problems

LAYERS = 3
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # tracing reads it, and continues


@pytest.fixture(autouse=True)
def _forgotten():
    torch._dynamo.reset()
    counters.clear()


def model_of(recompute, **sizes):
    config = ModelConfig(num_layers=LAYERS, hidden_size=16, num_heads=2, vocab_size=30, **sizes).resolve(30)
    model = build_stage(
        config, range(LAYERS + 2), max_positions=8, seed=0, dtype=torch.float64, device=torch.device("cpu")
    )
    model.set_recompute(recompute)
    return model


def gradients(model):
    tokens = torch.arange(16).view(2, 8)
    model.zero_grad()
    model(tokens).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compared(recompute, backend, **sizes):
    """Worst relative difference to the model as it is written, over two calls."""
    model, expected = model_of(recompute, **sizes), gradients(model_of(("none",) * LAYERS, **sizes))
    compile_pieces(model, backend)
    worst = 0.0
    for _ in range(2):
        found = gradients(model)
        assert found.keys() == expected.keys()
        worst = max(worst, *(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()))
    return worst


def test_layers_share_their_code_and_every_gradient_is_the_same():
    assert compared(("none",) * LAYERS, "aot_eager") < 1e-9
    assert counters["stats"]["unique_graphs"] == 3  # embedding, layer, head


def test_layers_that_recompute_compile_too():
    assert compared(("selective", "full", "none"), "aot_eager") < 1e-9


def test_experts_run_as_they_are_written_in_compiled_layers():
    """Two parts of a layer, before and behind them, whatever the number of tokens of an expert."""
    sizes = {"experts": 4, "shared_experts": 1, "balance": "none"}
    assert compared(("none", "full", "none"), "aot_eager", **sizes) < 1e-9
    num_graphs = counters["stats"]["unique_graphs"]
    model = model_of(("none",) * LAYERS, **sizes)
    compile_pieces(model, "aot_eager")
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randint(30, (2, 8))).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.timeout(600)  # a third of a minute where the compiler has not seen it, minutes where others need the cores
@pytest.mark.skipif(bool(toolchain_problems("cpu")), reason="; ".join(toolchain_problems("cpu")))
@pytest.mark.parametrize("recompute", thinned([(("none",),), (("full", "none"),)], 2), ids="-".join)
def test_generated_code_computes_the_same(recompute):
    num_layers = len(recompute)
    config = ModelConfig(family="gpt2", num_layers=num_layers, hidden_size=16, num_heads=2, vocab_size=30).resolve(30)
    found = []
    for is_compiled in (False, True):
        stage = build_stage(
            config, range(1, 1 + num_layers), max_positions=8, seed=0, dtype=torch.float64, device="cpu"
        )
        stage.set_recompute(recompute)
        if is_compiled:
            compile_pieces(stage, "inductor")
        torch.manual_seed(1)
        tensor = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
        stage(tensor).square().sum().backward()
        found.append([tensor.grad, *(p.grad for p in stage.parameters())])
    largest = max(one.abs().max() for one in found[0])  # the gradient of the keys' bias is zero but for rounding
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12 * float(largest))


def test_as_written_nothing_is_compiled():
    model = model_of(("none",) * LAYERS)
    compile_pieces(model, "aot_eager")
    with as_written():
        gradients(model)
    assert counters["stats"]["unique_graphs"] == 0
