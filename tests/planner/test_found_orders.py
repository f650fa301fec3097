"""Plans and simulated steps with an order that was searched are runs, and no slower than the orders of families."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster
from pipeloom.config import ModelConfig, RunConfig, ScheduleConfig, find_problems
from pipeloom.cost.hardware import Link
from pipeloom.errors import ConfigError
from pipeloom.planner.plan import make_question
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.planner.search import search
from pipeloom.planner.strategies import strategy_of
from pipeloom.predict.describe import describe
from pipeloom.predict.orders import least_step_s, with_order
from pipeloom.workload.layout import Layout

TRIES = 40


def slow_cluster():
    """A100 whose messages take about as long as compute."""
    cluster = load_cluster("dgx-a100")
    return replace(cluster, name="slow", intra=Link(latency_s=1e-3, bytes_per_s=0.6e9))


def question(**more):
    sizes = {"num_devices": 3, "global_batch": 5, "seq": 512}
    limits = {"tp": (1,), "pp": (3,), "loops": (2,), "micro_batch": (1,), "recompute": ("none",)}
    order_tries = more.pop("order_tries", TRIES)
    return replace(make_question("gpt-6.6b", slow_cluster(), **(sizes | limits | more)), order_tries=order_tries)


def small_run(**settings):
    layout = Layout(pp=2, loops=2, num_microbatches=4, **settings.pop("layout", {}))
    return RunConfig(
        model=ModelConfig(num_layers=4, hidden_size=64, num_heads=4), layout=layout, schedule=ScheduleConfig(**settings)
    )


def test_the_plan_has_an_order_that_is_faster_than_every_family(tmp_path):
    requested = question()
    best, family = search(requested, 1).best, search(replace(requested, order_tries=None), 1).best
    assert strategy_of(best) == "order"
    assert strategy_of(family) != "order"
    assert best.prediction.step_time_s < family.prediction.step_time_s
    assert least_step_s(best) <= best.prediction.step_time_s * (1 + 1e-9)
    held = max(memory.total_bytes for memory in best.prediction.memory_by_rank)
    assert held <= min(best.prediction.device_bytes) * (1 - requested.headroom)

    file = tmp_path / "schedule.txt"
    file.write_text(best.schedule_text)
    config = run_config(best, "gpt-6.6b", "dgx-a100", "pipeloom")
    config = replace(config, schedule=replace(config.schedule, file=file))
    assert config.schedule.family == "auto"
    assert not [one for one in find_problems(config) if "schedule" in one]
    assert predict_step(config).schedule.rows == best.schedule.rows


def test_a_step_is_no_slower_with_a_searched_order():
    for settings in ({}, {"family": "1f1b", "layout": {"loops": 1}}, {"placement": "v"}):
        settings = dict(settings)
        loops = settings.pop("layout", {}).get("loops", 2)
        run = small_run(**settings)
        step = predict_step(replace(run, layout=replace(run.layout, loops=loops)))
        found = with_order(step, TRIES)
        assert found.prediction.step_time_s <= step.prediction.step_time_s
        assert least_step_s(found) <= found.prediction.step_time_s * (1 + 1e-9)
        assert found.prediction.fits


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"keep": (1, 1)}, "schedule.keep"),
        ({"offload": True, "activation_budget": "1GB"}, "schedule.offload"),
        ({"layout": {"token_slices": 2}}, "layout.token_slices"),
    ],
)
def test_what_cannot_be_searched_is_refused(settings, name):
    step = predict_step(small_run(**settings))
    with pytest.raises(ConfigError, match=f"without {name}"):
        with_order(step, TRIES)


def test_one_pipeline_rank_has_no_order_to_search():
    run = small_run()
    config = replace(run, layout=replace(run.layout, pp=1))
    with pytest.raises(ConfigError, match=r"found layout\.pp 1"):
        with_order(predict_step(config), TRIES)
    assert describe(config).run.pp == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"order_tries": 0}, "at least 1, found 0"),
        ({"strategies": ("none", "balance")}, "only if strategies name order"),
        ({"software": "megatron-core"}, "runs orders of its own"),
    ],
)
def test_a_setting_that_has_no_effect_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        question(**more)


def test_the_strategy_is_used_on_request_only():
    assert "order" not in question(order_tries=None).strategies
    assert "order" in question(order_tries=None, strategies=("none", "order")).strategies
    assert "order" in question().strategies
