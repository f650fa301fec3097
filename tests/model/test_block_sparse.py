"""Matrices of kept blocks: which blocks, products that equal those of the dense matrix, and their gradients."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from pipeloom.config import ModelConfig
from pipeloom.model import build_stage
from pipeloom.model.block_sparse import BlockSparseLinear, kept_blocks, weight_patterns
from pipeloom.model.deferred import defer, filing, leaves_of
from pipeloom.workload.model import shape_of
from pipeloom.workload.model_shape import Blocks

VOCAB, SEQ = 30, 8
LLAMA = ModelConfig(
    num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=24, density=0.5, density_block=4
).resolve(VOCAB)
MODELS = [LLAMA, replace(LLAMA, family="gpt2", num_kv_heads=4), replace(LLAMA, family="olmo2", density=0.25)]
MODELS[2] = replace(MODELS[2], ffn_size=32)


def make(config):
    return build_stage(config, range(4), max_positions=SEQ, seed=0, dtype=torch.float64, device="cpu")


@pytest.mark.parametrize(("inputs", "outputs", "density"), [(1024, 1024, 0.125), (1024, 256, 0.25), (192, 512, 1 / 3)])
def test_rows_of_blocks_keep_as_many_and_columns_too(inputs, outputs, density):
    pattern = kept_blocks(0, "layers.0.attention.query", Blocks(density=density, size=64), inputs, outputs)
    columns, kept = inputs // 64, round(density * inputs / 64)
    assert (len(pattern.rows), pattern.columns) == (outputs // 64, columns)
    assert all(len(set(row)) == kept and list(row) == sorted(row) for row in pattern.rows)
    taken = Counter(column for row in pattern.rows for column in row)
    assert max(taken.values()) - min(taken[column] for column in range(columns)) <= 1
    assert pattern.shape == (outputs, 64 * kept)


def test_blocks_follow_from_the_seed_and_the_name_alone():
    blocks = Blocks(density=0.25, size=4)
    one = kept_blocks(0, "layers.0.attention.query", blocks, 32, 16)
    # Written down: a checkpoint has the blocks, not where they are.
    assert one.rows == ((0, 3), (2, 6), (4, 5), (1, 7))
    assert kept_blocks(1, "layers.0.attention.query", blocks, 32, 16).rows != one.rows
    assert kept_blocks(0, "layers.1.attention.query", blocks, 32, 16).rows != one.rows


@pytest.mark.parametrize("config", MODELS, ids=["llama", "gpt2", "olmo2"])
def test_a_model_computes_what_dense_matrices_with_zeros_do(config):
    model, dense, patterns = make(config), make(config.dense), weight_patterns(config)
    values = {name: patterns[name].dense(one) if name in patterns else one for name, one in model.state_dict().items()}
    dense.load_state_dict(values)
    tokens = torch.randint(VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(0))
    found, expected = model(tokens), dense(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    for one in (found, expected):
        one.square().mean().backward()
    for name, other in dense.named_parameters():
        own = model.get_parameter(name).grad
        if name in patterns:
            is_kept = patterns[name].dense(torch.ones_like(own))
            own, expected = patterns[name].dense(own), other.grad * is_kept
            assert is_kept.mean() == config.density
        else:
            expected = other.grad
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("config", MODELS, ids=["llama", "gpt2", "olmo2"])
def test_a_micro_batch_without_sequences_has_gradients_of_zero(config, defers):
    model = make(config)
    if defers:
        defer(model)
    logits = model(torch.zeros((0, SEQ), dtype=torch.int64))
    assert logits.shape == (0, SEQ, VOCAB)
    with filing(leaves_of(model)) as filed:
        logits.sum().backward()
    found = {one.leaf: one.compute(None) for one in filed}
    assert (len(found) >= len(weight_patterns(config))) is defers
    for name, one in model.named_parameters():
        assert not found.get(one, one.grad).any(), name


@pytest.mark.parametrize("config", MODELS, ids=["llama", "gpt2", "olmo2"])
def test_matrices_of_layers_are_all_that_consists_of_blocks(config):
    model, patterns = make(config), weight_patterns(config)
    sparse = {name for name, one in model.named_modules() if isinstance(one, BlockSparseLinear)}
    assert {f"{name}.weight" for name in sparse} == set(patterns)
    kept = sum(model.get_parameter(name).numel() for name in patterns)
    whole = sum(make(config.dense).get_parameter(name).numel() for name in patterns)
    assert kept == config.density * whole == shape_of(config).layers * shape_of(config).layer_matrix_parameters


def test_the_first_outputs_have_the_variance_of_dense_ones():
    config = ModelConfig(num_layers=2, hidden_size=512, num_heads=8, ffn_size=512, density=0.125).resolve(VOCAB)
    name = "layers.0.feed_forward.up.weight"
    own, dense = make(config).get_parameter(name), make(config.dense).get_parameter(name)
    assert own.std().item() == pytest.approx(8**0.5 * dense.std().item(), rel=0.01)
