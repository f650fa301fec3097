"""Parameter counts and the kernel that really runs."""

import pytest

from pipeloom.catalog import load_model
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run

LLAMA_13B = load_model("llama-13b")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-13b", 13_998_489_600), ("llama-30b", 33_767_751_680), ("llama-65b", 66_857_205_760)],
)
def test_parameters_without_norms_are_the_published_ones(name, parameters):
    assert load_model(name).parameters == parameters


def test_a_tied_embedding_counts_once():
    shape = ModelShape(layers=1, hidden=4, heads=2, kv_heads=2, ffn=16, family="gpt2", vocab=10, tied=True)
    assert shape.parameters == 12 * 4 * 4 + 10 * 4


def test_grouped_queries_have_fewer_key_and_value_weights():
    shape = ModelShape(layers=1, hidden=8, heads=4, kv_heads=1, ffn=8, family="llama", vocab=8, tied=False)
    assert shape.kv_width == 2
    assert shape.layer_matrix_parameters == 2 * 8 * 8 + 2 * 8 * 2 + 3 * 8 * 8


@pytest.mark.parametrize(
    ("tp", "micro_batch", "kernel"), [(4, 1, "plain"), (4, 4, "fused-softmax"), (1, 1, "fused-softmax")]
)
def test_the_fused_softmax_needs_heads_of_a_rank_times_micro_batch_in_fours(tp, micro_batch, kernel):
    run = Run(shape=load_model("llama-30b"), seq=2048, tp=tp, micro_batch=micro_batch, attention="fused-softmax")
    assert run.effective_attention == kernel


def test_micro_batches_of_a_replica():
    run = Run(shape=LLAMA_13B, seq=2048, dp=16, tp=2, pp=2, micro_batch=4, global_batch=2048)
    assert run.num_microbatches == 32
    assert run.num_devices == 64
    assert run.tokens == 8192
