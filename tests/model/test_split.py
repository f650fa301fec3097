"""Stages: any partition has the whole model's names, weights, logits and gradients."""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeloom.config import ModelConfig
from pipeloom.model import TIED_NAME, Transformer, build_stage, num_pieces, stage_pieces

torch.set_num_threads(1)

VOCAB, NUM_TOKENS, NUM_LAYERS = 13, 6, 4
Family = Literal["llama", "gpt2"]
families = pytest.mark.parametrize("family", ["llama", "gpt2"])
partitions = pytest.mark.parametrize("partition", [(3, 3), (1, 4, 1), (1, 1, 1, 1, 1, 1), (4, 2), (2, 1, 3)])


def small(family: Family) -> ModelConfig:
    return ModelConfig(
        family=family, num_layers=NUM_LAYERS, hidden_size=24, num_heads=4, num_kv_heads=2, ffn_size=32
    ).resolve(VOCAB)


def build(family: Family, pieces: range, seed: int = 5, dtype: torch.dtype = torch.float64) -> Transformer:
    return build_stage(small(family), pieces, max_positions=NUM_TOKENS, seed=seed, dtype=dtype, device="cpu")


def whole_model(family: Family) -> Transformer:
    return build(family, range(num_pieces(small(family))))


def some_tokens() -> Tensor:
    return torch.randint(VOCAB, (3, NUM_TOKENS), generator=torch.Generator().manual_seed(0))


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def run_in_stages(stages: list[Transformer], tokens_BT: Tensor) -> Tensor:
    """Forward and backward, cut at every boundary as a pipeline cuts them; returns the logits."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    x = tokens_BT
    for stage in stages:
        inputs.append(x)
        outputs.append(stage(x))
        x = outputs[-1].detach().requires_grad_()
    loss_of(outputs[-1], tokens_BT).backward()
    for stage in reversed(range(len(stages) - 1)):
        outputs[stage].backward(inputs[stage + 1].grad)
    return outputs[-1]


@families
@partitions
def test_stages_equal_the_whole_model_exactly(family: Family, partition: tuple[int, ...]) -> None:
    whole, stages = whole_model(family), [build(family, pieces) for pieces in stage_pieces(partition)]
    logits_BTV = whole(some_tokens())
    loss_of(logits_BTV, some_tokens()).backward()
    assert torch.equal(run_in_stages(stages, some_tokens()), logits_BTV)
    for stage in stages:
        for name, weight in stage.named_parameters():
            gradient = whole.get_parameter(name).grad
            assert weight.grad is not None
            assert gradient is not None
            assert torch.equal(weight.grad, gradient), name
            assert gradient.abs().max() > 0 or name.endswith("key.bias"), name


@families
@partitions
def test_a_tied_head_computes_with_what_it_is_lent_and_collects_its_gradient(
    family: Family, partition: tuple[int, ...]
) -> None:
    config = replace(small(family), tied=True)
    build = partial(build_stage, config, max_positions=NUM_TOKENS, seed=5, dtype=torch.float64, device="cpu")
    whole, stages = build(range(6)), [build(pieces) for pieces in stage_pieces(partition)]
    assert [stage.borrows for stage in stages] == [False] * (len(stages) - 1) + [True]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    assert "head.output.weight" not in names
    with pytest.raises(AssertionError, match="call borrow first"):
        stages[-1](torch.zeros(1, NUM_TOKENS, 24, dtype=torch.float64))
    lent_VH = stages[0].get_parameter(TIED_NAME).detach().clone().requires_grad_()
    stages[-1].borrow(lent_VH)
    logits_BTV = whole(some_tokens())
    loss_of(logits_BTV, some_tokens()).backward()
    assert torch.equal(run_in_stages(stages, some_tokens()), logits_BTV)
    for stage in stages:
        for name, weight in stage.named_parameters():
            gradient = weight.grad + lent_VH.grad if name == TIED_NAME else weight.grad
            assert torch.allclose(gradient, whole.get_parameter(name).grad, rtol=1e-12, atol=1e-15), name


@families
def test_a_tied_head_on_the_meta_device_has_a_matrix_to_tell_shapes_with(family: Family) -> None:
    config = replace(small(family), tied=True)
    dtype = torch.bfloat16
    head = build_stage(config, range(4, 6), max_positions=NUM_TOKENS, seed=0, dtype=dtype, device="meta")
    logits_BTV = head(torch.empty(2, NUM_TOKENS, 24, dtype=dtype, device="meta"))
    assert (logits_BTV.shape, logits_BTV.dtype) == ((2, NUM_TOKENS, VOCAB), dtype)


@families
@partitions
def test_names_are_disjoint_and_complete(family: Family, partition: tuple[int, ...]) -> None:
    stages = [build(family, pieces) for pieces in stage_pieces(partition)]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole_model(family).named_parameters()]
    assert len(set(names)) == len(names)


@families
@partitions
def test_weights_do_not_depend_on_the_partition(family: Family, partition: tuple[int, ...]) -> None:
    whole = whole_model(family)
    for pieces in stage_pieces(partition):
        for name, weight in build(family, pieces).named_parameters():
            assert torch.equal(weight, whole.get_parameter(name)), name


@families
def test_weights_follow_the_rule_of_their_name(family: Family) -> None:
    config = ModelConfig(family=family, num_layers=8, hidden_size=64, num_heads=4).resolve(257)
    stage = build_stage(config, range(num_pieces(config)), max_positions=64, seed=0, dtype=torch.float32, device="cpu")
    for name, weight in stage.named_parameters():
        if name.endswith(".bias"):
            assert not weight.any()
        elif name.endswith("norm.weight"):
            assert (weight == 1).all()
        else:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            assert float(weight.detach().std()) == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.06), name


def test_seeds_and_names_give_different_weights() -> None:
    first, second = build("llama", range(6), seed=1), build("llama", range(6), seed=2)
    assert not torch.equal(first.get_parameter("head.output.weight"), second.get_parameter("head.output.weight"))
    query, other = (first.get_parameter(f"layers.{layer}.attention.query.weight") for layer in (0, 1))
    assert not torch.equal(query, other)


def test_types_hold_the_same_values() -> None:
    wide, narrow = build("gpt2", range(2, 3)), build("gpt2", range(2, 3), dtype=torch.bfloat16)
    for name, weight in narrow.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, wide.get_parameter(name).float().bfloat16())


def test_weights_leave_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    build("llama", range(6))
    assert torch.equal(torch.random.get_rng_state(), before)


@families
def test_meta_device_has_no_values(family: Family) -> None:
    stage = build_stage(small(family), range(6), max_positions=NUM_TOKENS, seed=0, dtype=torch.bfloat16, device="meta")
    weights = list(stage.parameters())
    assert weights
    assert all(weight.is_meta and weight.dtype == torch.bfloat16 for weight in weights)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_pieces_follow_the_partition(partition: list[int]) -> None:
    stages = stage_pieces(partition)
    assert [len(pieces) for pieces in stages] == partition
    assert [piece for pieces in stages for piece in pieces] == list(range(sum(partition)))


def test_a_stage_without_pieces_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        stage_pieces((2, 0, 1))
