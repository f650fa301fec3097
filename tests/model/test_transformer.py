"""The network alone: causality, positions, grouped queries, names, and what it refuses."""

# ruff: noqa: N806 (upper-case letters in names are shapes)

from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeloom.config import ModelConfig
from pipeloom.errors import UserError
from pipeloom.model.attention import Attention
from pipeloom.model.rotary import Rotary
from pipeloom.model.split import build_stage
from pipeloom.model.transformer import Transformer, num_pieces

torch.set_num_threads(1)

VOCAB, NUM_TOKENS = 17, 7
Family = Literal["llama", "gpt2"]
families = pytest.mark.parametrize("family", ["llama", "gpt2"])


def small(family: Family, num_kv_heads: int | None = None, head_size: int | None = None) -> ModelConfig:
    heads = {"num_heads": 4, "num_kv_heads": num_kv_heads, "head_size": head_size}
    return ModelConfig(family=family, num_layers=3, hidden_size=16, **heads, ffn_size=24).resolve(VOCAB)


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, max_positions: int = NUM_TOKENS) -> Transformer:
    pieces = range(num_pieces(config))
    return build_stage(config, pieces, max_positions=max_positions, seed=1, dtype=dtype, device="cpu")


def some_tokens(num_sequences: int = 2) -> Tensor:
    return torch.randint(VOCAB, (num_sequences, NUM_TOKENS), generator=torch.Generator().manual_seed(0))


@families
@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_logits_do_not_depend_on_later_tokens(family: Family, num_kv_heads: int | None) -> None:
    model, tokens_BT = build(small(family, num_kv_heads)), some_tokens()
    logits_BTV = model(tokens_BT)
    assert logits_BTV.shape == (2, NUM_TOKENS, VOCAB)
    for position in range(NUM_TOKENS):
        changed_BT = tokens_BT.clone()
        changed_BT[:, position] = (changed_BT[:, position] + 1) % VOCAB
        changed_BTV = model(changed_BT)
        torch.testing.assert_close(changed_BTV[:, :position], logits_BTV[:, :position], rtol=1e-12, atol=1e-12)
        assert not torch.equal(changed_BTV[:, position], logits_BTV[:, position])


@families
def test_logits_depend_on_the_order_of_earlier_tokens(family: Family) -> None:
    model, tokens_BT = build(small(family)), torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    first_TV, second_TV = model(tokens_BT)
    assert not torch.allclose(first_TV[-1], second_TV[-1], rtol=1e-6, atol=1e-9)


@families
def test_shorter_sequences_than_max_positions_give_the_same_logits(family: Family) -> None:
    config, tokens_BT = small(family), some_tokens()
    model = build(config, max_positions=32)
    torch.testing.assert_close(model(tokens_BT[:, :3]), model(tokens_BT)[:, :3], rtol=1e-12, atol=1e-12)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 10), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_turned_products_depend_on_distance_only(query_at: int, key_at: int, shift: int, seed: int) -> None:
    table = Rotary.make(torch.arange(20), 8, 100.0, dtype=torch.float64)
    query_D, key_D = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    query_TD, key_TD = (table.turn(vector_D.expand(1, 20, 1, 8))[0, :, 0] for vector_D in (query_D, key_D))
    here = query_TD[query_at] @ key_TD[key_at]
    there = query_TD[query_at + shift] @ key_TD[key_at + shift]
    torch.testing.assert_close(here, there, rtol=0, atol=1e-12)
    torch.testing.assert_close(query_TD.norm(dim=-1), query_D.norm().expand(20), rtol=1e-12, atol=0)


def test_llama_attention_depends_on_relative_position_only() -> None:
    attention = build(small("llama")).layers["0"].get_submodule("attention").double()
    x_BTH = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = Rotary.make(torch.arange(30), 4, 10000.0, dtype=torch.float64)
    near, far = (Rotary(*(part_TR[begin : begin + 5] for part_TR in table)) for begin in (0, 25))
    torch.testing.assert_close(attention(x_BTH, near), attention(x_BTH, far), rtol=1e-12, atol=1e-12)


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_queries_equal_repeated_heads(family: Family, dtype: torch.dtype) -> None:
    grouped = build(small(family, num_kv_heads=2), dtype)
    repeated = build(small(family), dtype)
    state = grouped.state_dict()
    for name in state:
        if ".key." in name or ".value." in name:
            state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    for model in (grouped, repeated):
        model(some_tokens()).square().sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(grouped(some_tokens()), repeated(some_tokens()), rtol=tolerance, atol=tolerance)
    for name, weight in repeated.named_parameters():
        expected, found = weight.grad, grouped.get_parameter(name).grad
        assert expected is not None
        assert found is not None
        if ".key." in name or ".value." in name:
            expected = expected.unflatten(0, (2, 2, 4)).sum(1).flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=10 * tolerance)


