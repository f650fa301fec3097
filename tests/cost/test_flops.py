"""The closed forms equal what the model's matrix products really are."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.catalog import load_model
from pipeloom.config import ModelConfig
from pipeloom.cost.flops import (
    hardware_flops,
    model_flops,
    piece_forward_flops,
    recomputed_flops,
    seen,
    seen_per_token,
    shape_model_flops,
)
from pipeloom.model import build_stage, core_attention
from pipeloom.model.visible_keys import VisibleKeys
from pipeloom.workload.model import shape_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3"])
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(4, None), (2, None), (2, 12)])
def test_flops_of_each_piece_equal_the_counted_ones(family, num_kv_heads, head_size):
    heads = {"num_heads": 4, "num_kv_heads": num_kv_heads, "head_size": head_size}
    model = ModelConfig(family=family, num_layers=2, hidden_size=32, attn_softcap=0.0, **heads).resolve(50)
    seq_len, batch = 16, 3
    expected = piece_forward_flops(shape_of(model), seq_len)
    tensor = torch.randint(0, 50, (batch, seq_len))
    for piece, flops in enumerate(expected):
        options = {"max_positions": seq_len, "seed": 0, "dtype": torch.float32, "device": "cpu"}
        stage = build_stage(model, range(piece, piece + 1), **options)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tensor = stage(tensor)
        # the counter sees the matrix products of the projections; where it counts attention, it counts the full
        # score matrix, of which a causal model needs half
        counted = counter.get_flop_counts().get("Global", {})
        attention = sum(n for name, n in counted.items() if "attention" in str(name))
        causal = 2 * seq_len * 4 * model.known_head_size if 0 < piece < 3 else 0
        products = counter.get_total_flops() - attention
        assert products / (batch * seq_len) == flops - causal


@pytest.mark.parametrize("before", [0, 3, 9])
@pytest.mark.parametrize("window", [None, 1, 5, 20])
def test_products_of_attention_are_those_of_the_keys_that_are_seen(window, before, monkeypatch):
    monkeypatch.setattr(core_attention, "BLOCK", 1)
    tokens, size = 11, 4
    query, key = torch.zeros(1, 1, tokens, size), torch.zeros(1, 1, before + tokens, size)
    visible = VisibleKeys(before, window)
    with FlopCounterMode(display=False) as counter:
        # a soft cap, so that the kernel is the one that takes windows
        core_attention.core_attention(query, key, key, visible=visible, softcap=1.0)
    # T^2 / 2 stands for the T (T + 1) / 2 scores under a causal mask, the diagonal included
    diagonal = (min(before + tokens, window or 100) - min(before, window or 100)) / 2
    assert counter.get_total_flops() == 4 * size * (seen(tokens, window, before) + diagonal)


def test_layers_with_a_window_count_the_scores_inside_it():
    shape = replace(load_model("llama-13b"), window=512, full_layers=(3, 7))
    whole, seq = replace(shape, window=None, full_layers=()), 2048
    tokens = seen_per_token(shape, seq)
    assert tokens == [2048 if layer in {3, 7} else 2 * 512 * (2048 - 256) / 2048 for layer in range(40)]
    fewer = 2 * shape.query_width * (40 * seq - sum(tokens))
    assert sum(piece_forward_flops(whole, seq)) - sum(piece_forward_flops(shape, seq)) == pytest.approx(fewer)
    assert shape_model_flops(whole, seq) - shape_model_flops(shape, seq) == pytest.approx(6 * fewer)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_credited_flops_of_a_tied_gpt_are_megatrons(recompute):
    # arXiv 2104.04473, section 5.1: 96 B s L h^2 (1 + s/6h + V/16Lh) with full recomputation, 72 (...V/12Lh) without
    shape, seq = load_model("gpt-175b"), 2048
    assert shape.tied
    layers, hidden, vocab = shape.layers, shape.hidden, shape.vocab
    factor, share = (96, 16) if recompute == "full" else (72, 12)
    published = factor * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (share * layers * hidden))
    assert hardware_flops(shape, seq, recompute) == pytest.approx(published, rel=1e-12)


def test_selective_recomputation_repeats_the_core_of_attention_only():
    shape = load_model("llama-13b")
    more = hardware_flops(shape, 2048, "selective") - shape_model_flops(shape, 2048)
    assert more == 4 * shape.layers * shape.hidden * 2048
    assert recomputed_flops(shape, 2048, "none") == 0
    per_token = model_flops(parameters=shape.parameters, layers=40, hidden=5120, seq_len=2048)
    assert shape_model_flops(shape, 2048) == per_token
