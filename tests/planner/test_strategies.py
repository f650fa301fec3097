"""What only moving, recomputing by micro-batch, token slices or split backwards can answer is found, and is a run."""

import re
from dataclasses import replace
from math import inf

import pytest

from pipeloom.catalog import load_cluster, load_software
from pipeloom.config import ModelConfig, RunConfig, TrainingConfig, find_problems
from pipeloom.cost.hardware import Link
from pipeloom.cost.placed import Placed
from pipeloom.errors import ConfigError
from pipeloom.planner.comparison import causes, rivals
from pipeloom.planner.plan import make_question
from pipeloom.planner.plan import plan as make_plan
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.planner.search import Search, search
from pipeloom.planner.strategies import STRATEGIES, strategy_of
from pipeloom.predict.describe import describe
from pipeloom.predict.stage_swaps import swapped_amounts
from pipeloom.predict.step import simulate_step
from pipeloom.schedule import Kind
from pipeloom.training.schedules import training_schedule
from pipeloom.training.stages import stage_amounts
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import ModelShape
from pipeloom.workload.model_shape import Experts

OURS = load_software("pipeloom")
DEEP = ModelShape(
    layers=14, hidden=1024, heads=8, kv_heads=8, ffn=4096, family="gpt2", vocab=8000, tied=False, name="deep"
)
ONE_BY_ONE = {"pp": (8,), "tp": (1,), "families": ("1f1b",), "micro_batch": (1,)}
"""One stage on each of eight ranks, whose first one keeps eight micro-batches and whose last one keeps one."""


def with_memory(gigabytes, **changes):
    cluster = load_cluster("dgx-1-v100")
    return replace(cluster, name="short", device=replace(cluster.device, memory_bytes=gigabytes * 1e9), **changes)


@pytest.fixture
def deep(ask):
    """A question about a deeper model on eight V100 in one node."""

    def make(limits, **changes):
        defaults = {"shape": DEEP, "num_devices": 8, "global_batch": 32, "seq": 2048}
        return ask(**(defaults | changes)).limited(**limits)

    return make


CASES = {
    "balance": (ONE_BY_ONE, {"cluster": with_memory(2.7)}),
    "keep": (ONE_BY_ONE | {"strategies": ("none", "keep")}, {"cluster": with_memory(2.85)}),
    "offload": (ONE_BY_ONE, {"cluster": with_memory(2.4, host=Link(latency_s=0.0, bytes_per_s=100e9))}),
    "slices": ({"pp": (8,), "tp": (1,)}, {"global_batch": 2, "seq": 4096}),
}


@pytest.mark.parametrize("strategy", CASES)
def test_the_search_finds_the_strategy_that_is_fastest(deep, strategy):
    limits, changes = CASES[strategy]
    question = deep(limits, **changes)
    best, without = search(question, 1).best, search(question.limited(strategies=("none",)), 1).best
    assert strategy_of(best) == strategy
    assert strategy_of(without) == "none"
    assert best.prediction.step_time_s < 0.97 * without.prediction.step_time_s
    assert best.prediction.fits


@pytest.mark.parametrize("strategy", ["balance", "keep", "offload"])
def test_strategies_leave_the_headroom_free(deep, strategy):
    limits, changes = CASES[strategy]
    cluster = changes["cluster"]
    larger = replace(cluster, device=replace(cluster.device, memory_bytes=cluster.device.memory_bytes / 0.8))
    limits = limits | {"strategies": (strategy,)}  # the dictionary belongs to all tests
    step, with_headroom = (
        search(deep(limits, cluster=one, headroom=headroom), 1).best for one, headroom in ((cluster, 0), (larger, 0.2))
    )
    assert strategy_of(with_headroom) == strategy
    assert with_headroom.prediction.memory.total_bytes <= 1.0001 * cluster.device.memory_bytes
    assert with_headroom.prediction.step_time_s == pytest.approx(step.prediction.step_time_s, rel=1e-3)


