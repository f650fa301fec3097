"""The search over layouts finds what simulating everything finds."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.shape import Run
from pipeloom.generate import Choice
from pipeloom.planner.search import Candidate, axes, divisors, fastest, least_bytes, least_step_s, loop_counts
from pipeloom.predict.step import Order, simulate_step

V100 = load_cluster("dgx-1-v100")
OURS, MEGATRON = load_software("pipeloom"), load_software("megatron-2021")
RUN = Run(shape=load_model("gpt-6.6b"), seq=1024, recompute="full", precision="fp16", attention="fused-softmax")


def candidate(run, software, family):
    choice = Choice(family=family, pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)
    return Candidate(run, software, Order(choice=choice, gradient_buffers=2))


def simulated(chosen):
    return simulate_step(chosen.run, V100, chosen.software, chosen.order)


@st.composite
def candidates(draw):
    tp, pp, dp = draw(st.sampled_from(list(axes(16, 8))))
    run = replace(RUN, tp=tp, pp=pp, dp=dp, micro_batch=draw(st.integers(1, 3)))
    run = replace(run, global_batch=dp * run.micro_batch * draw(st.integers(1, 6)))
    if dp > 1:
        run = replace(run, shard=draw(st.sampled_from(["none", "optimizer", "gradients", "full"])))
    family = draw(st.sampled_from(["gpipe", "1f1b", "depth-first", "breadth-first"]))
    if family in ("depth-first", "breadth-first"):
        run = replace(run, loops=draw(st.sampled_from([n for n in loop_counts(32, pp) if n <= 8])))
    software = draw(st.sampled_from([OURS, MEGATRON]))
    if draw(st.booleans()):
        software = replace(software, partition="even")
    return candidate(run, software, family)


@settings(max_examples=120, deadline=None)
@given(candidates())
def test_the_bounds_are_never_above_what_is_simulated(chosen):
    step = simulated(chosen)
    assert least_step_s(chosen, V100) <= step.prediction.step_time_s * (1 + 1e-9)
    assert least_bytes(chosen) <= step.prediction.memory.total_bytes * (1 + 1e-9)


def test_the_bound_is_exact_for_even_stages_without_collectives():
    run = replace(RUN, tp=8, pp=4, loops=2, global_batch=8, layers_by_stage=(4,) * 8, shape=replace(RUN.shape, vocab=1))
    chosen = candidate(run, replace(MEGATRON, partition="even"), "1f1b")
    chosen = candidate(replace(run, loops=1, layers_by_stage=(8,) * 4), chosen.software, "1f1b")
    assert least_step_s(chosen, V100) == pytest.approx(simulated(chosen).prediction.step_time_s, rel=0.02)


@settings(max_examples=15, deadline=None)
@given(st.lists(candidates(), min_size=1, max_size=8))
def test_the_fastest_is_the_fastest_of_all_that_fit(options):
    steps = [simulated(option) for option in options]
    times = [step.prediction.step_time_s for step in steps if step.prediction.fits]
    found = fastest(options, V100)
    assert (found and found.prediction.step_time_s) == min(times, default=None)


def test_nothing_is_fastest_where_nothing_fits():
    run = replace(RUN, shape=load_model("gpt-52b"), global_batch=8)
    assert fastest([candidate(run, OURS, "breadth-first")], V100) is None


def test_what_can_be_chosen():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert list(axes(4, 2)) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1)]
    assert loop_counts(12, 4) == [1, 3]
    assert loop_counts(12, 5) == []
