"""Activations against the published formulas (arXiv 2205.05198, section 4), states by what is sharded."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_model
from pipeloom.cost.foreign import layer_activation_bytes, stage_input_bytes
from pipeloom.cost.memory import state_bytes
from pipeloom.cost.software import Software
from pipeloom.workload.model_shape import Experts
from pipeloom.workload.run import Run

GPT = load_model("gpt-175b")


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_activations_of_a_gpt_layer_are_the_published_ones(tp):
    run = Run(shape=GPT, seq=2048, tp=tp, micro_batch=2, attention="fused-softmax", precision="fp16")
    s, b, h, a = 2048, 2, GPT.hidden, GPT.heads
    assert layer_activation_bytes(run, dropout=True) == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)))
    split = replace(run, sequence_parallel=True)
    assert layer_activation_bytes(split, dropout=True) == pytest.approx(s * b * h / tp * (34 + 5 * a * s / h))
    selective = replace(split, recompute="selective")
    assert layer_activation_bytes(selective, dropout=True) == pytest.approx(34 * s * b * h / tp)
    flash = replace(split, attention="flash2")
    assert layer_activation_bytes(flash, dropout=True) == pytest.approx(34 * s * b * h / tp)
    assert stage_input_bytes(run) == 2 * s * b * h
    assert stage_input_bytes(split) == 2 * s * b * h / tp


def test_gathered_inputs_can_be_kept_whole():
    run = Run(shape=GPT, seq=2048, tp=8, attention="flash2", sequence_parallel=True)
    more = layer_activation_bytes(run, dropout=True, keeps_gathered=True) - layer_activation_bytes(run, dropout=True)
    assert more == pytest.approx(4 * 2048 * GPT.hidden * 7 / 8)


@pytest.mark.parametrize("tp", [1, 4])
def test_experts_keep_what_a_block_of_their_joint_width_keeps_their_rows_and_scores(tp):
    tokens = 2 * 2048
    run = Run(shape=GPT, seq=2048, micro_batch=2, tp=tp, sequence_parallel=tp > 1, attention="flash2", precision="bf16")
    experts = Experts(count=8, per_token=3, ffn=GPT.ffn // 4, shared=1)
    routed = replace(run, shape=replace(GPT, experts=experts))
    more = layer_activation_bytes(routed, dropout=False) - layer_activation_bytes(run, dropout=False)
    assert more == pytest.approx(tokens * (3 * 2 * 2 * GPT.hidden + 8 * 8 / tp))
    fullest = replace(routed, dp=8, ep=8, expert_load=1.5)
    each = 2 * (2 * GPT.hidden + 2 * experts.ffn / tp)
    assert layer_activation_bytes(fullest, dropout=False) - layer_activation_bytes(routed, dropout=False) == (
        pytest.approx(0.5 * 3 * tokens * each)
    )


def test_an_unfused_norm_keeps_copies():
    run = Run(shape=GPT, seq=2048)
    more = layer_activation_bytes(replace(run, fused_norm=False), dropout=False) - layer_activation_bytes(
        run, dropout=False
    )
    assert more == 2048 * GPT.hidden * 16


@pytest.mark.parametrize(
    ("shard", "bytes_each"), [("none", 16), ("optimizer", 4 + 12 / 8), ("gradients", 2 + 14 / 8), ("full", 2)]
)
def test_what_data_parallelism_shards_is_divided_by_it(shard, bytes_each):
    run = Run(shape=GPT, seq=2048, dp=8, shard=shard)
    assert state_bytes(run, 1e9, Software(name="")).total_bytes == pytest.approx(bytes_each * 1e9)
