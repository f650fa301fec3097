"""A described run as a simulated step: sums that must come out, and what sharding and programs change."""

from dataclasses import replace
from functools import partial

import pytest

from pipeloom.analysis.summary import communication, summarize
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.flops import mfu
from pipeloom.cost.placed import Placed
from pipeloom.cost.what_if import with_bandwidth
from pipeloom.errors import UserError
from pipeloom.families import Choice
from pipeloom.planner.comparison import causes, main_cause
from pipeloom.predict.memory import kept_by_stage
from pipeloom.predict.step import memory_that_would_fit, simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import TIED_RECEIVE_KINDS
from pipeloom.workload.run import Run

A100 = load_cluster("dgx-a100")
OURS, MEGATRON, FSDP = (load_software(name) for name in ("pipeloom", "megatron-2021", "fsdp"))
RUN = Run(shape=load_model("llama-13b"), seq=2048, pp=4, loops=2, global_batch=6)


def knobs(run, family="breadth-first", **more):
    choice = Choice(family=family, pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)
    if "placement" in more:
        choice = replace(choice, placement=more.pop("placement"))
    return Knobs(choice=choice, **more)


def data_parallel(shard, dp=4, **changes):
    return replace(RUN, dp=dp, shard=shard, global_batch=6 * dp, **changes)


STEPS = {
    "ours": (RUN, OURS, {}),
    "ours, replicated": (data_parallel("none"), OURS, {}),
    "ours, optimizer sharded": (data_parallel("optimizer"), OURS, {}),
    "ours, gradients sharded": (data_parallel("gradients"), OURS, {"gradient_buffers": 1}),
    "ours, all sharded": (data_parallel("full"), OURS, {"residency": 1, "prefetch": 0}),
    "ours, hybrid sharding": (data_parallel("full", replicate=2), OURS, {}),
    "ours, depth-first": (data_parallel("full"), OURS, {"family": "depth-first"}),
    "ours, v": (data_parallel("none", tp=2), OURS, {"placement": "v"}),
    "ours, recomputed": (data_parallel("none", recompute="full"), OURS, {}),
    "ours, tied": (data_parallel("full", shape=replace(RUN.shape, tied=True)), OURS, {}),
    "megatron": (data_parallel("optimizer"), MEGATRON, {"family": "depth-first"}),
}


def test_a_step_that_needs_more_than_the_peak_is_no_prediction():
    """Attention counts whole, a causal kernel computes half: at the peak long sequences would use twice of it."""
    fast = replace(OURS, efficiency=replace(OURS.efficiency, flash2=1.0))
    run = replace(RUN, seq=2**20, pp=1, loops=1, global_batch=1)
    with pytest.raises(
        UserError, match=r"impossible: a100-sxm-80gb would use 1\d\d\.\d% of the peak .* expected at most 100"
    ):
        simulate_step(Placed(run, A100, fast), knobs(run))
    assert 0 < simulate_step(Placed(run, A100, OURS), knobs(run)).hfu < 1


def step_of(title):
    run, software, how = STEPS[title]
    return simulate_step(Placed(run, A100, software), knobs(run, **how))


@pytest.mark.parametrize("title", STEPS)
def test_the_parts_of_every_ranks_account_add_up_to_the_step(title):
    step = step_of(title)
    assert len(step.accounts) == 4
    for account in step.accounts:
        parts = account.to_dict()
        assert sum(parts.values()) == pytest.approx(step.prediction.step_time_s, rel=1e-9)
        assert min(parts.values()) >= 0


@pytest.mark.parametrize("title", STEPS)
def test_no_rank_ever_holds_more_than_its_peaks_of_all_parts(title):
    step = step_of(title)
    for memory, curve in zip(step.prediction.memory_by_rank, step.memory_over_time, strict=True):
        assert curve.peak_bytes <= memory.total_bytes - memory.fragmentation_bytes + 1
        assert curve.peak_parts["stage inputs"] <= memory.activations_bytes + memory.head_bytes + 1
        assert curve.peak_bytes > 0.8 * (memory.total_bytes - memory.fragmentation_bytes)


def test_utilization_is_the_published_formula():
    step = step_of("ours, recomputed")
    shape, run = RUN.shape, step.run
    assert step.tokens_per_s == pytest.approx(24 * 2048 / step.prediction.step_time_s)
    assert step.mfu == pytest.approx(
        mfu(
            step.tokens_per_s, parameters=shape.parameters, layers=40, hidden=5120, seq_len=2048,
            devices=run.pp * run.dp, peak_flops_per_s=312e12,
        )
    )  # fmt: skip
    assert step.hfu > 1.25 * step.mfu
    assert step_of("ours").hfu == step_of("ours").mfu


