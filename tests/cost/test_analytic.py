"""Stages of a described run: who has which layers, what a micro-batch costs, what follows the pipeline."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.collectives import SLOWDOWN
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.exchanges import step_terms
from pipeloom.cost.layers import Pieces
from pipeloom.cost.memory import kept_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.stages import layers_of_stages, rank_parameters
from pipeloom.schedule import Action
from pipeloom.workload.run import Run

A100 = load_cluster("dgx-a100")
PROGRAM = load_software("megatron-2021")
RUN = Run(shape=load_model("llama-13b"), seq=2048, micro_batch=1, global_batch=64)


@pytest.mark.parametrize(
    ("name", "stages", "division", "counts"),
    [
        ("llama-13b", 2, "uniform-items", (21, 19)),
        ("llama-13b", 4, "uniform-items", (10, 11, 11, 8)),
        ("llama-30b", 16, "uniform-items", (3, *[4] * 14, 1)),
        ("llama-65b", 8, "uniform-items", (10, 11, 11, 10, 10, 10, 10, 8)),
        ("llama-30b", 8, "even", (8, 8, 8, 8, 7, 7, 7, 7)),
        ("llama-13b", 1, "uniform-items", (40,)),
        ("llama-30b", 2, "light-ends", (30, 30)),
    ],
)
def test_layers_of_stages_as_the_programs_divide_them(name, stages, division, counts):
    shape = load_model(name)
    assert layers_of_stages(shape, stages, division) == (counts, stages - 1)


def test_a_division_by_cost_counts_the_head_as_layers():
    shape = replace(load_model("llama-13b"), layers=16, hidden=2048, heads=32, kv_heads=32, ffn=8192, vocab=131072)
    assert layers_of_stages(shape, 2, "by-cost") == ((10, 6), 1)
    assert layers_of_stages(shape, 4, "by-cost") == ((5, 5, 5, 1), 3)
    assert sum(layers_of_stages(shape, 8, "by-cost")[0]) == 16


@pytest.mark.parametrize("division", ["even", "uniform-items", "light-ends"])
@pytest.mark.parametrize("stages", [1, 2, 3, 7, 16])
def test_no_division_loses_a_layer(division, stages):
    assert sum(layers_of_stages(RUN.shape, stages, division)[0]) == RUN.shape.layers


def test_ranks_hold_all_parameters_once():
    run = replace(RUN, pp=4, tp=2)
    norms = 2 * run.shape.hidden * run.shape.layers
    held = sum(rank_parameters(run, PROGRAM))
    assert held == pytest.approx(run.shape.parameters / 2 + norms)


def test_a_tied_matrix_is_held_once_and_never_reduced_where_embedding_and_head_are_on_one_rank():
    tied = replace(RUN, pp=4, loops=2, shape=replace(RUN.shape, tied=True))
    bent, looped = replace(tied, placement="v"), tied
    more = sum(rank_parameters(looped, PROGRAM)) - sum(rank_parameters(bent, PROGRAM))
    assert more == pytest.approx(tied.shape.embedding_parameters)
    assert (
        step_terms(Placed(bent, A100, PROGRAM), 0.0).tied_s == 0 < step_terms(Placed(looped, A100, PROGRAM), 0.0).tied_s
    )


def test_full_recomputation_adds_a_forward_to_the_backward():
    plain = Pieces(RUN, A100, PROGRAM)
    full = Pieces(replace(RUN, recompute="full"), A100, PROGRAM)
    more = full.layer_backward().device_s - plain.layer_backward().device_s
    assert more == pytest.approx(plain.layer_forward().device_s)


def test_tensor_parallelism_divides_products_and_adds_collectives():
    alone, split = (Pieces(replace(RUN, tp=tp), A100, PROGRAM).layer_forward() for tp in (1, 4))
    assert alone.tensor_s == 0
    assert split.tensor_s > 0
    assert alone.matmul_s / 4 < split.matmul_s < alone.matmul_s / 2


def test_fewer_layers_take_less_and_the_last_stage_has_the_head():
    costs = Placed(replace(RUN, pp=4), A100, PROGRAM).costs
    assert costs.forward_s[3] > costs.forward_s[1] == costs.forward_s[2]
    assert all(b > f for f, b in zip(costs.forward_s, costs.backward_s, strict=True))


def test_a_host_that_launches_slowly_bounds_small_layers():
    slow = replace(A100, device=replace(A100.device, launch_s=1e-3))
    parts = Pieces(RUN, slow, PROGRAM)
    launch_s = PROGRAM.efficiency.launch * 1e-3
    assert parts.seconds(parts.layer_forward()) == pytest.approx(parts.layer_forward().num_kernels * launch_s)


def test_dropout_of_scores_reads_and_writes_them_in_the_precision_of_the_run_and_writes_a_mask():
    def dropout_s(precision):
        run = replace(RUN, attention="fused-softmax", micro_batch=4, precision=precision)
        with_masks, without = (Pieces(run, A100, replace(PROGRAM, dropout=is_on)) for is_on in (True, False))
        return with_masks.layer_forward().attention_s - without.layer_forward().attention_s

    assert dropout_s("fp32") == pytest.approx(dropout_s("bf16") * (2 * 4 + 1) / (2 * 2 + 1))


def test_gradients_are_added_once_for_each_micro_batch_and_parameter():
    lean = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, accumulation_bytes=0.0))
    with_, without = (Pieces(RUN, A100, program).layer_backward().device_s for program in (PROGRAM, lean))
    moved = PROGRAM.efficiency.accumulation_bytes * RUN.shape.layer_matrix_parameters
    assert with_ - without == pytest.approx(A100.device.memory_s(moved, PROGRAM.efficiency.memory))
    halved = Pieces(replace(RUN, tp=2), A100, PROGRAM).accumulation_s(1e9)
    assert halved == pytest.approx(Pieces(RUN, A100, PROGRAM).accumulation_s(1e9) / 2)


def test_a_product_that_adds_to_the_gradient_takes_the_longer_of_its_compute_and_its_bytes():
    fused = replace(PROGRAM, fuses_accumulation=True)
    both_s, one_s, lean_s = (
        Pieces(RUN, A100, program).layer_weight_s()
        for program in (PROGRAM, fused, replace(fused, efficiency=replace(fused.efficiency, accumulation_bytes=0.0)))
    )
    assert lean_s == one_s < both_s
    slow = replace(fused, efficiency=replace(fused.efficiency, accumulation_bytes=1e6))
    moved = 1e6 * RUN.shape.layer_matrix_parameters
    assert Pieces(RUN, A100, slow).layer_weight_s() == pytest.approx(
        A100.device.memory_s(moved, slow.efficiency.memory)
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_exchanges_of_column_parallel_matrices_run_beside_their_products_and_slow_them_down(sequence_parallel):
    # Exchanges of two matrices, which all products hide: they take multiprocessors of the products.
    run = replace(RUN, tp=4, sequence_parallel=sequence_parallel)
    overlapping = replace(PROGRAM, overlaps_columns=True)
    exposed_s, beside_s = (Pieces(run, A100, program).layer_backward().tensor_s for program in (PROGRAM, overlapping))
    pieces = Pieces(run, A100, PROGRAM)
    # With sequence parallelism the row-parallel matrices gather first.
    first_s = 2 * pieces._exchange_s("all_gather") if sequence_parallel else 0.0
    hidden_s = 2 * sum(
        map(pieces._exchange_s, ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",))
    )
    assert hidden_s == pytest.approx(exposed_s)
    assert beside_s == pytest.approx(first_s + hidden_s * SLOWDOWN / (1 + SLOWDOWN))


def test_a_link_slower_than_the_products_leaves_the_rest_of_an_exchange_exposed():
    run, overlapping = replace(RUN, tp=4), replace(PROGRAM, overlaps_columns=True)
    slow, slower = (
        Pieces(run, replace(A100, intra=replace(A100.intra, bytes_per_s=rate), bus_curves={}), overlapping)
        for rate in (1e9, 5e8)
    )
    # Two all-reduces of three quarters of the tensor, twice; what the products hide is the same for both.
    added_s = slower.layer_backward().tensor_s - slow.layer_backward().tensor_s
    moved = 2 * 2 * 3 / 4 * run.tokens * run.shape.hidden * run.element_bytes
    assert added_s == pytest.approx(moved / 1e9 / overlapping.efficiency.tensor_bus, rel=1e-6)


@pytest.mark.parametrize("kernel", ["flash1", "flash2"])
def test_flash_kernels_reach_the_share_of_the_peak_that_kernels_of_earlier_devices_can_use(kernel):
    h100 = load_cluster("dgx-h100")
    flash = replace(RUN, attention=kernel, seq=65536)
    able = replace(h100, device=replace(h100.device, early_kernels=1.0))
    early_s, own_s = (Pieces(flash, cluster, PROGRAM).attention_s()[0] for cluster in (h100, able))
    assert own_s / early_s == pytest.approx(h100.device.early_kernels, rel=1e-2)
    native = replace(PROGRAM, native_attention=True)
    assert Pieces(flash, h100, native).attention_s()[0] == own_s


def test_a_compiler_that_fuses_the_softmax_moves_the_bytes_of_the_fused_kernel():
    plain, fused = (Pieces(replace(RUN, attention=kernel), A100, PROGRAM) for kernel in ("plain", "fused-softmax"))
    compiled = replace(plain, software=replace(PROGRAM, fuses_softmax=True))
    assert compiled.attention_s() == fused.attention_s()
    assert compiled.attention_s()[0] < plain.attention_s()[0]


@pytest.mark.parametrize(("size", "share"), [(152, 1.0), (148, 0.5), (150, 0.25), (151, 0.125)])
def test_heads_whose_rows_are_not_aligned_are_loaded_in_narrower_pieces(size, share):
    plain = replace(RUN, attention="plain", seq=16384)
    sized = [replace(plain, shape=replace(plain.shape, hidden=each * plain.shape.heads)) for each in (size, 160)]
    program = replace(PROGRAM, efficiency=replace(PROGRAM.efficiency, softmax_bytes=1e-6, batched_matmul=0.01))
    odd, even = (Pieces(run, A100, program).attention_s()[0] / run.shape.head_size for run in sized)
    assert even / odd == pytest.approx(share, rel=0.05)


def test_a_split_backward_has_the_products_of_the_weights_in_its_second_half():
    costs = Placed(replace(RUN, pp=4), A100, PROGRAM).costs
    pieces = Pieces(replace(RUN, pp=4), A100, PROGRAM)
    assert costs.weight_share == pytest.approx(pieces.layer_weight_s() / pieces.seconds(pieces.layer_backward()))
    assert 0.25 < costs.weight_share < 0.6
    counts, head = layers_of_stages(RUN.shape, 4, PROGRAM.partition)
    second = [costs.seconds(Action.parse(f"{stage}W0")) for stage in range(4)]
    ends = [pieces.seconds(pieces.embedding_backward()), 0.0, 0.0, 0.0]
    ends[head] += pieces.head_weight_s()
    for stage, (count, end_s) in enumerate(zip(counts, ends, strict=True)):
        assert second[stage] == pytest.approx(count * pieces.layer_weight_s() + end_s)
        assert second[stage] + costs.seconds(Action.parse(f"{stage}I0")) == pytest.approx(costs.backward_s[stage])
    assert second[head] / costs.backward_s[head] > second[1] / costs.backward_s[1]  # a head has no attention


def test_what_is_recomputed_is_so_before_the_weights_half():
    runs = [replace(RUN, pp=4, recompute=kind) for kind in ("none", "full")]
    costs = [Placed(run, A100, PROGRAM).costs for run in runs]
    first, second = ([one.seconds(Action.parse(f"1{half}0")) for one in costs] for half in "IW")
    assert first[0] < first[1]
    assert second[0] == second[1] > 0


def test_halves_that_were_measured_are_those_of_their_stage():
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), 0.5, weight_s=(0.5, 1.0))
    assert [costs.seconds(Action.parse(text)) for text in ("0I0", "0W0", "1I0", "1W0")] == [2.5, 0.5, 3.0, 1.0]


def test_costs_answer_for_every_kind():
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), 0.5)
    times = {"1F0": 2.0, "0B0": 3.0, "1I0": 2.0, "1W0": 2.0, "1RECV_F0": 0.5, "0SEND_F0": 0.0, "0REDUCE_GRAD": 0.0}
    assert {text: costs.seconds(Action.parse(text)) for text in times} == times


def test_one_replica_reduces_nothing_and_sharding_gathers():
    one = step_terms(Placed(RUN, A100, PROGRAM), 0.0)
    assert one.reduce_s == 0
    many = replace(RUN, dp=16)
    assert (
        step_terms(Placed(replace(many, shard="optimizer"), A100, PROGRAM), 0.0).reduce_s
        > step_terms(Placed(many, A100, PROGRAM), 0.0).reduce_s
    )


def test_a_score_costs_time_besides_its_products_so_small_heads_take_more_for_each_operation():
    def core_s(heads):
        plain = replace(RUN, attention="fused-softmax", micro_batch=4)
        return Pieces(replace(plain, shape=replace(plain.shape, heads=heads)), A100, PROGRAM)

    wide, narrow = core_s(16), core_s(32)
    rates = [
        pieces._core_forward_s() - pieces._memory_s(pieces._scores() * pieces._score_bytes())
        for pieces in (wide, narrow)
    ]
    assert rates[1] > 1.1 * rates[0]


def test_early_flash_kernels_are_as_fast_with_small_heads():
    narrow = replace(RUN.shape, heads=80, kv_heads=80)
    for kernel, slower in (("flash1", 1), ("flash2", (64 + 48) / 64 * 128 / (128 + 48))):
        each_s = [
            Pieces(replace(RUN, shape=shape, attention=kernel), A100, PROGRAM).attention_s()[0] - A100.device.kernel_s
            for shape in (RUN.shape, narrow)
        ]
        assert each_s[1] / each_s[0] == pytest.approx(slower)


def test_selective_recomputation_may_repeat_a_share_of_the_products_and_keep_attention():
    half = replace(PROGRAM, selective_share=0.5)
    run = replace(RUN, tp=2)
    forward, whole = (Pieces(run, A100, half).layer_forward(), Pieces(run, A100, half).layer_backward())
    again = Pieces(replace(run, recompute="selective"), A100, half).layer_backward()
    assert again.matmul_s == pytest.approx(whole.matmul_s + forward.matmul_s / 2)
    assert again.tensor_s == pytest.approx(whole.tensor_s + forward.tensor_s / 2)
    assert again.memory_s == pytest.approx(whole.memory_s + forward.memory_s)
    assert again.attention_s == whole.attention_s
    kept = {kind: kept_bytes(replace(RUN, recompute=kind), half) for kind in ("none", "selective", "full")}
    assert kept["selective"] == pytest.approx((kept["none"] + kept["full"]) / 2)


def test_a_vocabulary_that_matrix_units_do_not_take_is_slow_unless_it_is_padded():
    odd = replace(RUN, shape=replace(RUN.shape, vocab=50257))
    padded, plain = (Pieces(odd, A100, replace(PROGRAM, pads_vocabulary=pads)) for pads in (True, False))
    assert plain.head_forward().matmul_s > 2 * padded.head_forward().matmul_s
    even = replace(odd, shape=replace(odd.shape, vocab=50264))
    assert Pieces(even, A100, PROGRAM).head_forward().matmul_s == padded.head_forward().matmul_s


def test_composed_times_have_no_recomputation_and_exchanges_that_the_host_never_hides():
    run, composed = replace(RUN, tp=4, recompute="full"), replace(PROGRAM, is_composed=True)
    again = Pieces(run, A100, composed).layer_backward()
    assert again == Pieces(replace(run, recompute="none"), A100, PROGRAM).layer_backward()
    slow = replace(A100, device=replace(A100.device, launch_s=1e-3))
    hidden, added = (Pieces(run, slow, program).seconds(again) for program in (PROGRAM, composed))
    kernels_s = again.num_kernels * composed.efficiency.launch * 1e-3
    assert added == pytest.approx(kernels_s + again.tensor_s)
    assert hidden < added