def test_attention_equals_the_formula() -> None:
    attention = build(small("gpt2")).layers["1"].get_submodule("attention")
    assert isinstance(attention, Attention)
    x_BTH = torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    heads = []
    for head in range(4):
        query_TD, key_TD, value_TD = (
            part(x_BTH)[0, :, 4 * head : 4 * head + 4] for part in (attention.query, attention.key, attention.value)
        )
        hidden_TT = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores_TT = (query_TD @ key_TD.T / 2).masked_fill(hidden_TT, float("-inf"))
        heads.append(scores_TT.softmax(-1) @ value_TD)
    expected_BTH = attention.output(torch.cat(heads, dim=-1))[None]
    torch.testing.assert_close(attention(x_BTH, None), expected_BTH, rtol=1e-10, atol=1e-12)


def test_parameter_names_are_global() -> None:
    assert set(dict(build(small("llama")).named_parameters())) == {
        "embedding.tokens.weight",
        "head.norm.weight",
        "head.output.weight",
        *(
            f"layers.{layer}.{name}.weight"
            for layer, name in product(
                range(3),
                [
                    "attention_norm",
                    *(f"attention.{part}" for part in ("query", "key", "value", "output")),
                    "feed_forward_norm",
                    *(f"feed_forward.{part}" for part in ("gate", "up", "down")),
                ],
            )
        ),
    }
    names = set(dict(build(small("gpt2")).named_parameters()))
    assert {"embedding.positions.weight", "layers.2.attention.query.bias", "head.norm.bias"} <= names
    assert "layers.0.feed_forward.gate.weight" not in names


@families
def test_a_part_has_its_pieces_only(family: Family) -> None:
    config = small(family)
    middle = Transformer(config, NUM_TOKENS, range(2, 4))
    assert not middle.has_embedding
    assert not middle.has_head
    assert {name.split(".")[1] for name, _ in middle.named_parameters()} == {"1", "2"}
    whole = Transformer(config, NUM_TOKENS)
    assert whole.has_embedding
    assert whole.has_head
    assert not list(whole.buffers())


@families
def test_meta_device_gives_shapes(family: Family) -> None:
    with torch.device("meta"):
        model = Transformer(small(family, num_kv_heads=2), 1000)
    logits_BTV = model(torch.empty(3, 1000, dtype=torch.int64, device="meta"))
    assert logits_BTV.device.type == "meta"
    assert logits_BTV.shape == (3, 1000, VOCAB)


@families
def test_bfloat16_stays_bfloat16(family: Family) -> None:
    logits_BTV = build(small(family), torch.bfloat16)(some_tokens())
    assert logits_BTV.dtype == torch.bfloat16
    expected_BTV = build(small(family), torch.float32)(some_tokens())
    torch.testing.assert_close(logits_BTV.float(), expected_BTV, rtol=0, atol=0.02)


@families
@pytest.mark.parametrize("pieces", [range(5), range(1, 3)])
def test_too_long_a_sequence_is_refused(family: Family, pieces: range) -> None:
    model = Transformer(small(family), 4, pieces)
    x = some_tokens() if model.has_embedding else torch.zeros(1, 5, 16)
    with pytest.raises(UserError, match=r"at most 4 tokens, found [57]; .*max_positions"):
        model(x)


@pytest.mark.parametrize("pieces", [range(0), range(3, 6), range(-1, 2), range(0, 4, 2)])
def test_pieces_that_are_not_there_are_a_bug(pieces: range) -> None:
    with pytest.raises(AssertionError):
        Transformer(small("llama"), 4, pieces)


def test_an_unresolved_model_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="resolved"):
        Transformer(replace(small("llama"), vocab_size=None), 4)