def test_the_exchange_of_a_blocking_program_is_no_compute():
    run = data_parallel("optimizer")
    answer = simulate_step(Placed(run, A100, MEGATRON), knobs(run, "depth-first"))
    assert min(answer.blocked_s) > 0
    for account, blocked_s in zip(answer.accounts, answer.blocked_s, strict=True):
        assert account.pipeline.exposed_p2p_s >= blocked_s
    assert answer.bubble_fraction > summarize(answer.trace).bubble_fraction


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_gathers_of_layers_add_to_a_step_is_exposed_data_parallel(recompute):
    run = data_parallel("full", dp=64, pp=1, loops=1, recompute=recompute)
    few = simulate_step(Placed(run, A100, FSDP), knobs(run, "1f1b"))
    # The same step on a network on which gathers take no time.
    fast = A100.each(partial(with_bandwidth, intra=1e6, inter=1e6))
    none = simulate_step(Placed(run, fast, FSDP), knobs(run, "1f1b"))
    (account,), (gathered,) = few.accounts, few.gathered_s
    parts, step_s = account.to_dict(), few.prediction.step_time_s
    assert sum(parts.values()) == pytest.approx(step_s, rel=1e-9)
    assert 0 < gathered.exposed_s < gathered.busy_s
    assert parts["exposed_data_parallel_s"] == pytest.approx(gathered.exposed_s)
    assert step_s - none.prediction.step_time_s == pytest.approx(gathered.exposed_s, rel=0.02)
    assert causes(few)["compute_s"] + causes(few)["recompute_s"] == pytest.approx(parts["compute_s"])
    assert main_cause(few, none) == "exposed_data_parallel_s"


def test_stages_of_a_pipeline_are_gathered_once_beside_no_layer():
    run = data_parallel("full", loops=1)
    (gathered,) = set(simulate_step(Placed(run, A100, FSDP), knobs(run, "1f1b")).gathered_s)
    assert gathered == (0, 0)


def test_without_blocking_the_bubble_fraction_is_that_of_the_trace():
    step = step_of("ours, replicated")
    assert step.bubble_fraction == pytest.approx(summarize(step.trace).bubble_fraction)


def exposed_s(family, run, loops):
    run = replace(run, loops=loops)
    step = simulate_step(Placed(run, A100, OURS), knobs(run, family))
    account = [rank.pipeline.exposed_data_parallel_s for rank in step.accounts]
    busy = [use.busy_s for use in communication(step.trace) if use.lane.peer is None]
    return sum(account), sum(busy)


def test_breadth_first_hides_the_reduction_that_gpipe_exposes():
    run = data_parallel("none", dp=16)
    looped, whole = exposed_s("breadth-first", run, 4), exposed_s("gpipe", run, 1)
    assert looped[1] == pytest.approx(whole[1], rel=0.05)  # as much to reduce
    assert looped[0] < 0.5 * whole[0]


def test_each_stage_is_reduced_once_and_gathered_for_forward_and_backward():
    kinds = [action.kind for _, _, action in step_of("ours, all sharded").schedule.actions()]
    assert kinds.count(Kind.REDUCE_GRAD) == 8
    assert kinds.count(Kind.UNSHARD) == 4 * (2 * 2 - 1)  # breadth-first: 2 V - 1 for each rank
    kinds = [action.kind for _, _, action in step_of("ours, optimizer sharded").schedule.actions()]
    assert kinds.count(Kind.UNSHARD) == 8
    assert Kind.UNSHARD not in [action.kind for _, _, action in step_of("ours, replicated").schedule.actions()]


def test_sharding_more_leaves_less_on_a_device_and_the_rest_of_the_memory_as_it_is():
    levels = ("none", "optimizer", "gradients", "full")
    steps = [
        simulate_step(Placed(r, A100, OURS), knobs(r, residency=1, gradient_buffers=1))
        for r in map(data_parallel, levels)
    ]
    totals = [step.prediction.memory.total_bytes for step in steps]
    assert totals == sorted(totals, reverse=True)
    by_rank = {tuple(memory.activations_bytes for memory in step.prediction.memory_by_rank) for step in steps}
    assert len(by_rank) == 1
    none, _, gradients, full = (step.prediction.memory_by_rank[0] for step in steps)
    assert gradients.weights_bytes == none.weights_bytes > full.weights_bytes


def test_what_the_loss_keeps_is_kept_for_every_micro_batch_and_its_logits_are_there_for_one():
    last, run = {}, replace(RUN, loops=1)
    for family in ("1f1b", "gpipe"):
        last[family] = simulate_step(Placed(run, A100, OURS), knobs(run, family)).prediction.memory_by_rank[-1]
    of_loss = 4 * 2048 * RUN.shape.vocab + 4  # a probability for each logit, and a number of targets
    for memory in last.values():
        assert memory.head_bytes == OURS.logit_bytes * 2048 * RUN.shape.vocab - of_loss
    kept = kept_by_stage(run, OURS)[-1]
    assert kept > of_loss
    assert last["gpipe"].activations_bytes - last["1f1b"].activations_bytes == 5 * kept


