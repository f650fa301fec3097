"""Steps of tables: families by their names, orders as their authors search them, and what does not exist."""

from dataclasses import replace

import pytest

from pipeloom.accuracy.schedules import Ratios, _task, found_schedule, pending_share
from pipeloom.accuracy.schedules import predict as predict_row
from pipeloom.analysis.summary import longest_rank_s
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.memory import kept_bytes, kept_logits, layer_pending_bytes, num_logits
from pipeloom.cost.placed import Placed
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.families.greedy import best_schedule
from pipeloom.passes import lower
from pipeloom.schedule import PLACEMENTS
from pipeloom.simulation import simulate
from pipeloom.workload.run import Run

A100 = load_cluster("dgx-a100")
PROGRAM = load_software("megatron-2021")
RUN = Run(shape=load_model("llama-13b"), seq=2048, global_batch=256)


def predict(run, schedule="none", software=PROGRAM):
    return predict_row(Placed(run, A100, software), schedule).prediction


def test_without_a_pipeline_a_step_is_micro_batches_and_what_follows():
    answer = predict(RUN)
    costs = answer.costs
    assert answer.pipeline_s == pytest.approx(256 * (costs.forward_s[0] + costs.backward_s[0]))
    assert answer.step_time_s == pytest.approx(answer.pipeline_s + answer.terms.total_s)


def test_between_the_halves_of_a_backward_only_inputs_and_gradients_of_matrix_products_are_held():
    shape = replace(RUN.shape, family="gpt2", ffn=4 * RUN.shape.hidden, kv_heads=RUN.shape.heads)
    run = replace(RUN, shape=shape, pp=4)
    assert layer_pending_bytes(run) == 32 * run.tokens * shape.hidden  # arXiv 2401.10241, table 1
    assert layer_pending_bytes(replace(run, tp=2, sequence_parallel=True)) == 16 * run.tokens * shape.hidden
    held = predict(run, "zb-h1").memory_by_rank[-1].activations_bytes
    layer = kept_bytes(run, PROGRAM)
    of_loss = kept_logits(run, PROGRAM) + 3 * num_logits(run, PROGRAM) * run.element_bytes
    assert held == pytest.approx(10 * layer * (1 + 3 * pending_share(run, PROGRAM)) + of_loss)


def test_more_devices_or_less_recomputation_are_faster_and_memory_says_what_fits():
    assert predict(replace(RUN, dp=8)).step_time_s < predict(RUN).step_time_s / 4
    full = predict(replace(RUN, recompute="full"))
    assert full.step_time_s > predict(RUN).step_time_s
    assert not full.fits
    assert predict(replace(RUN, tp=8, recompute="full")).fits


def test_a_zero_bubble_schedule_lies_between_1f1b_and_no_bubble():
    times = [predict(replace(RUN, pp=4), name).pipeline_s for name in ("1f1b", "zb-1p", "zb-2p")]
    assert times[1] < times[0]
    assert times[2] <= times[1] * (1 + 1e-9)


def test_few_micro_batches_of_a_zero_bubble_schedule_take_the_way_there_and_back():
    found = predict(replace(RUN, pp=4, global_batch=2), "zb-2p")
    costs = found.costs
    input_s = [seconds - costs.half_s(stage) for stage, seconds in enumerate(costs.backward_s)]
    there_and_back_s = sum(costs.forward_s) + sum(input_s) + costs.forward_s[-1] + input_s[-1]
    assert found.pipeline_s == pytest.approx(there_and_back_s + costs.half_s(0))


def test_a_schedule_that_no_family_makes_is_refused():
    with pytest.raises(UserError, match="no family makes the schedule 'chimera'; known: 1f1b"):
        predict(replace(RUN, pp=2), "chimera")


def test_an_observed_drain_counts_only_where_it_was_observed():
    slow = replace(PROGRAM, extra_drain_slots=7.0, drain_seq=2048, drain_models=(RUN.shape.name,))
    run = replace(RUN, pp=2)
    plain, more = (predict(run, "1f1b", program) for program in (PROGRAM, slow))
    slot_s = max(f + b for f, b in zip(plain.costs.forward_s, plain.costs.backward_s, strict=True))
    assert more.pipeline_s - plain.pipeline_s == pytest.approx(7 * slot_s)
    longer = replace(run, seq=4096)
    assert predict(longer, "1f1b", slow).pipeline_s == predict(longer, "1f1b").pipeline_s
    assert predict(RUN, software=slow).pipeline_s == predict(RUN).pipeline_s
    other = replace(run, shape=replace(run.shape, name="another"))
    assert predict(other, "1f1b", slow).pipeline_s == predict(other, "1f1b").pipeline_s


