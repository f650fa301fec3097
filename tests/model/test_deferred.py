"""Layers that defer the gradients of their weights: what is kept meanwhile, and that nothing is added before."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeloom.config import ModelConfig
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.stages.stage import Portion, Stage
from pipeloom.model import build_stage
from pipeloom.model.compile import compile_pieces
from pipeloom.model.deferred import defer, filing, leaves_of
from pipeloom.system.toolchain import toolchain_problems

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2, 16, 24, 4, 2, 30
ROWS, NUM_TOKENS = 3, 8
TOKENS = ROWS * NUM_TOKENS
KV = HIDDEN * KV_HEADS // HEADS
CONFIG = ModelConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=KV_HEADS, ffn_size=FFN
).resolve(VOCAB)
GPT2 = replace(CONFIG, family="gpt2", norm_eps=1e-5)
BLOCKS = replace(CONFIG, density=0.5, density_block=4)
MIDDLE, ALL = range(1, 1 + LAYERS), range(LAYERS + 2)


def make(config=CONFIG, pieces=MIDDLE, recompute="none", dtype=torch.float64):
    model = build_stage(config, pieces, max_positions=NUM_TOKENS, seed=0, dtype=dtype, device="cpu")
    model.set_recompute((recompute,) * LAYERS)
    return model


def stage_of(model, *, splits=True):
    is_first, is_last = model.has_embedding, model.has_head
    shape = (ROWS, NUM_TOKENS, VOCAB if is_last else HIDDEN)
    spec = TensorSpec(shape, next(model.parameters()).dtype)
    return Stage(model, 0, spec, needs_input_gradient=not is_first, splits=splits)


def tensor_for(model):
    torch.manual_seed(1)
    if model.has_embedding:
        return torch.randint(VOCAB, (ROWS, NUM_TOKENS))
    return torch.randn(ROWS, NUM_TOKENS, HIDDEN, dtype=next(model.parameters()).dtype)


def gradient_for(model):
    torch.manual_seed(2)
    return torch.randn(ROWS, NUM_TOKENS, VOCAB if model.has_head else HIDDEN, dtype=next(model.parameters()).dtype)


def halves(model, times=1):
    """The gradient of the input by the halves of a backward, and the stage between them, for each time."""
    stage = stage_of(model)
    for number in range(times):
        part = Portion(number)
        stage.forward(part, tensor_for(model), None, trains=True)
        made = stage.backward_input(part, gradient_for(model))
        yield made, stage
        stage.backward_weight(part)


def whole(model):
    stage = stage_of(model, splits=False)
    stage.forward(Portion(0), tensor_for(model), None, trains=True)
    return stage.backward(Portion(0), gradient_for(model))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("pieces", [MIDDLE, ALL, range(2), range(1, 4)])
@pytest.mark.parametrize("config", [CONFIG, GPT2, replace(CONFIG, tied=True), BLOCKS])
def test_the_first_half_adds_to_no_gradient_and_the_second_makes_them_all(config, pieces, recompute):
    if config.tied and (0 in pieces) != (LAYERS + 1 in pieces):
        pytest.skip("half of a tied matrix")
    model, expected = make(config, pieces, recompute), make(config, pieces)
    own = whole(expected)
    whole(expected)
    for made, _ in halves(model, times=2):
        torch.testing.assert_close(made, own, rtol=1e-9, atol=0)
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for p, q, first in zip(model.parameters(), expected.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(first, q.grad / 2, rtol=1e-9, atol=1e-12)  # nothing of the second micro-batch yet


def kept_bytes(config):
    """Of a stage of layers: inputs and output gradients of the linear layers, and gradients of norms and biases."""
    inputs = HIDDEN + HIDDEN + HIDDEN + FFN  # of query, key and value; output; gate and up; down
    outputs = HIDDEN + 2 * KV + HIDDEN + (FFN if config.family == "gpt2" else 2 * FFN) + HIDDEN
    biases = HIDDEN + 2 * KV + HIDDEN + FFN + HIDDEN + 2 * HIDDEN if config.family == "gpt2" else 0
    return LAYERS * 8 * (TOKENS * (inputs + outputs) + biases + 2 * HIDDEN)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("config", [CONFIG, GPT2, BLOCKS])
def test_between_the_halves_inputs_are_kept_once_and_nothing_else_of_the_graph(config, recompute):
    for _, stage in halves(make(config, recompute=recompute), times=1):
        assert stage.tally.pending_bytes == kept_bytes(config)
        assert (stage.tally.held, stage.tally.pending, stage.tally.held_bytes) == (1, 1, 0)
    assert (stage.tally.held, stage.tally.pending, stage.tally.pending_bytes) == (0, 0, 0)


def test_what_autograd_kept_is_freed_with_the_first_half():
    model, seen = make(), []
    stage = stage_of(model)

    def keep(tensor):
        seen.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.forward(Portion(0), tensor_for(model), None, trains=True)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    stage.backward_input(Portion(0), gradient_for(model))
    filed = {t.untyped_storage()._cdata for one in stage._pending[Portion(0)].filed for t in one.kept}
    alive = {ref.cdata for ref in seen if not ref.expired()}
    assert len({ref.cdata for ref in seen}) > len(alive)
    assert alive - parameters <= filed


def test_the_second_half_needs_no_weights():
    model, expected = make(), make()
    whole(expected)
    for _ in halves(model):
        for p in model.parameters():
            p.untyped_storage().resize_(0)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def test_a_borrowed_matrix_gets_its_gradient_with_the_second_half():
    config = replace(CONFIG, tied=True)
    model, lender = make(config, range(2, LAYERS + 2)), make(config, range(1))
    lent = lender.embedding.tokens.weight.detach().clone().requires_grad_()
    collected = []
    lent.register_post_accumulate_grad_hook(lambda weight: collected.append(weight.grad))
    model.borrow(lent)
    for _ in halves(model):
        assert collected == []
    assert [one.shape for one in collected] == [(VOCAB, HIDDEN)]


def test_a_module_that_does_not_defer_is_split_too_with_all_gradients_made_first():
    module = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    stage = Stage(module, 1, TensorSpec((2, HIDDEN), torch.float64), needs_input_gradient=True, splits=True)
    stage.forward(Portion(0), torch.ones(2, HIDDEN, dtype=torch.float64), None, trains=True)
    stage.backward_input(Portion(0), torch.ones(2, HIDDEN, dtype=torch.float64))
    assert stage.tally.pending_bytes == 8 * (HIDDEN + 1) * HIDDEN
    assert module.weight.grad is None
    stage.backward_weight(Portion(0))
    assert module.bias.grad.tolist() == [2.0] * HIDDEN


def test_evaluation_defers_nothing_and_a_backward_that_nobody_expects_is_refused():
    model = make()
    defer(model)
    with torch.no_grad():
        assert not model(tensor_for(model)).requires_grad
    with pytest.raises(AssertionError, match="defers its weight gradient outside"):
        model(tensor_for(model)).sum().backward()
    with filing(leaves_of(model)) as filed:
        model(tensor_for(model)).sum().backward()
    assert len(filed) == 7 * LAYERS


def test_a_step_that_failed_leaves_nothing_behind():
    for _, stage in halves(make()):
        stage.forget()
        assert (stage.tally.held, stage.tally.pending_bytes) == (0, 0)
        break


@pytest.mark.long  # tests/execute/test_split_backward.py trains with generated code
@pytest.mark.timeout(600)  # a third of a minute where the compiler has not seen it, minutes where others need the cores
@pytest.mark.skipif(bool(toolchain_problems("cpu")), reason="; ".join(toolchain_problems("cpu")))
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # tracing reads it, and continues
@pytest.mark.parametrize("config", [CONFIG, GPT2])
def test_generated_code_files_what_it_does_not_overwrite(config):
    """The compiler uses memory again once nothing of its own reads it."""
    torch._dynamo.reset()
    model, expected = make(config, ALL), make(config, ALL)
    whole(expected)
    compile_pieces(model, "inductor")
    for _ in halves(model):
        pass
    largest = max(float(q.grad.abs().max()) for q in expected.parameters())
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12 * largest)