def test_receive_buffers_count_for_each_neighbor():
    run = RUN
    few, many = (
        simulate_step(Placed(run, A100, OURS), knobs(run, receive_buffers=n)).prediction.memory for n in (1, 5)
    )
    message = run.tokens * run.shape.hidden * run.element_bytes
    assert few.buffers_bytes == 2 * message
    assert many.buffers_bytes == 10 * message


def test_what_would_help_is_what_lowers_the_peak_when_it_is_set():
    step = simulate_step(Placed(data_parallel("none"), A100, OURS), knobs(data_parallel("none")))
    helps = memory_that_would_fit(step)
    assert set(helps) == {
        "layout.shard optimizer", "layout.shard gradients", "layout.shard full", "layout.recompute selective",
        "layout.recompute full",
    }  # fmt: skip
    run = data_parallel("none", recompute="full")
    set_so = simulate_step(Placed(run, A100, OURS), knobs(run)).prediction.memory.total_bytes
    assert helps["layout.recompute full"] == pytest.approx(set_so)
    assert set_so < step.prediction.memory.total_bytes


def test_a_single_device_has_no_lanes_and_no_bubble():
    run = Run(shape=load_model("gpt-6.6b"), seq=1024, global_batch=4)
    step = simulate_step(Placed(run, A100, OURS), knobs(run, "depth-first"))
    assert communication(step.trace) == []
    assert step.bubble_fraction == pytest.approx(0, abs=1e-12)
    compute_s = run.num_microbatches * (sum(step.prediction.costs.forward_s) + sum(step.prediction.costs.backward_s))
    assert step.prediction.step_time_s == pytest.approx(compute_s + step.prediction.terms.total_s)


TIED = replace(RUN, shape=replace(RUN.shape, tied=True))


def test_a_tied_matrix_is_sent_during_the_pipeline_and_nothing_follows_it():
    plain, tied = (simulate_step(Placed(run, A100, OURS), knobs(run)) for run in (RUN, TIED))
    moved = {str(s.action): s for s in tied.trace.spans if s.action.kind in TIED_RECEIVE_KINDS}
    assert moved.keys() == {"7RECV_TIED", "0RECV_TIED_GRAD"}
    sizes = {name: (span.end_s - span.start_s) for name, span in moved.items()}
    matrix = TIED.shape.vocab * TIED.shape.hidden
    fixed_s = A100.intra.latency_s + OURS.efficiency.exchange_s
    rate = A100.intra.bytes_per_s * OURS.efficiency.p2p
    assert sizes["7RECV_TIED"] == pytest.approx(fixed_s + 2 * matrix / rate)  # bf16
    assert sizes["0RECV_TIED_GRAD"] == pytest.approx(fixed_s + 4 * matrix / rate)
    assert tied.prediction.terms.tied_s == 0
    assert tied.prediction.pipeline_s == plain.prediction.pipeline_s
    two_copies = simulate_step(Placed(TIED, A100, replace(OURS, lends_tied=False)), knobs(TIED))
    assert two_copies.prediction.terms.tied_s > 0
    assert not any(span.action.kind in TIED_RECEIVE_KINDS for span in two_copies.trace.spans)
    assert two_copies.prediction.step_time_s > tied.prediction.step_time_s


def test_the_borrower_of_a_tied_matrix_has_no_optimizer_state_for_it():
    tied, copies = (
        simulate_step(Placed(TIED, A100, software), knobs(TIED)).prediction.memory_by_rank
        for software in (OURS, replace(OURS, lends_tied=False))
    )
    matrix = TIED.shape.vocab * TIED.shape.hidden
    assert copies[3].optimizer_bytes - tied[3].optimizer_bytes == pytest.approx(12 * matrix)
    assert tied[3].weights_bytes == pytest.approx(copies[3].weights_bytes)
    assert tied[3].gradients_bytes == pytest.approx(copies[3].gradients_bytes)
    assert tied[0].gradients_bytes - copies[0].gradients_bytes == pytest.approx(4 * matrix)  # received
    assert tied[1] == copies[1]


def test_on_one_rank_a_tied_matrix_is_borrowed_in_place_unless_it_may_be_dropped():
    alone = replace(TIED, pp=1, loops=4)
    weights = {}
    for name, run in {"whole": alone, "full": replace(alone, dp=4, shard="full", global_batch=24)}.items():
        tied = simulate_step(Placed(run, A100, OURS), knobs(run)).prediction.memory
        copies = simulate_step(Placed(run, A100, replace(OURS, lends_tied=False)), knobs(run)).prediction.memory
        weights[name] = (tied.weights_bytes - copies.weights_bytes) / (TIED.shape.vocab * TIED.shape.hidden)
    assert weights == {"whole": 0, "full": pytest.approx(2)}
