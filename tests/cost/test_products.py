"""Products of linear layers in 8 bits: faster, with casts; kernels that write their inputs keep these in 8 bits."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.layers import Pieces
from pipeloom.cost.memory import kept_bytes, state_bytes
from pipeloom.workload.run import Run

CLUSTER, MEGATRON = load_cluster("dgx-h100"), load_software("megatron-core")
WIDE = Run(shape=load_model("llama-3-70b", 8192), seq=8192, tp=4, sequence_parallel=True)
NARROW = replace(WIDE, products="fp8")
UNFUSED = replace(MEGATRON, fuses_casts=False)


def test_linear_layers_are_faster_and_casts_are_added():
    wide, narrow = (Pieces(run, CLUSTER, UNFUSED) for run in (WIDE, NARROW))
    for one, other, size in (
        (wide.layer_forward(), narrow.layer_forward(), 1),
        (wide.layer_backward(), narrow.layer_backward(), 2),
    ):
        # 1402.6 of 794.5 TFLOP/s are reached by large products (stas00/ml-engineering).
        assert other.matmul_s == pytest.approx(one.matmul_s * 794.5 / 1402.6, rel=0.05)
        assert other.attention_s == one.attention_s
        # Widths of inputs, or of gradients, of queries, output, into and out of the MLP; tp divides two of each.
        into, out = 8192 + 8192 / 4 + 8192 + 28672 / 4, 10240 / 4 + 8192 + 2 * 28672 / 4 + 8192
        moved = into if size == 1 else out
        rate = CLUSTER.device.memory_bytes_per_s * MEGATRON.efficiency.memory
        assert other.memory_s - one.memory_s == pytest.approx(4 * 8192 * moved / rate)


def test_norms_and_activations_that_write_8_bits_leave_what_other_kernels_write_to_cast():
    plain, fused = (Pieces(NARROW, CLUSTER, program) for program in (UNFUSED, MEGATRON))
    rate = CLUSTER.device.memory_bytes_per_s * MEGATRON.efficiency.memory
    # Inputs of both norms and of the product out of the MLP; the gradient of the activation.
    for one, other, width in (
        (plain.layer_forward(), fused.layer_forward(), 8192 + 8192 + 28672 / 4),
        (plain.layer_backward(), fused.layer_backward(), 2 * 28672 / 4),
    ):
        assert one.memory_s - other.memory_s == pytest.approx(4 * 8192 * width / rate)


def test_head_embedding_and_state_are_as_before():
    wide, narrow = (Pieces(run, CLUSTER, MEGATRON) for run in (WIDE, NARROW))
    assert narrow.head_forward() == wide.head_forward()
    assert narrow.head_backward() == wide.head_backward()
    assert narrow.head_weight_s() == wide.head_weight_s()
    assert narrow.embedding_forward() == wide.embedding_forward()
    assert kept_bytes(NARROW, UNFUSED) == kept_bytes(WIDE, UNFUSED)
    assert state_bytes(NARROW, 1e9, MEGATRON) == state_bytes(WIDE, 1e9, MEGATRON)


def test_inputs_of_products_are_kept_in_8_bits_and_attention_also_keeps_its_own_output():
    """Of Llama's layer: two norms and gate, up and product; Transformer Engine and Megatron's fused SwiGLU."""
    hidden, ffn, queries, keys = WIDE.shape.hidden, WIDE.shape.ffn, WIDE.shape.query_width, WIDE.shape.kv_width
    wide = 2 * (4 * hidden + 2 * queries + 2 * keys + 3 * ffn)
    narrow = 2 * (2 * hidden + 2 * queries + 2 * keys + 2 * ffn) + 2 * hidden + queries + ffn
    assert kept_bytes(WIDE, MEGATRON) == pytest.approx(wide * WIDE.tokens / WIDE.tp)
    assert kept_bytes(NARROW, MEGATRON) == pytest.approx(narrow * WIDE.tokens / WIDE.tp)
    unfused = replace(MEGATRON, fuses_gates=False)
    assert kept_bytes(WIDE, unfused) - kept_bytes(WIDE, MEGATRON) == pytest.approx(2 * ffn * WIDE.tokens / WIDE.tp)


OF_DATA_CENTERS = ["dgx-h100", "h200", "dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72", "h100-pcie", "l40s"]
OTHERS = ["mi300x", "mi325x", "mi355x", "rtx-4090", "rtx-5090"]


@pytest.mark.parametrize("name", [*OF_DATA_CENTERS, *OTHERS])
def test_devices_have_twice_the_peak_in_8_bits(name):
    device = load_cluster(name).device
    # Two figures of the L40S's datasheet are not exactly twice each other.
    off = 0.02 if name == "l40s" else 0.001
    assert device.peak_flops_per_s["fp8"] == pytest.approx(2 * device.peak_flops_per_s["bf16"], rel=off)
    assert device.matmul_s(1e13, 0.0, "fp8") < device.matmul_s(1e13, 0.0, "bf16")
