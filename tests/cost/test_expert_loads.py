"""What a capacity and unequal loads of experts do to the seconds and bytes of a layer."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.collectives import travel_bytes, travel_s
from pipeloom.cost.kept import Kept
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.products import expert_products
from pipeloom.workload.run import Run

CLUSTER, SOFTWARE = load_cluster("dgx-h100"), load_software("pipeloom")
SHAPE = load_model("mixtral-8x7b")
RUN = Run(shape=SHAPE, seq=2048, dp=8, ep=8, micro_batch=1, global_batch=8)


def limited(run, capacity):
    return replace(run, shape=replace(run.shape, experts=replace(run.shape.experts, capacity=capacity)))


def seconds(run):
    return piece_seconds(run, CLUSTER, SOFTWARE).layer


def rows(run):
    number, products = expert_products(run)
    return number * products[0][0]


def test_with_equal_loads_a_capacity_of_one_or_more_changes_nothing():
    for run in (RUN, replace(RUN, ep=1)):
        assert seconds(limited(run, 1.0)) == seconds(limited(run, 1.25)) == seconds(run)
        assert Kept(limited(run, 1.25)).layer("none") == Kept(run).layer("none")


def test_a_smaller_capacity_shortens_products_and_exchanges():
    half = limited(RUN, 0.5)
    assert rows(half) == rows(RUN) / 2
    assert travel_bytes(half) == travel_bytes(RUN) / 2
    assert all(less < more for less, more in zip(seconds(half), seconds(RUN), strict=True))
    assert Kept(half).layer("none") < Kept(RUN).layer("none")
    assert seconds(limited(replace(RUN, ep=1), 0.5)) < seconds(replace(RUN, ep=1))


def test_the_rank_with_most_tokens_decides_up_to_the_capacity():
    loaded = replace(RUN, expert_load=1.5)
    assert rows(loaded) == pytest.approx(1.5 * rows(RUN))
    assert travel_bytes(loaded) == pytest.approx(1.5 * travel_bytes(RUN))
    for one, other in zip(travel_s(loaded, CLUSTER, SOFTWARE), travel_s(RUN, CLUSTER, SOFTWARE), strict=True):
        assert other < one <= 1.5 * other
    assert rows(limited(loaded, 1.25)) == pytest.approx(1.25 * rows(RUN))
    assert Kept(loaded).layer("none") > Kept(RUN).layer("none")


def test_without_ranks_that_share_experts_their_loads_move_nothing():
    alone = replace(RUN, ep=1)
    assert seconds(replace(alone, expert_load=1.5)) == seconds(alone)
