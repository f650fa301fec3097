"""Predictions: the shortcut for long steps is the simulation, and what does not exist is refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.analysis.summary import longest_rank_s
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.memory import layer_pending_bytes
from pipeloom.cost.shape import Run
from pipeloom.errors import UserError
from pipeloom.families import Choice, make_schedule
from pipeloom.passes import lower
from pipeloom.predict.fast import Ratios, found_schedule, in_flight, pending_share, pipeline_s, predict
from pipeloom.predict.step import Order, simulate_step
from pipeloom.schedule import PLACEMENTS
from pipeloom.simulate import simulate

A100 = load_cluster("dgx-a100")
PROGRAM = load_software("megatron-2021")
SECONDS = st.floats(0.1, 5.0)


def simulated_s(family, pp, loops, count, costs):
    return simulate(lower(make_schedule(family, pp=pp, loops=loops, num_microbatches=count)), costs).end_s


@settings(max_examples=20, deadline=None)
@given(data=st.data(), pp=st.integers(2, 4), transfer=st.sampled_from([0.0, 0.05, 1.3]))
@pytest.mark.parametrize(("family", "loops"), [("1f1b", 1), ("depth-first", 2), ("breadth-first", 2), ("gpipe", 1)])
def test_the_shortcut_for_a_long_step_is_close(family, loops, data, pp, transfer):
    lists = st.lists(SECONDS, min_size=pp * loops, max_size=pp * loops).map(tuple)
    costs = StageCosts(data.draw(lists), data.draw(lists), transfer)
    count = data.draw(st.integers(1, 20)) * pp
    exact = simulated_s(family, pp, loops, count, costs)
    found = pipeline_s(family, pp, loops, count, costs)
    assert 0.97 * exact <= found <= 1.03 * exact


@pytest.mark.parametrize("transfer", [0.0, 0.3])
@pytest.mark.parametrize(("family", "loops"), [("1f1b", 1), ("depth-first", 2), ("breadth-first", 2), ("gpipe", 1)])
def test_a_long_step_with_one_slowest_stage_takes_exactly_that(family, loops, transfer):
    stages = 3 * loops
    costs = StageCosts((1.0,) * (stages - 1) + (1.5,), (2.0,) * (stages - 1) + (3.5,), transfer)
    for count in (15, 30, 48):
        exact = simulated_s(family, 3, loops, count, costs)
        assert pipeline_s(family, 3, loops, count, costs) == pytest.approx(exact, rel=1e-9)


def test_a_number_of_micro_batches_that_pp_does_not_divide():
    costs = StageCosts((1.0, 1.2, 0.9), (2.0, 2.1, 2.5), 0.1)
    for count in range(1, 50):
        assert pipeline_s("1f1b", 3, 1, count, costs) == pytest.approx(simulated_s("1f1b", 3, 1, count, costs))


RUN = Run(shape=load_model("llama-13b"), seq=2048, global_batch=256)


def test_without_a_pipeline_a_step_is_micro_batches_and_what_follows():
    answer = predict(RUN, A100, PROGRAM)
    costs = answer.costs
    assert answer.pipeline_s == pytest.approx(256 * (costs.forward_s[0] + costs.backward_s[0]))
    assert answer.step_time_s == pytest.approx(answer.pipeline_s + answer.terms.total_s)


def test_rows_say_how_many_micro_batches_are_in_flight():
    assert in_flight(RUN, PROGRAM) == (1,)
    assert in_flight(replace(RUN, pp=4, schedule="1f1b"), PROGRAM) == (4, 3, 2, 1)
    assert in_flight(replace(RUN, pp=4, schedule="1f1b", global_batch=2), PROGRAM) == (2, 2, 2, 1)
    assert in_flight(replace(RUN, pp=4, loops=2, schedule="breadth-first", global_batch=8), PROGRAM) == (16, 16, 16, 16)
    assert in_flight(replace(RUN, pp=4, schedule="zb-h1"), PROGRAM)[0] == 4


def test_between_the_halves_of_a_backward_only_inputs_and_gradients_of_matrix_products_are_held():
    shape = replace(RUN.shape, mlp="gelu", ffn=4 * RUN.shape.hidden, kv_heads=RUN.shape.heads)
    run = replace(RUN, shape=shape, pp=4, schedule="zb-h1")
    assert layer_pending_bytes(run) == 32 * run.tokens * shape.hidden  # arXiv 2401.10241, table 1
    assert layer_pending_bytes(replace(run, tp=2, sequence_parallel=True)) == 16 * run.tokens * shape.hidden
    last = in_flight(run, PROGRAM)[-1]
    assert last < make_schedule("zb-h1", pp=4, num_microbatches=256).peak_stage_inputs[-1] == 4
    assert last == pytest.approx(1 + 3 * pending_share(run, PROGRAM))


def test_more_devices_or_less_recomputation_are_faster_and_memory_says_what_fits():
    assert predict(replace(RUN, dp=8), A100, PROGRAM).step_time_s < predict(RUN, A100, PROGRAM).step_time_s / 4
    full = predict(replace(RUN, recompute="full"), A100, PROGRAM)
    assert full.step_time_s > predict(RUN, A100, PROGRAM).step_time_s
    assert not full.fits
    assert predict(replace(RUN, tp=8, recompute="full"), A100, PROGRAM).fits


def test_a_zero_bubble_schedule_lies_between_1f1b_and_no_bubble():
    runs = [replace(RUN, pp=4, schedule=name) for name in ("1f1b", "zb-1p", "zb-2p")]
    times = [predict(run, A100, PROGRAM).pipeline_s for run in runs]
    assert times == sorted(times, reverse=True)


def test_few_micro_batches_of_a_zero_bubble_schedule_take_the_way_there_and_back():
    run = replace(RUN, pp=4, schedule="zb-2p", global_batch=2)
    found = predict(run, A100, PROGRAM)
    costs = found.costs
    input_s = [seconds - costs.half_s(stage) for stage, seconds in enumerate(costs.backward_s)]
    there_and_back_s = sum(costs.forward_s) + sum(input_s) + costs.forward_s[-1] + input_s[-1]
    assert found.pipeline_s == pytest.approx(there_and_back_s + costs.half_s(0))


def test_a_schedule_that_no_family_makes_is_refused():
    with pytest.raises(UserError, match="no family makes the schedule 'chimera'; known: 1f1b"):
        predict(replace(RUN, pp=2, schedule="chimera"), A100, PROGRAM)


def test_an_observed_drain_counts_only_where_it_was_observed():
    slow = replace(PROGRAM, extra_drain_slots=7.0, drain_seq=2048)
    run = replace(RUN, pp=2, schedule="1f1b")
    plain, more = (predict(run, A100, program) for program in (PROGRAM, slow))
    slot_s = max(f + b for f, b in zip(plain.costs.forward_s, plain.costs.backward_s, strict=True))
    assert more.pipeline_s - plain.pipeline_s == pytest.approx(7 * slot_s)
    longer = replace(run, seq=4096)
    assert predict(longer, A100, slow).pipeline_s == predict(longer, A100, PROGRAM).pipeline_s
    assert predict(RUN, A100, slow).pipeline_s == predict(RUN, A100, PROGRAM).pipeline_s


def test_a_search_knows_nothing_of_a_longer_last_stage():
    """As arXiv 2401.10241's authors search: with the seconds of the median stage for all."""
    uneven = StageCosts((1.0, 2.0, 2.0, 2.5), (2.0, 4.0, 4.0, 5.0), 0.1, weight_s=(1.0, 1.9, 2.0, 2.4))
    alike = StageCosts((2.0,) * 4, (4.1,) * 4, 0.1, weight_s=(2.0,) * 4)
    assert Ratios.of(uneven) == Ratios.of(alike) == (33, 34, 33, 2)
    placement = PLACEMENTS["looped"](4, 1)
    found = found_schedule("zb-1p", placement, 8, Ratios.of(uneven), 0.4)
    assert found.schedule == found_schedule("zb-1p", placement, 8, Ratios.of(alike), 0.4).schedule


