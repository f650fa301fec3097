"""Layers that recompute differently: time, FLOPs and memory lie where the layers are."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.memory import stage_kept_bytes, working_bytes
from pipeloom.cost.placed import Placed
from pipeloom.families import Choice
from pipeloom.predict.memory import held_bytes
from pipeloom.predict.step import memory_that_would_fit, simulate_step
from pipeloom.recipe import Knobs
from pipeloom.workload.run import Run

CLUSTER, OURS = load_cluster("dgx-a100"), load_software("pipeloom")
RUN = Run(shape=replace(load_model("gpt-6.6b"), layers=8), seq=1024, pp=2, loops=2, global_batch=4)
RUN = replace(RUN, attention="fused-softmax", layers_by_stage=(2, 2, 2, 2))
ORDER = Knobs(choice=Choice(family="breadth-first", pp=2, loops=2, num_microbatches=4))
KINDS = ("none", "selective", "full")


def test_naming_every_layer_alike_is_naming_all_at_once():
    for kind in KINDS:
        one = simulate_step(Placed(replace(RUN, recompute=kind), CLUSTER, OURS), ORDER)
        each = simulate_step(Placed(replace(RUN, recompute_layers=(kind,) * 8), CLUSTER, OURS), ORDER)
        assert each.prediction == one.prediction
        assert each.hfu == pytest.approx(one.hfu)
        assert each.mfu == one.mfu


def test_each_stage_pays_for_its_own_layers():
    layers = ("none", "none", "full", "full", "none", "full", "selective", "selective")
    mixed = replace(RUN, recompute_layers=layers)
    alike = {kind: replace(RUN, recompute=kind) for kind in KINDS}
    backward = {kind: Placed(run, CLUSTER, OURS).costs.backward_s for kind, run in alike.items()}
    kept = {kind: stage_kept_bytes(run, OURS) for kind, run in alike.items()}
    found = Placed(mixed, CLUSTER, OURS).costs
    half = (backward["none"][2] + backward["full"][2]) / 2
    expected = (backward["none"][0], backward["full"][1], half, backward["selective"][3])
    assert found.backward_s == pytest.approx(expected)
    assert found.forward_s == Placed(RUN, CLUSTER, OURS).costs.forward_s
    half = (kept["none"][2] + kept["full"][2]) / 2
    assert stage_kept_bytes(mixed, OURS) == [kept["none"][0], kept["full"][1], half, kept["selective"][3]]


def test_a_stage_without_a_layer_that_is_recomputed_whole_needs_no_room_for_one():
    mixed = replace(RUN, recompute_layers=("none",) * 4 + ("full",) * 2 + ("selective",) * 2)
    step = simulate_step(Placed(mixed, CLUSTER, OURS), ORDER)
    working = held_bytes(mixed, OURS, step.schedule).working_bytes
    whole = working_bytes(replace(RUN, recompute="full"), OURS)
    assert whole > 0
    assert working[:3] == (0, 0, whole)


def test_utilization_counts_what_the_layers_recompute():
    plain, full = (
        simulate_step(Placed(replace(RUN, recompute=kind), CLUSTER, OURS), ORDER) for kind in ("none", "full")
    )
    half = simulate_step(Placed(replace(RUN, recompute_layers=("none", "full") * 4), CLUSTER, OURS), ORDER)
    credit = [step.hfu / step.mfu for step in (plain, half, full)]
    assert credit[0] == 1
    assert credit[1] == pytest.approx((credit[0] + credit[2]) / 2)


def test_recomputing_all_layers_is_what_would_help():
    half = simulate_step(Placed(replace(RUN, recompute_layers=("none", "full") * 4), CLUSTER, OURS), ORDER)
    set_so = simulate_step(Placed(replace(RUN, recompute="full"), CLUSTER, OURS), ORDER)
    helps = memory_that_would_fit(half)
    assert helps["layout.recompute full"] == pytest.approx(set_so.prediction.memory.total_bytes)
    assert "layout.recompute selective" not in helps


def test_a_rank_that_keeps_few_inputs_whole_needs_less_memory_and_more_compute():
    plain = simulate_step(Placed(RUN, CLUSTER, OURS), ORDER)
    kept = simulate_step(Placed(RUN, CLUSTER, OURS), replace(ORDER, choice=replace(ORDER.choice, keep=(3, 8))))
    now, then = plain.prediction.memory_by_rank, kept.prediction.memory_by_rank
    assert then[0].activations_bytes < 0.7 * now[0].activations_bytes
    assert then[1] == now[1]
    again_s = sum(kept.prediction.costs.forward_s[a.stage] for a in kept.schedule.rows[0] if a.kind == "R")
    added_s = kept.accounts[0].pipeline.compute_s - plain.accounts[0].pipeline.compute_s
    assert added_s == pytest.approx(again_s)
    assert plain.mfu / plain.hfu == 1
    assert 0.75 < kept.mfu / kept.hfu < 1
    counted = kept.memory_over_time[0].peak_parts["stage inputs"]  # the other rank's have logits among them
    assert counted == pytest.approx(then[0].activations_bytes, rel=0.02)
