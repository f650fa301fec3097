"""Experts: the block and its balance, beside what is written out here."""

from dataclasses import replace

import pytest
import torch

from pipeloom.config import ModelConfig
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.stages.stage import Portion, Stage
from pipeloom.model import build_stage
from pipeloom.model.deferred import OwnGradients
from pipeloom.model.experts import ExpertFeedForward, balances_of

MODEL = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=4, ffn_size=24, experts=5, expert_ffn=12, balance="none"
).resolve(50)
LAYERS = range(1, 3)


def block(model=MODEL, seed=0):
    """A block with random router, of a model in float64."""
    stage = build_stage(model, LAYERS, max_positions=8, seed=seed, dtype=torch.float64, device="cpu")
    found = stage.layers["1"].feed_forward
    assert isinstance(found, ExpertFeedForward)
    with torch.no_grad():
        found.router.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return found


def draw(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scores_of(found, x):
    return (x @ found.router.weight.t()).softmax(-1)


def written_out(found, x, taken=2):
    """Every expert on every token, weighted by the scores of those that the token takes."""
    scores = scores_of(found, x)
    kept = torch.zeros_like(scores).scatter(-1, scores.topk(taken).indices, 1.0) * scores
    weights = kept / kept.sum(-1, keepdim=True)
    every = torch.stack([expert(x) for expert in found.experts.values()], -1)
    total = (every * weights.unsqueeze(-2)).sum(-1)
    return total if found.shared is None else total + found.shared(x)


@pytest.mark.parametrize("shared", [None, 2])
def test_a_block_is_the_weighted_sum_of_the_experts_of_each_token(shared):
    found = block(replace(MODEL, shared_experts=shared))
    results = []
    for compute in (found, lambda x: written_out(found, x)):
        x = draw(3, 7, 16).requires_grad_()
        found.zero_grad()
        output = compute(x)
        (output * draw(3, 7, 16, seed=2)).sum().backward()
        results.append([output.detach(), x.grad, *(one.grad for one in found.parameters())])
    for own, expected in zip(*results, strict=True):
        assert (own - expected).abs().max() < 1e-12


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    found = block()
    with torch.no_grad():
        found.router.weight[3] = -1e3 * torch.ones(16)
    found(draw(2, 5, 16).abs()).sum().backward()
    assert found.experts["3"].up.weight.grad.abs().max() == 0 < found.experts["0"].up.weight.grad.abs().max()


def stage_of(model, *, splits):
    stage = build_stage(model, LAYERS, max_positions=8, seed=0, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for name, one in stage.named_parameters():
            if "router" in name:
                one.normal_(generator=torch.Generator().manual_seed(3))
    return Stage(stage, 1, TensorSpec((2, 7, 16), torch.float64), needs_input_gradient=True, splits=splits)


def gradients(model, inputs, outputs, *, splits, again):
    """Of a stage: all forwards, then all backwards. ``again``: what repeats forwards."""
    stage = stage_of(model, splits=splits)
    stage.module.set_recompute(["full" if again == "layers" else "none"] * 2)
    for one in balances_of(stage.module).values():
        one.begin(torch.device("cpu"))
        one.num_tokens = sum(x[..., 0].numel() for x in inputs)
    of_inputs = []
    for number, x in enumerate(inputs):
        forward = stage.forward_once if again == "stage" else stage.forward
        forward(Portion(number), x, None, **({} if again == "stage" else {"trains": True}))
    for number, given in enumerate(outputs):
        if again == "stage":
            stage.recompute(Portion(number), None)
        of_inputs.append(stage.backward(Portion(number), given))
    return of_inputs, {name: one.grad for name, one in stage.module.named_parameters()}, stage.module


def expected(model, inputs, outputs, module, share):
    """The same by autograd alone: the loss of the whole batch, or of each share of it, is written out."""
    for one in balances_of(module).values():
        one.kind = "none"
    found = {"1": [], "0": []}
    hooks = [
        module.layers[name].feed_forward.router.register_forward_hook(
            lambda _, __, scores, name=name: found[name].append(scores)
        )
        for name in found
    ]
    for part in module.modules():
        if isinstance(part, OwnGradients):
            part.defers = False
    module.zero_grad()
    leaves = [x.clone().requires_grad_() for x in inputs]
    total = sum((module(x) * given).sum() for x, given in zip(leaves, outputs, strict=True))
    for every in found.values():
        groups = [every] if share == "batch" else [[one] for one in every]
        for group in groups:
            scores = torch.cat([one.flatten(0, -2) for one in group])
            chosen = scores.detach().topk(2).indices.flatten()
            loads = torch.zeros(5, dtype=torch.float64).index_add(0, chosen, torch.ones(len(chosen)).double())
            tokens = sum(one[..., 0].numel() for one in every)
            loss = 5 * ((loads / len(chosen)) * scores.sum(0) / tokens).sum()
            total = total + model.balance_weight * loss
    for hook in hooks:
        hook.remove()
    total.backward()
    return [one.grad for one in leaves], {name: one.grad for name, one in module.named_parameters()}


@pytest.mark.parametrize("again", ["nothing", "layers", "stage"])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("share", ["batch", "microbatch"])
def test_the_gradient_of_the_balance_loss_is_that_of_the_loss_written_out(share, splits, again):
    model = replace(MODEL, balance=share, balance_weight=3.0)
    inputs, outputs = ([draw(2, 7, 16, seed=10 * seed + part) for part in range(3)] for seed in (1, 2))
    of_inputs, of_weights, module = gradients(model, inputs, outputs, splits=splits, again=again)
    inputs_of, weights_of = expected(model, inputs, outputs, module, share)
    for own, other in zip(of_inputs, inputs_of, strict=True):
        assert (own - other).abs().max() < 1e-12
    for name, other in weights_of.items():
        assert (of_weights[name] - other).abs().max() < 1e-12, name
    without, _, _ = gradients(replace(model, balance="none"), inputs, outputs, splits=splits, again=again)
    assert (without[0] - of_inputs[0]).abs().max() > 1e-4


def test_biases_change_the_choice_and_not_the_weights_and_move_against_the_loads():
    found = block(replace(MODEL, balance="bias", balance_rate=0.25))
    balance, x = found.balance, draw(4, 8, 16)
    assert (found(x) - written_out(found, x)).abs().max() < 1e-12
    balance.begin(torch.device("cpu"))
    balance.is_counting = True
    found(x)
    counts = balance.counts.clone()
    assert counts.sum() == 4 * 8 * 2
    balance.move()
    assert torch.equal(balance.bias, 0.25 * (counts.sum() / 5 - counts).sign())
    scores = scores_of(found, x)
    chosen = (scores + balance.bias).topk(2).indices
    assert torch.equal(balance.choose(scores), chosen)
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    every = torch.stack([expert(x) for expert in found.experts.values()], -2)
    taken = every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, 16))
    assert (found(x) - (taken * weights.unsqueeze(-1)).sum(-2)).abs().max() < 1e-12


