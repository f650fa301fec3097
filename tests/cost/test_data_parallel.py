"""Collectives of data parallelism: bytes by hand, and hybrid sharding."""

from dataclasses import replace

import pytest

from pipeloom.accuracy.schedules import predict
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.collectives import SLOWDOWN, gather_s, layer_collectives_s, reduce_s, together_s
from pipeloom.cost.exchanges import step_terms
from pipeloom.cost.hardware import Group
from pipeloom.cost.placed import Placed
from pipeloom.workload.run import Run

A100 = load_cluster("dgx-a100")
OURS = load_software("pipeloom")
RUN = Run(shape=load_model("llama-13b"), seq=2048, dp=16, shard="full")
BUS = OURS.efficiency.data_bus


def test_sharded_gradients_are_scattered_and_whole_ones_reduced_everywhere():
    group = Group.strided(16, 1, 8)
    assert reduce_s(RUN, A100, OURS, 1e9) == A100.collective_s("reduce_scatter", 4e9, group, BUS)
    whole = replace(RUN, shard="none")
    assert reduce_s(whole, A100, OURS, 1e9) == A100.collective_s("all_reduce", 4e9, group, BUS)
    assert reduce_s(whole, A100, replace(OURS, reduces_whole=True), 1e9) == reduce_s(whole, A100, OURS, 1e9)


def test_weights_are_gathered_in_the_size_of_the_precision_and_only_where_they_are_sharded():
    group = Group.strided(16, 1, 8)
    assert gather_s(RUN, A100, OURS, 1e9) == A100.collective_s("all_gather", 2e9, group, BUS)
    single = replace(RUN, precision="fp32")
    assert gather_s(single, A100, OURS, 1e9) == A100.collective_s("all_gather", 4e9, group, BUS)
    assert gather_s(replace(RUN, shard="none"), A100, OURS, 1e9) == 0


def test_owners_of_whole_parameters_send_them_one_after_another():
    group, owned = Group.strided(16, 1, 8), replace(OURS, owns_tensors=True)
    assert gather_s(RUN, A100, owned, 1e9) == 16 * A100.collective_s("all_gather", 2e9 / 16, group, BUS)
    wide = replace(RUN, dp=1024)
    layer = RUN.shape.layer_matrix_parameters
    # Three matrices of attention's five are one; two norms.
    assert gather_s(wide, A100, owned, layer) == pytest.approx(
        7 * A100.collective_s("all_gather", 2 * layer / 7, Group.strided(1024, 1, 8), BUS)
    )


def test_with_hybrid_sharding_gathers_stay_in_a_copy_and_shards_are_reduced_between_copies():
    hybrid = replace(RUN, replicate=2)
    inner, outer = Group.strided(8, 1, 8), Group.strided(2, 8, 8)
    assert inner.num_nodes == 1
    assert outer.num_nodes == 2
    assert gather_s(hybrid, A100, OURS, 1e9) == A100.collective_s("all_gather", 2e9, inner, BUS)
    assert gather_s(hybrid, A100, OURS, 1e9) < gather_s(RUN, A100, OURS, 1e9)
    assert reduce_s(hybrid, A100, OURS, 1e9) == pytest.approx(
        A100.collective_s("reduce_scatter", 4e9, inner, BUS) + A100.collective_s("all_reduce", 4e9 / 8, outer, BUS)
    )


def _both(costs):
    return costs.forward_s[0], costs.backward_s[0]


def test_compute_beside_a_collective_is_slower_and_ends_no_sooner_than_it():
    # While the collective runs, compute makes 1 / 1.189 of its usual progress.
    assert together_s(10.0, 2.0) == pytest.approx(2.0 + 10.0 - 2.0 / (1 + SLOWDOWN))
    assert together_s(1.0, 2.0) == 2.0
    assert together_s(0.0, 2.0) == 2.0
    assert together_s(3.0, 0.0) == 3.0


