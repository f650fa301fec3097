"""Layouts on fewer nodes than a run has: of numbers that divide well, and never slower than fewer replicas."""

from dataclasses import replace
from itertools import pairwise
from math import gcd

import pytest

from pipeloom import load_run
from pipeloom.catalog import load_cluster, load_software
from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.errors import UserError
from pipeloom.planner.error_bar import error_bar
from pipeloom.planner.fewer_nodes import dividing, fewer_replicas, planned
from pipeloom.planner.plan import Plan

MODEL = {"family": "gpt2", "num_layers": 12, "hidden_size": 2048, "num_heads": 16, "vocab_size": 1024}
LAYOUT = {"pp": 1, "dp": 8, "num_microbatches": 1, "microbatch_size": 1, "shard": "optimizer"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Eight replicas on eight nodes of one device."""
    file = tmp_path_factory.mktemp("cluster") / "single.toml"
    file.write_text(cluster_to_toml(replace(load_cluster("dgx-a100"), name="single", devices_per_node=1)))
    machine = {"cluster": str(file), "software": "megatron-2021"}
    return load_run(model=MODEL, data={"seq_len": 1024}, layout=LAYOUT, training={"dtype": "bfloat16"}, machine=machine)


def test_lower_numbers_divide_better_and_there_are_few_of_them():
    assert dividing(61, 8, 512) == [61, 60, 56, 48, 32]
    assert dividing(63, 8, 480) == [63, 60]
    for batch in (1, 48, 1000, 1024):
        for num_nodes in (1, 35, 63, 64, 999):
            found = dividing(num_nodes, 4, batch)
            left = [4 * number // gcd(4 * number, batch * 2**20) for number in found]
            assert found[0] == num_nodes
            assert all(2 * after <= before for before, after in pairwise(left))
            assert left[-1] == 1


def test_where_a_number_of_nodes_divides_badly_the_layout_of_a_lower_one_takes_part(small):
    kept = fewer_replicas(small)
    on = planned(small, 10.0, [8, 7], kept)
    assert (kept(7).num_nodes, on(7).num_nodes) == (4, 6)
    assert on(7).step_s < kept(7).step_s


def test_a_new_plan_is_for_the_program_whose_speed_the_run_has_if_it_trains_the_run(small, monkeypatch):
    launchers = []

    def plan(question, **_):
        launchers.append((question.launcher.name, question.software.name))
        raise UserError("")

    monkeypatch.setattr("pipeloom.planner.fewer_nodes.plan", plan)
    of_megatron = replace(small, machine=replace(small.machine, software="megatron-core"))
    with_sgd = replace(of_megatron, optimizer=replace(small.optimizer, name="sgd"))
    for run in (of_megatron, with_sgd, small):
        planned(run, 10.0, [4], fewer_replicas(small))(4)
    assert dict.fromkeys(launchers) == dict.fromkeys(
        [("megatron", "megatron-core"), ("pipeloom", "megatron-core"), ("pipeloom", "megatron-2021")]
    )


def test_one_replica_is_left_of_two_that_share_state(small):
    layout = replace(small.layout, dp=2, pp=4, shard="full")
    two = replace(small, layout=layout, schedule=replace(small.schedule, residency=2, prefetch=1, gradient_buffers=1))
    left = fewer_replicas(two)(7)
    assert (left.num_nodes, left.step.run.dp, left.step.run.shard) == (4, 1, "none")


def test_a_new_plan_is_never_slower_than_fewer_replicas(small, monkeypatch):
    """A search that is cut short may find a slower layout, or none."""
    monkeypatch.setattr("pipeloom.planner.fewer_nodes._planned_on", lambda *_: None)
    kept = fewer_replicas(small)
    on = planned(small, 10.0, [8, 7], kept)
    assert [on(number) for number in (8, 7, 5)] == [kept(number) for number in (8, 7, 5)]
    assert on(7).num_nodes == 4


def test_a_layout_is_not_proved_if_a_search_was_cut_short(small, monkeypatch):
    bar = error_bar(load_cluster("dgx-a100"), load_software("megatron-2021"))
    monkeypatch.setattr("pipeloom.planner.fewer_nodes.plan", lambda question, **_: Plan(question, bar, stopped="time"))
    kept = fewer_replicas(small)
    found = planned(small, 10.0, [7], kept)(7)
    assert (found.step, found.is_proved, kept(7).is_proved) == (kept(7).step, False, True)