CAPACITY = replace(MODEL, expert_capacity=0.75, shared_experts=1)


def with_capacity(found, x, most, taken=2):
    """Every expert on every token; of those that chose it the first so many, in the order of the micro-batch."""
    scores = scores_of(found, x)
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(taken).indices, 1.0)
    weights = chosen * scores / (chosen * scores).sum(-1, keepdim=True)
    before = chosen.flatten(0, 1).cumsum(0).view_as(chosen)
    every = torch.stack([expert(x) for expert in found.experts.values()], -1)
    return (every * (weights * (before <= most)).unsqueeze(-2)).sum(-1) + found.shared(x), chosen


def test_an_expert_takes_the_first_tokens_up_to_its_capacity():
    found, results = block(CAPACITY), []
    most = 7  # 0.75 x 3 x 7 tokens x 2 / 5 experts, rounded up
    for compute in (found, lambda x: with_capacity(found, x, most)[0]):
        x = draw(3, 7, 16).requires_grad_()
        found.zero_grad()
        output = compute(x)
        (output * draw(3, 7, 16, seed=2)).sum().backward()
        results.append([output.detach(), x.grad, *(one.grad for one in found.parameters())])
    for own, expected in zip(*results, strict=True):
        assert (own - expected).abs().max() < 1e-12
    assert (results[0][0] - written_out(found, draw(3, 7, 16))).abs().max() > 1e-5
    _, chosen = with_capacity(found, draw(3, 7, 16), most)
    found.balance.begin(torch.device("cpu"))
    found.balance.is_counting = True
    found(draw(3, 7, 16))
    loads = chosen.sum((0, 1))
    assert torch.equal(found.balance.counts, loads.long())
    assert found.balance.dropped == pytest.approx(float((loads - most).clamp(min=0).sum() / 42))
    assert found.balance.dropped > 0


def test_nothing_is_dropped_outside_of_training_or_within_the_capacity():
    found, x = block(CAPACITY), draw(3, 7, 16)
    found.eval()
    assert (found(x) - written_out(found, x)).abs().max() < 1e-12
    roomy = block(replace(CAPACITY, expert_capacity=2.5))  # 5 / 2 experts: all tokens fit into one
    assert (roomy(x) - written_out(roomy, x)).abs().max() < 1e-12


@pytest.mark.parametrize(("factor", "tokens", "most"), [(1.0, 20, 8), (1.1, 50, 22), (0.5, 21, 5), (1.25, 3, 2)])
def test_a_capacity_is_rounded_up(factor, tokens, most):
    assert replace(MODEL, expert_capacity=factor).expert_layout.most_tokens(tokens) == most
