"""The family that `schedule.family auto` stands for."""

from dataclasses import replace

import pytest

from pipeloom import load_run
from pipeloom.config import RunConfig, ScheduleConfig
from pipeloom.config.file import format_run
from pipeloom.recipe import build, communicating
from pipeloom.schedule import Kind
from pipeloom.workload.layout import Layout

ALONE = RunConfig(layout=Layout(pp=1))


def run_of(schedule=None, **layout):
    return RunConfig(layout=Layout(**layout), schedule=schedule or ScheduleConfig())


def test_the_default_is_breadth_first_with_a_pipeline():
    assert RunConfig().schedule.family == "auto"
    assert RunConfig().family == "breadth-first"
    assert RunConfig().choice().family == "breadth-first"


@pytest.mark.parametrize("loops", [1, 2, 3])
def test_without_a_pipeline_a_rank_holds_one_micro_batch(loops):
    run = run_of(pp=1, loops=loops)
    (row,) = build(run.recipe()).rows
    orders = [(action.kind is Kind.FORWARD, action.microbatch) for action in row]
    alone = [(forward, number) for number in range(8) for forward in (True, False) for _ in range(loops)]
    assert orders == alone


@pytest.mark.parametrize(
    "run",
    [
        run_of(pp=1, dp=2, shard="full"),
        run_of(pp=1, dp=2, shard="gradients", schedule=ScheduleConfig(gradient_buffers=1)),
        run_of(pp=1, schedule=ScheduleConfig(device_budget="20MiB")),
    ],
    ids=["gathers", "reductions", "swaps"],
)
def test_a_rank_whose_stages_need_a_transfer_at_each_visit_visits_them_once(run):
    assert run.family == "breadth-first"


@pytest.mark.parametrize(
    "run",
    [
        run_of(pp=1, dp=2),
        run_of(pp=1, dp=2, shard="optimizer"),
        run_of(pp=1, dp=2, shard="gradients"),
        run_of(pp=1, dp=2, shard="full", loops=1),
        run_of(pp=1, dp=2, shard="full", num_microbatches=1),
        run_of(pp=1, tp=2),
    ],
    ids=["replicas", "optimizer", "gradients", "one stage", "one micro-batch", "tensor"],
)
def test_sharding_without_more_transfers_keeps_the_order_that_holds_least(run):
    assert run.family == "depth-first"


def test_each_stage_is_gathered_twice_at_most_in_the_automatic_order():
    run = run_of(pp=1, dp=2, shard="full", loops=4)
    gathers = {
        name: sum(row.is_kind(Kind.UNSHARD).sum() for row in communicating(one.recipe()).rows)
        for name, one in {
            "auto": run,
            "depth-first": replace(run, schedule=ScheduleConfig(family="depth-first")),
        }.items()
    }
    assert gathers["auto"] <= 2 * 4 < gathers["depth-first"]


def test_a_named_family_stays():
    for family in ("breadth-first", "gpipe", "depth-first"):
        assert replace(ALONE, schedule=ScheduleConfig(family=family)).family == family


@pytest.mark.parametrize(("old", "new"), [(4, 1), (1, 4), (1, 2)])
def test_the_file_of_a_run_keeps_its_family_under_another_layout(old, new, tmp_path):
    before = run_of(pp=old, num_microbatches=3)
    file = replace(before, schedule=ScheduleConfig(family=before.family))
    (tmp_path / "config.toml").write_text(format_run(file), encoding="utf-8")
    read = load_run(tmp_path / "config.toml", layout={"pp": new})
    assert read.family == before.family
    assert build(read.recipe()).num_ranks == new