@pytest.mark.parametrize("strategy", CASES)
def test_the_run_of_a_strategy_simulates_the_same(deep, strategy):
    limits, changes = CASES[strategy]
    step = search(deep(limits, **changes), 1).best
    config = run_config(step, None, "dgx-1-v100", "pipeloom")
    assert find_problems(config, trains=False) == []
    if strategy == "offload":  # the catalog's host is slower than the question's
        assert config.schedule.offload
        return
    again = predict_step(config).prediction
    assert again.step_time_s == pytest.approx(step.prediction.step_time_s, rel=1e-6)
    assert again.memory.total_bytes == pytest.approx(step.prediction.memory.total_bytes, rel=1e-6)


def test_few_micro_batches_and_room_are_a_case_for_split_backwards(deep):
    question = deep({"pp": (8,), "tp": (1,), "loops": (1,), "strategies": ("none",)}, global_batch=8)
    best = search(question, 1).best
    whole = search(question.limited(families=("gpipe", "1f1b", "depth-first", "breadth-first")), 1).best
    assert best.schedule.facts.row.is_kind(Kind.BACKWARD_WEIGHT).any()
    assert best.prediction.step_time_s < 0.97 * whole.prediction.step_time_s


def test_partners_are_neighbors_where_the_network_is_slow(deep):
    cluster = with_memory(2.85)
    slow = replace(cluster, name="slow", devices_per_node=4, inter=replace(cluster.inter, bytes_per_s=16e9))
    step = search(deep(ONE_BY_ONE, cluster=slow), 1).best
    knobs = step.run.pipeline_order
    partners = step.schedule.partners
    assert sorted(knobs) == list(range(8))
    assert all(knobs.index(rank) // 4 == knobs.index(partner) // 4 for rank, partner in enumerate(partners))


def test_a_plan_says_what_the_way_is_worth(deep):
    limits, changes = CASES["keep"]
    plan = make_plan(deep(limits, **changes), budget_s=60)
    (rival,) = [one for one in plan.rivals if one.kind == STRATEGIES["keep"].without]
    assert strategy_of(rival.step) == "none"
    assert sum(rival.more_s.values()) > 0
    parts = causes(plan.best)
    assert parts["recompute_s"] > 0
    assert sum(parts.values()) == pytest.approx(plan.best.prediction.step_time_s, rel=1e-9)


def test_where_nothing_is_recomputed_no_strategy_recomputes_micro_batches(deep):
    limits, changes = CASES["keep"]
    question = deep(limits, **changes)
    searching = Search(question)
    steps = searching.best(10).steps
    some = next(step for step in steps if set(step.run.recompute_kinds) == {"none", "full"})
    assert strategy_of(steps[0]) == "keep"  # which the search has for the other queries, too
    kinds = {rival.kind: rival.step for rival in rivals(searching, question, some, inf)}
    assert kinds["nothing recomputed"] is None
    assert kinds["all layers recomputed"].run.recompute == "full"


def test_a_way_that_the_program_does_not_have_is_refused(ask):
    with pytest.raises(ConfigError, match="has no strategy 'balance'; it has none"):
        ask(software=load_software("nanotron")).limited(strategies=("balance",))


def test_no_micro_batch_is_recomputed_where_nothing_may_be(deep):
    limits, changes = CASES["keep"]
    assert "keep" in deep(ONE_BY_ONE, **changes).strategies
    assert "keep" not in deep(ONE_BY_ONE | {"recompute": ("none",)}, **changes).strategies
    with pytest.raises(ConfigError, match="keep recomputes whole micro-batches, found recompute none; add full"):
        deep(limits | {"recompute": ("none",)}, **changes)


def test_only_a_strategy_may_be_chosen(deep):
    limits, changes = CASES["balance"]
    steps = search(deep(limits | {"strategies": ("balance",)}, **changes), 5).steps
    assert {strategy_of(step) for step in steps} == {"balance"}


@pytest.mark.parametrize("strategy", ["keep", "balance", "slices"])
def test_layouts_without_a_strategy_are_listed_where_nothing_needs_it(deep, strategy):
    limits = ONE_BY_ONE | {"strategies": (strategy,)}
    plan = make_plan(deep(limits), budget_s=60)
    assert strategy_of(plan.best) == "none"
    assert plan.closest is None
    assert any(f"None of these layouts uses {strategy}" in sentence for sentence in plan.advice)
    assert plan.best == search(deep(ONE_BY_ONE | {"strategies": ("none",)}), 1).best


def test_a_plain_layout_that_is_faster_than_the_named_way_is_advised(deep):
    limits, changes = CASES["balance"]
    for explains in (False, True):
        plan = make_plan(deep(limits | {"strategies": ("keep",)}, **changes), 1, explains=explains)
        plain = search(deep(limits | {"strategies": ("none",)}, **changes), 1).best
        assert strategy_of(plan.best) == "keep"
        (sentence,) = (one for one in plan.advice if "plain layout is faster" in one)
        less = 1 - plain.prediction.step_time_s / plan.best.prediction.step_time_s
        assert less > 0
        assert f"{less:.1%} less" in sentence
    slower = make_plan(deep(limits | {"strategies": ("balance",)}, **changes), 1, explains=False)
    assert slower.advice == []


def test_room_is_not_made_where_everything_fits(deep):
    found = search(deep(ONE_BY_ONE | {"strategies": ("none", "keep", "balance", "offload")}), 3)
    assert found.counts.tried == 0
    assert strategy_of(found.best) == "none"


ALONE = {"num_devices": 1, "global_batch": 4, "seq": 512}
"""A question about one device."""


def test_a_model_that_is_larger_than_its_one_device_visits_it(deep):
    cluster = with_memory(2.4)
    question = deep({}, cluster=cluster, **ALONE)
    found = search(question, 3)
    assert {strategy_of(step) for step in found.steps} == {"swap"}
    assert search(question.limited(strategies=("none",)), 1).best is None
    best = found.best
    amounts = swapped_amounts(best.run, best.software)
    assert sum(one.total for one in amounts) > 1.1 * cluster.device.memory_bytes
    assert best.prediction.fits
    assert best.knobs.device_budget == best.schedule.max_resident
    whole = replace(best.run, loops=1, layers_by_stage=None)
    large = replace(cluster, device=replace(cluster.device, memory_bytes=1e12))
    choice = replace(best.knobs.choice, loops=1)
    with_room = simulate_step(
        Placed(whole, large, best.software), replace(best.knobs, choice=choice, device_budget=None)
    )
    assert best.prediction.step_time_s > with_room.prediction.step_time_s


def test_the_run_of_a_swapped_model_simulates_the_same(deep):
    step = search(deep({}, cluster=with_memory(2.4), **ALONE), 1).best
    config = run_config(step, None, "dgx-1-v100", "pipeloom")
    assert find_problems(replace(config, training=replace(config.training, dtype="float32", device="cpu"))) == []
    again = predict_step(config).prediction
    assert again.step_time_s == pytest.approx(step.prediction.step_time_s, rel=1e-6)
    assert again.memory.total_bytes == pytest.approx(step.prediction.memory.total_bytes, rel=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_the_schedule_of_a_swapped_model_is_the_one_that_trains(deep, precision, dtype):
    """Stages take what the trainer computes for them, so that it neither refuses the budget nor moves anything else."""
    cluster = load_cluster("dgx-h100")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=2.13e9))
    step = search(deep({}, cluster=cluster, precision=precision, **ALONE), 1).best
    assert strategy_of(step) == "swap"
    config = run_config(step, None, "dgx-h100", "pipeloom")
    assert config.training.dtype == dtype
    config = replace(config, model=config.model.resolve(DEEP.vocab))
    assert [one.total for one in stage_amounts(config)] == [one.total for one in swapped_amounts(step.run, OURS)]
    assert training_schedule(config).rows == step.schedule.rows


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True)])
def test_stages_are_as_large_as_those_that_train(family, tied):
    model = ModelConfig(family=family, num_layers=5, hidden_size=64, num_heads=4, vocab_size=500, tied=tied)
    config = RunConfig(model=model.resolve(257), layout=Layout(pp=1, loops=5, num_microbatches=2))
    layout = replace(config.layout, partition=(1, 2, 2, 1, 1))
    run = describe(replace(config, layout=layout, training=TrainingConfig(dtype="float32"))).run
    assert swapped_amounts(run, OURS) == stage_amounts(replace(config, layout=layout))


