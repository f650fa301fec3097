"""Plans of models with experts: orders that know the loads, and what counts as a parameter."""

from dataclasses import replace

import pytest

from pipeloom import make_question, plan
from pipeloom.catalog import load_model
from pipeloom.cost.flops import shape_model_flops
from pipeloom.errors import ConfigError
from pipeloom.families import FAMILIES, ends_forwards_first
from pipeloom.planner.run_file import run_config
from pipeloom.workload.model_shape import Experts

SHAPE = replace(
    load_model("llama-3-8b"),
    layers=8,
    hidden=1024,
    heads=16,
    ffn=2048,
    experts=Experts(count=8, per_token=2, ffn=1024, every=2, shared=1),
    name="mixed",
)


def question(**limits):
    return make_question(SHAPE, "dgx-h100", num_devices=16, global_batch=64, seq=2048, **limits)


def test_parameters_are_those_that_their_sources_state():
    mixtral, qwen = load_model("mixtral-8x7b"), load_model("qwen3-30b-a3b")
    # Published: 46.7 and 12.9 billion (Mixtral), 30.5 and 3.3 billion (Qwen3).
    assert (round(mixtral.parameters / 1e8), round(mixtral.active_parameters / 1e8)) == (467, 129)
    assert (round(qwen.parameters / 1e8), round(qwen.active_parameters / 1e8)) == (305, 34)
    assert shape_model_flops(mixtral, 1) == pytest.approx(6 * mixtral.active_parameters + 12 * 32 * 4096)


def test_orders_that_know_the_whole_batch_are_searched_unless_the_balance_needs_less():
    assert {name for name, one in FAMILIES.items() if one.has_backward and ends_forwards_first(name)} == {
        "breadth-first",
        "gpipe",
    }
    asked = question()
    assert set(asked.families) == {"breadth-first", "gpipe"}
    others = replace(asked, balance="microbatch")
    assert {"1f1b", "breadth-first", "depth-first"} <= set(others.families)
    assert "slices" in asked.strategies
    assert "slices" not in others.strategies
    assert replace(asked, shape=replace(SHAPE, experts=None)).families == others.families


def test_a_plan_is_the_run_that_its_file_trains():
    best = plan(question(pp=(2,)), explains=False).best
    config = run_config(best, None, "dgx-h100", "pipeloom")
    assert config.model.expert_layout == SHAPE.experts
    assert config.model.balance is None
    other = plan(question(pp=(2,), families=("1f1b",), strategies=("none",)), explains=False).best
    assert run_config(other, None, "dgx-h100", "pipeloom").model.balance == "microbatch"


def test_experts_of_half_the_width_take_longer_than_one_block():
    plain = replace(SHAPE, experts=None)
    alone = plan(question(pp=(1,), tp=(1,), shards=("full",), micro_batch=(1,), recompute=("none",)), explains=False)
    dense = plan(replace(alone.question, shape=plain), explains=False)
    assert alone.best.prediction.step_time_s > dense.best.prediction.step_time_s


def test_other_programs_are_refused():
    with pytest.raises(ConfigError, match="model.experts needs the training program pipeloom, found fsdp"):
        make_question(SHAPE, "dgx-h100", num_devices=16, global_batch=64, seq=2048, software="fsdp")
