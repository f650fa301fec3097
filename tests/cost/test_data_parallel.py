"""Collectives of data parallelism: bytes by hand, and hybrid sharding."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.exchanges import gather_s, reduce_s
from pipeloom.cost.hardware import Group
from pipeloom.workload.run import Run

A100 = load_cluster("dgx-a100")
OURS = load_software("pipeloom")
RUN = Run(shape=load_model("llama-13b"), seq=2048, dp=16, shard="full")
BUS = OURS.efficiency.data_bus


def test_sharded_gradients_are_scattered_and_whole_ones_reduced_everywhere():
    group = Group.strided(16, 1, 8)
    assert reduce_s(RUN, A100, OURS, 1e9) == A100.collective_s("reduce_scatter", 4e9, group, BUS)
    whole = replace(RUN, shard="none")
    assert reduce_s(whole, A100, OURS, 1e9) == A100.collective_s("all_reduce", 4e9, group, BUS)
    assert reduce_s(whole, A100, replace(OURS, reduces_whole=True), 1e9) == reduce_s(whole, A100, OURS, 1e9)


def test_weights_are_gathered_in_the_size_of_the_precision_and_only_where_they_are_sharded():
    group = Group.strided(16, 1, 8)
    assert gather_s(RUN, A100, OURS, 1e9) == A100.collective_s("all_gather", 2e9, group, BUS)
    single = replace(RUN, precision="fp32")
    assert gather_s(single, A100, OURS, 1e9) == A100.collective_s("all_gather", 4e9, group, BUS)
    assert gather_s(replace(RUN, shard="none"), A100, OURS, 1e9) == 0


def test_with_hybrid_sharding_gathers_stay_in_a_copy_and_shards_are_reduced_between_copies():
    hybrid = replace(RUN, replicate=2)
    inner, outer = Group.strided(8, 1, 8), Group.strided(2, 8, 8)
    assert inner.num_nodes == 1
    assert outer.num_nodes == 2
    assert gather_s(hybrid, A100, OURS, 1e9) == A100.collective_s("all_gather", 2e9, inner, BUS)
    assert gather_s(hybrid, A100, OURS, 1e9) < gather_s(RUN, A100, OURS, 1e9)
    assert reduce_s(hybrid, A100, OURS, 1e9) == pytest.approx(
        A100.collective_s("reduce_scatter", 4e9, inner, BUS) + A100.collective_s("all_reduce", 4e9 / 8, outer, BUS)
    )