def test_more_memory_never_makes_a_swapped_model_slower(deep):
    seconds = []
    for gigabytes in (2.0, 2.05, 2.1, 2.15, 2.2, 2.3, 2.4, 2.6, 2.8):
        limits = {"micro_batch": (1,), "recompute": ("full",)}
        best = search(deep(limits, cluster=with_memory(gigabytes), **ALONE), 1).best
        assert strategy_of(best) == "swap"
        seconds.append(best.prediction.step_time_s)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.9 * seconds[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": None}, r"a table \[host\] with latency_us and gb_per_s"),
        ({"memory": 1.6}, "Stages that are swapped through the device one after the other do not fit"),
        ({"families": ("1f1b",)}, "strategy swap with the family breadth-first"),
        ({"strategies": ("none",)}, "strategy swap with the family breadth-first"),
    ],
)
def test_where_nothing_can_be_swapped_the_plan_says_why(deep, changes, words):
    cluster = with_memory(changes.get("memory", 2.4))
    if "host" in changes:
        cluster = replace(cluster, host=None)
    limits = {name: changes[name] for name in ("families", "strategies") if name in changes}
    question = deep(limits, cluster=cluster, **ALONE)
    plan = make_plan(question, budget_s=60)
    assert plan.best is None
    (advice,) = plan.advice
    assert re.search(words, advice)