def test_steps_that_follow_each_other_without_waiting_overlap():
    run, overlapping = replace(RUN, pp=4, global_batch=8), replace(PROGRAM, overlaps_steps=True)
    plain, found = (predict_row(Placed(run, A100, software), "zb-h1") for software in (PROGRAM, overlapping))
    assert found.prediction.pipeline_s == longest_rank_s(found.trace) < plain.prediction.pipeline_s
    for account in found.accounts:
        assert sum(account.to_dict().values()) == pytest.approx(found.prediction.step_time_s)
        assert min(account.to_dict().values()) >= -1e-9


def test_programs_whose_schedules_gather_nothing_hold_a_few_layers_of_sharded_weights():
    """FSDP gathers layer by layer; a program that gathers whole stages holds all of them."""
    run = replace(RUN, dp=64, shard="full")
    layer, ends = RUN.shape.layer_matrix_parameters + 2 * RUN.shape.hidden, 2 * RUN.shape.embedding_parameters
    whole = RUN.shape.layers * layer + ends
    weights = predict(run).memory.weights_bytes
    assert weights == pytest.approx(2 * (whole / 64 + 2 * layer + ends))
    # Its shards are in single precision, a part of the optimizer's state; whole weights have the head's norm as well.
    weights = predict(run, software=load_software("pipeloom")).memory.weights_bytes
    assert 2 * (whole + RUN.shape.hidden) <= weights < 2 * (whole + RUN.shape.hidden + 64)


def test_a_longer_last_stage_does_not_change_the_searched_order():
    """As arXiv 2401.10241's authors search: with the seconds of the median stage for all."""
    uneven = StageCosts((1.0, 2.0, 2.0, 2.5), (2.0, 4.0, 4.0, 5.0), 0.1, weight_s=(1.0, 1.9, 2.0, 2.4))
    alike = StageCosts((2.0,) * 4, (4.1,) * 4, 0.1, weight_s=(2.0,) * 4)
    assert Ratios.of(uneven) == Ratios.of(alike) == (33, 34, 33, 2)
    placement = PLACEMENTS["looped"](4, 1)
    found = found_schedule("zb-1p", placement, 8, Ratios.of(uneven), 0.4)
    assert found.schedule == found_schedule("zb-1p", placement, 8, Ratios.of(alike), 0.4).schedule


@pytest.mark.parametrize(("family", "ranks", "count"), [("zb-v", 6, 24), ("zb-2p", 12, 48)])
def test_rules_that_are_good_on_a_small_pipeline_are_good_on_the_real_one(family, ranks, count):
    placement = PLACEMENTS["v"](ranks, 2) if family == "zb-v" else PLACEMENTS["looped"](ranks, 1)
    ratios = Ratios(38, 36, 26, 1)
    found = found_schedule(family, placement, count, ratios, 0.4)
    best = best_schedule(_task(family, placement, count, ratios, 0.4), "rank", tries=0)
    assert best.rank_s <= found.rank_s <= best.rank_s * 1.005


def test_of_equally_fast_orders_that_which_keeps_least_is_found():
    """ZB-1p is as fast as ZB-H1 (arXiv 2401.10241, table 5) and holds no more, though it might."""
    ratios = Ratios(40, 40, 20, 1)
    found = found_schedule("zb-1p", PLACEMENTS["looped"](8, 1), 24, ratios, 0.37)
    by_hand = make_schedule("zb-h1", pp=8, num_microbatches=24)
    costs = StageCosts((0.40,) * 8, (0.60,) * 8, 0.01, weight_s=(0.20,) * 8)
    assert found.rank_s == pytest.approx(100 * longest_rank_s(simulate(lower(by_hand), costs)))
    assert found.schedule.peak_stage_inputs == by_hand.peak_stage_inputs


def test_schedules_that_split_may_send_beside_compute_where_others_block():
    program, run = replace(PROGRAM, blocks_split=False), replace(RUN, pp=4)
    assert predict(run, "1f1b", program) == predict(run, "1f1b")
    blocking, free = (predict(run, "zb-h1", software) for software in (PROGRAM, program))
    assert blocking.costs.transfer_s == 0 < free.costs.transfer_s
    assert free.costs.forward_s[1] < blocking.costs.forward_s[1]
    assert free.pipeline_s < blocking.pipeline_s
