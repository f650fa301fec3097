"""The closed forms equal what the model's matrix products really are."""

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
    shape_model_flops,
)
from pipeloom.model import build_stage
from pipeloom.workload.model import shape_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "olmo2"])
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(4, None), (2, None), (2, 12)])
def test_flops_of_each_piece_equal_the_counted_ones(family, num_kv_heads, head_size):
    heads = {"num_heads": 4, "num_kv_heads": num_kv_heads, "head_size": head_size}
    model = ModelConfig(family=family, num_layers=2, hidden_size=32, **heads).resolve(50)
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
