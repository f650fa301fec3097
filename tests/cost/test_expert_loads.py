"""What a capacity and unequal loads of experts do to the seconds and bytes of a layer."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.collectives import travel_bytes, travel_s
from pipeloom.cost.kept import Kept
from pipeloom.cost.layers import Pieces
from pipeloom.cost.overlap import layer_seconds
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.products import expert_products
from pipeloom.cost.stages import rank_parameters
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


def layer_of(run, cluster=CLUSTER):
    pieces = Pieces(run, cluster, SOFTWARE)
    alone_s = pieces.seconds(pieces.layer_forward()), pieces.seconds(pieces.layer_backward())
    return layer_seconds(pieces, alone_s)


def test_halves_in_turns_hide_the_exchange_and_take_no_less_than_compute_alone():
    run = replace(RUN, dp=16, ep=16, shape=replace(SHAPE, experts=replace(SHAPE.experts, count=16)), micro_batch=2)
    for recompute in ("none", "full"):
        plain, turns = (layer_of(replace(run, recompute=recompute, ep_overlap=one)) for one in (False, True))
        assert plain.hidden_s == plain.edge_s == (0.0, 0.0)
        for direction in (0, 1):
            exposed_s = turns.whole_s[direction] + turns.hidden_s[direction]
            again_s = turns.travel_s[0] if direction and recompute == "full" else 0.0
            assert turns.whole_s[direction] < plain.whole_s[direction]
            assert 0 < turns.hidden_s[direction] < turns.travel_s[direction] + again_s
            assert turns.whole_s[direction] > exposed_s - turns.travel_s[direction] - again_s
        assert (turns.edge_s == (0.0, 0.0)) == (recompute == "full")


def test_what_is_not_hidden_is_the_longer_one_of_exchange_and_compute():
    """With a link a thousand times slower, halves hide as much as is computed, less what transfers slow it down."""
    run = replace(RUN, micro_batch=2, ep_overlap=True)
    link = replace(CLUSTER.intra, bytes_per_s=CLUSTER.intra.bytes_per_s / 1e3)
    slow = replace(CLUSTER, intra=link, bus_curves={}, collective_curves={})
    found = layer_of(run, slow)
    alone = layer_of(replace(run, ep=1, ep_overlap=False), slow)
    assert found.whole_s[0] == pytest.approx(found.travel_s[0], rel=0.01)
    assert found.hidden_s[0] == pytest.approx(alone.whole_s[0], rel=0.1)


def test_shared_experts_hide_a_part_of_the_exchange():
    shape = replace(SHAPE, experts=replace(SHAPE.experts, shared=1))
    found = layer_of(replace(RUN, shape=shape))
    assert all(0 < hidden < travel for hidden, travel in zip(found.hidden_s, found.travel_s, strict=True))
    assert layer_of(RUN).hidden_s == (0.0, 0.0)


def test_a_stage_exposes_its_last_exchange_once():
    run = replace(RUN, micro_batch=2, ep_overlap=True)
    pieces = piece_seconds(run, CLUSTER, SOFTWARE)
    assert pieces.stage == layer_of(run.of_pieces).edge_s != (0.0, 0.0)
    assert pieces.hidden_travel_s == layer_of(run.of_pieces).hidden_s


@pytest.mark.parametrize("name", ["pipeloom", "megatron-core", "fsdp", "general"])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_ranks_that_share_experts_hold_all_of_them_once_together(name, model):
    software = load_software(name)
    alone = Run(shape=load_model(model), seq=512, dp=8, micro_batch=1, global_batch=8)
    (whole,) = rank_parameters(alone, software)
    for ep in (2, 4, 8):
        dense, experts = (one for (one,) in (rank_parameters(each, software) for each in alone.changed(ep=ep).segments))
        assert dense + ep * experts == pytest.approx(whole, rel=1e-3)