def test_of_equally_fast_orders_that_which_keeps_least_is_found():
    """ZB-1p is as fast as ZB-H1 (arXiv 2401.10241, table 5) and holds no more, though it might."""
    ratios = Ratios(40, 40, 20, 1)
    found = found_schedule("zb-1p", PLACEMENTS["looped"](8, 1), 24, ratios, 0.37)
    by_hand = make_schedule("zb-h1", pp=8, num_microbatches=24)
    costs = StageCosts((0.40,) * 8, (0.60,) * 8, 0.01, weight_s=(0.20,) * 8)
    assert found.rank_s == pytest.approx(100 * longest_rank_s(simulate(lower(by_hand), costs)))
    assert found.schedule.peak_stage_inputs == by_hand.peak_stage_inputs


def test_schedules_that_split_may_send_beside_compute_where_others_block():
    program = replace(PROGRAM, blocks_split=False)
    run = replace(RUN, pp=4, schedule="1f1b")
    assert predict(run, A100, program) == predict(run, A100, PROGRAM)
    split = replace(run, schedule="zb-h1")
    blocking, free = (predict(split, A100, software) for software in (PROGRAM, program))
    assert blocking.costs.transfer_s == 0 < free.costs.transfer_s
    assert free.costs.forward_s[1] < blocking.costs.forward_s[1]
    assert free.pipeline_s < blocking.pipeline_s
    choice = Choice(family="zb-h1", pp=4, num_microbatches=split.num_microbatches)
    step = simulate_step(split, A100, program, Order(choice=choice))
    assert step.prediction.pipeline_s == pytest.approx(free.pipeline_s)