def test_several_devices_share_the_stages_instead(deep):
    assert STRATEGIES["swap"].hint(deep({})) is None
    plan = make_plan(deep(ONE_BY_ONE | {"strategies": ("swap",)}), budget_s=60, explains=True)
    assert any("stages are swapped through one device alone" in line for line in plan.advice)


def test_what_fits_is_not_swapped(deep):
    steps = search(deep({}, cluster=with_memory(16.0), **ALONE), 5).steps
    assert steps
    assert "swap" not in {strategy_of(step) for step in steps}


def test_a_plan_of_a_swapped_model_says_so(deep):
    plan = make_plan(deep({}, cluster=with_memory(2.4), **ALONE), budget_s=60)
    assert [rival.step for rival in plan.rivals if rival.kind == STRATEGIES["swap"].without] == [None]
    assert sum(causes(plan.best).values()) == pytest.approx(plan.best.prediction.step_time_s, rel=1e-9)


def test_the_stages_of_a_swapped_model_may_be_chosen(deep):
    question = deep({"loops": (5, 9, 16)}, cluster=with_memory(2.4), **ALONE)
    steps = search(question, 5).steps
    assert {step.run.loops for step in steps} <= {5, 9, 16}
    assert {strategy_of(step) for step in steps} == {"swap"}
    assert steps[0].prediction.fits


def test_uneven_layers_are_partitioned_again_under_slices():
    experts = Experts(count=8, per_token=2, ffn=64, every=3)
    shape = ModelShape(
        layers=13, hidden=64, heads=4, kv_heads=4, ffn=192, family="qwen3", vocab=4096, tied=False, experts=experts
    )
    limits = {"pp": (2,), "loops": (4,), "families": ("breadth-first",), "strategies": ("slices",)}
    answer = make_plan(
        make_question(shape, "dgx-h100", num_devices=4, global_batch=8, seq=256, **limits), explains=False
    )
    assert answer.best.knobs.choice.num_slices > 1