def test_a_reduction_beside_the_backward_costs_the_slowdown_and_what_the_backward_does_not_cover():
    program = replace(OURS, has_reduction_lane=False, overlap=1.0, gather_overlap=1.0)
    run = replace(RUN, shard="optimizer")
    after = step_terms(Placed(run, A100, replace(program, overlap=0.0, gather_overlap=0.0)), 0.0).reduce_s
    beside = step_terms(Placed(run, A100, program), 1e6).reduce_s
    assert beside == pytest.approx(after * SLOWDOWN / (1 + SLOWDOWN))


def test_gathers_and_reductions_of_layers_hide_behind_compute_or_determine_it():
    program = replace(load_software("fsdp"), efficiency=OURS.efficiency)
    run = replace(RUN, micro_batch=4, global_batch=64)
    plain = Placed(run, A100, replace(program, gathers_layers=False)).costs
    hidden = Placed(run, A100, program).costs
    slow = replace(A100, name="slow", inter=replace(A100.inter, bytes_per_s=1e9))
    exposed = Placed(run, slow, program).costs
    moved_s = layer_collectives_s(run, A100, program)
    for direction, (with_s, without_s) in enumerate(zip(_both(hidden), _both(plain), strict=True)):
        slowed_s = 40 * moved_s[direction] * SLOWDOWN / (1 + SLOWDOWN)
        assert with_s == pytest.approx(without_s + slowed_s)
    gather_s_, both_s = layer_collectives_s(RUN, slow, program)
    held = RUN.shape.layer_matrix_parameters
    assert gather_s_ == gather_s(RUN, slow, program, held)
    assert both_s == gather_s_ + reduce_s(RUN, slow, program, held)
    assert exposed.forward_s[0] > 40 * gather_s_ > plain.forward_s[0]
    assert layer_collectives_s(replace(RUN, shard="optimizer"), slow, program) == (0, 0)
    # What is gathered layer by layer is not gathered once more after the pipeline.
    assert step_terms(Placed(RUN, slow, program), 0.0).reduce_s == 0


def test_with_a_pipeline_fully_sharded_weights_are_gathered_once_a_step():
    program = replace(load_software("fsdp"), efficiency=OURS.efficiency)
    run = replace(RUN, pp=2, dp=4, micro_batch=1, global_batch=64, shard="full")
    each = Placed(run, A100, replace(program, gathers_layers=False)).costs
    assert Placed(run, A100, program).costs == each
    placed = Placed(run, A100, program)
    held = max(placed.rank_parameters)
    moved_s = gather_s(run, A100, program, held) + reduce_s(run, A100, program, held)
    assert step_terms(placed, 0.0).reduce_s == pytest.approx(moved_s)
    # A device then holds the weights of its rank gathered, and gradients of all of them until they are scattered.
    once, alone = (
        predict(Placed(run, A100, one), "1f1b").prediction.memory
        for one in (program, replace(program, gathers_layers=False))
    )
    assert once.weights_bytes > alone.weights_bytes
    # Micro-batches add up in the type of the reduction, single precision, whatever the type of the weights.
    assert once.gradients_bytes - alone.gradients_bytes == pytest.approx(
        program.gradient_bytes * held * (1 - 1 / run.dp)
    )


def test_reductions_overlap_with_the_last_backward_and_gathers_with_the_next_forward():
    run = replace(RUN, shard="optimizer")
    terms = {
        share: step_terms(Placed(run, A100, replace(OURS, has_reduction_lane=False, **share_of(share))), 0.1).reduce_s
        for share in ("overlap", "gather_overlap", "replica_overlap", "none")
    }
    assert terms["none"] - terms["overlap"] == pytest.approx(0.1)
    assert terms["none"] - terms["gather_overlap"] == pytest.approx(0.05)
    assert terms["none"] == terms["replica_overlap"]


def share_of(name):
    return {} if name == "none" else {name: 1.0}
