"""Steps over nodes of several kinds, against times by hand; over nodes that are alike, against the plain cluster."""

from dataclasses import replace

import pytest
from clusters import mixed, nodes, slow_link

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.exchanges import stage_collectives_s, step_terms
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.placed import Placed
from pipeloom.errors import UserError
from pipeloom.families import Choice
from pipeloom.predict.places import describe_places, shared_links
from pipeloom.predict.step import memory_that_would_fit, simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import Action, Placement
from pipeloom.workload.run import Run

OURS, MEGATRON = load_software("pipeloom"), load_software("megatron-2021")
A100, V100 = load_cluster("dgx-a100"), load_cluster("dgx-1-v100")
FAST, SLOW = nodes("fast"), nodes("slow", rate=5e13, gb_per_s=100)
SHAPE = replace(load_model("gpt-6.6b"), tied=False)
RUN = Run(shape=SHAPE, seq=1024, pp=4, tp=8, loops=2, global_batch=1)
EVEN = replace(RUN, layers_by_stage=(4,) * 8)


def knobs(run, family="breadth-first", **more):
    return Knobs(
        choice=Choice(family=family, pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches, **more)
    )


def step_of(run, cluster, software=OURS, family="breadth-first", **more):
    return simulate_step(Placed(run, cluster, software), knobs(run, family, **more))


def hop_s(run, gb_per_s, latency_s=0.0):
    """A message by hand: of one device, over its eighth of the node's network."""
    message = run.tokens * run.shape.hidden * 2 / run.tp
    return latency_s + message / (gb_per_s * 1e9 / 8 * OURS.efficiency.p2p) + OURS.efficiency.exchange_s


def work_s(run, cluster, direction):
    """Forward (0) or backward (1) of a stage of four layers by hand, on one kind of nodes alone."""
    fixed_s = OURS.efficiency.microbatch_s / run.loops * (0.4, 0.6)[direction]
    return 4 * piece_seconds(run, cluster, OURS).layer[direction] + fixed_s


def test_one_micro_batch_goes_there_and_back_over_fast_and_slow_ranks_and_links():
    cluster = mixed((FAST, 2), (SLOW, 2), links=[slow_link("fast", "slow", gb_per_s=5, latency_s=1e-3)])
    step = step_of(EVEN, cluster)
    stages = sum(4 * work_s(RUN, kind, direction) for kind in (FAST, SLOW) for direction in (0, 1))
    ends = (piece_seconds(RUN, FAST, OURS).embedding, piece_seconds(RUN, SLOW, OURS).head)
    # of seven boundaries three lie between the kinds: 1 | 2, round the loop 3 | 4, and 5 | 6
    hops = 2 * (3 * hop_s(RUN, 5, 1e-3) + 4 * hop_s(RUN, 100))
    expected = stages + sum(map(sum, ends)) + hops
    assert step.prediction.pipeline_s == pytest.approx(expected, rel=1e-9)


def test_only_the_edge_round_the_loop_may_be_the_slow_one():
    ring = mixed(
        *((nodes(name), 1) for name in "abcd"),
        links=[slow_link("a", "d", gb_per_s=2), slow_link("a", "c", gb_per_s=1), slow_link("b", "d", gb_per_s=1)],
    )
    costs = Placed(EVEN, ring, OURS).costs
    near, round_s = hop_s(RUN, 100), hop_s(RUN, 2)
    assert costs.boundary_s == pytest.approx((near, near, near, round_s, near, near, near))
    assert costs.transfer_s == pytest.approx(near)
    times = {text: costs.seconds(Action.parse(text)) for text in ("1RECV_F0", "4RECV_F0", "3RECV_B0", "4RECV_B0")}
    assert times == {
        "1RECV_F0": pytest.approx(near),
        "4RECV_F0": pytest.approx(round_s),
        "3RECV_B0": pytest.approx(round_s),
        "4RECV_B0": pytest.approx(near),
    }


def test_gpipe_waits_for_the_slow_rank():
    run = replace(EVEN, pp=2, loops=1, global_batch=6, layers_by_stage=(4, 4), shape=replace(SHAPE, layers=8))
    endless = [nodes(kind.name, rate=rate, gb_per_s=1e9) for kind, rate in ((FAST, 1e14), (SLOW, 5e13))]
    step = step_of(run, mixed(*((kind, 1) for kind in endless)), family="gpipe")
    first, last = ([work_s(run, kind, direction) for direction in (0, 1)] for kind in endless)
    first = [a + b for a, b in zip(first, piece_seconds(run, FAST, OURS).embedding, strict=True)]
    last = [a + b for a, b in zip(last, piece_seconds(run, SLOW, OURS).head, strict=True)]
    # the slow last rank has six forwards and six backwards in a row; before them one forward, behind them one backward
    expected = first[0] + 6 * last[0] + 6 * last[1] + first[1]
    assert last[0] > first[0]
    assert step.prediction.pipeline_s == pytest.approx(expected + 2 * OURS.efficiency.exchange_s, rel=1e-6)


def test_a_blocking_program_waits_for_half_of_each_message_on_either_side():
    cluster = mixed((FAST, 2), (SLOW, 2), links=[slow_link("fast", "slow", gb_per_s=5)])
    blocking, free = (Placed(EVEN, cluster, replace(OURS, is_blocking=flag)).costs for flag in (True, False))
    near, far = hop_s(RUN, 100), hop_s(RUN, 5)
    more = [b - f for b, f in zip(blocking.forward_s, free.forward_s, strict=True)]
    either = (near + far) / 2
    assert more == pytest.approx([near / 2, either, either, either, either, either, either, near / 2])
    assert blocking.boundary_s == ()
    assert blocking.transfer_s == 0


def test_a_tied_matrix_goes_over_the_link_between_the_first_and_the_last_rank():
    tied = replace(EVEN, shape=replace(SHAPE, tied=True))
    cluster = mixed((FAST, 2), (SLOW, 2), links=[slow_link("fast", "slow", gb_per_s=5)])
    matrix = SHAPE.vocab * SHAPE.hidden / 8
    rate = 5e9 / 8 * OURS.efficiency.p2p
    costs = Placed(tied, cluster, OURS).costs
    assert costs.tied_s == pytest.approx(2 * matrix / rate + OURS.efficiency.exchange_s)
    assert costs.tied_grad_s == pytest.approx(4 * matrix / rate + OURS.efficiency.exchange_s)
    copies = step_terms(Placed(tied, cluster, MEGATRON), 0.0).tied_s
    assert copies > 5 * step_terms(Placed(tied, FAST, MEGATRON), 0.0).tied_s


def test_collectives_and_the_optimizer_are_those_of_the_nodes_where_a_stage_is():
    run = replace(EVEN, dp=2, shard="full", global_batch=2)
    cluster = mixed((FAST, 4), (nodes("slow", rate=5e13, gb_per_s=10), 4))
    gathers, reductions = stage_collectives_s(Placed(run, cluster, OURS))
    alone = [stage_collectives_s(Placed(run, kind.cluster, OURS)) for kind in cluster.groups]
    assert gathers[:4] == (*alone[0][0][:2], *alone[1][0][2:4])
    assert reductions[:4] == (*alone[0][1][:2], *alone[1][1][2:4])
    assert reductions[2] > 5 * reductions[1]
    expected = [step_terms(Placed(run, kind.cluster, OURS), 0.0).optimizer_s for kind in cluster.groups]
    found = step_terms(Placed(run, cluster, OURS), 0.0).optimizer_s
    assert expected[0] < found == pytest.approx(expected[1], rel=0.2)  # the last rank holds more than the one before


@pytest.mark.parametrize(("loops", "best"), [(1, {"abcd", "dcba"}), (2, {"abcd", "bcda", "cdab", "dabc"})])
def test_the_order_of_groups_decides_over_which_links_neighbors_talk(loops, best):
    """Sites round a lake, each with a good link to both neighbors; the way from d to a is half as fast."""
    pairs = {"ab": 100, "bc": 100, "cd": 100, "da": 50 if loops == 1 else 100, "ac": 1, "bd": 1}
    links = [slow_link(*pair, gb_per_s=rate) for pair, rate in pairs.items()]
    cluster = mixed(*((nodes(name), 1) for name in "acbd"), links=links)  # the file's order is a bad one
    run = replace(RUN, loops=loops, global_batch=4, layers_by_stage=(32 // (4 * loops),) * (4 * loops))
    times = {
        names: step_of(run, cluster.reordered(names)).prediction.step_time_s
        for names in map(tuple, ("abcd", "dcba", "bcda", "cdab", "dabc", "acbd", "bdac", "abdc"))
    }
    fastest = min(times.values())
    found = {"".join(names) for names, seconds in times.items() if seconds <= fastest * (1 + 1e-9)}
    assert found >= best
    assert times[tuple("acbd")] > 1.05 * fastest
    listed = min(step_of(run, cluster.reordered(names)).prediction.step_time_s for names in cluster.orders())
    assert listed == pytest.approx(fastest, rel=1e-9)


def test_every_rank_has_to_fit_its_own_devices():
    small, large = (nodes(f"{size} GB", memory_gb=size, devices_per_node=4) for size in (13, 60))
    run = replace(EVEN, tp=4, global_batch=8)
    step = step_of(run, mixed((small, 2), (large, 2)))
    totals = [memory.total_bytes for memory in step.prediction.memory_by_rank]
    assert step.prediction.device_bytes == (13e9, 13e9, 60e9, 60e9)
    assert totals.index(max(totals)) == 3  # it has the logits, and room for them
    assert totals[1] < 13e9 < totals[0]
    assert step.prediction.fullest_rank == 0
    assert not step.prediction.fits
    assert step_of(run, mixed((large, 2), (small, 2))).prediction.fullest_rank == 3
    assert step_of(run, large).prediction.fits
    lean = step_of(replace(run, recompute="full"), step.cluster).prediction
    assert lean.fits
    assert memory_that_would_fit(step)["layout.recompute full"] == pytest.approx(lean.memory.total_bytes)


def test_slower_ranks_get_fewer_layers():
    cluster = mixed((FAST, 2), (SLOW, 2))
    slowness = Placed(RUN, cluster, OURS).slowness
    assert slowness[:2] == (1.0, 1.0)
    assert (
        slowness[2]
        == slowness[3]
        == pytest.approx(sum(piece_seconds(RUN, SLOW, OURS).layer) / sum(piece_seconds(RUN, FAST, OURS).layer))
    )
    layers = Placed(RUN, cluster, OURS).with_fastest_layers().run.layers_by_stage
    by_rank = [sum(layers[rank::4]) for rank in range(4)]
    assert sum(layers) == 32
    assert min(by_rank[:2]) > max(by_rank[2:])
    many = replace(RUN, global_batch=16)
    found = step_of(many, cluster)
    assert found.run.layers_by_stage == Placed(many, cluster, OURS).with_fastest_layers().run.layers_by_stage
    even = step_of(replace(many, layers_by_stage=(4,) * 8), cluster)
    assert found.prediction.step_time_s < 0.85 * even.prediction.step_time_s


def test_layers_are_weighed_by_the_fastest_rank_wherever_it_is():
    backwards = mixed((SLOW, 2), (FAST, 2))
    assert Placed(RUN, backwards, OURS).piece_seconds == Placed(RUN, FAST, OURS).piece_seconds
    assert Placed(RUN, backwards, OURS).slowness[2:] == (1.0, 1.0)


def test_layers_that_recompute_do_so_at_their_ranks_speed():
    kinds = ("full",) * 8 + ("none",) * 24  # all layers of the stages 0 and 1
    run = replace(EVEN, recompute_layers=kinds)
    cluster = mixed((FAST, 1), (SLOW, 3))
    found, alone = Placed(run, cluster, OURS).costs, [Placed(run, kind, OURS).costs for kind in (FAST, SLOW)]
    inner = slice(1, 7)
    on_fast = [stage % 4 == 0 for stage in range(8)]
    for side in ("forward_s", "backward_s"):
        expected = [getattr(alone[0 if fast else 1], side)[stage] for stage, fast in enumerate(on_fast)]
        assert getattr(found, side)[inner] == tuple(expected[inner])
    assert found.backward_s[1] > 1.2 * found.backward_s[2]


def test_the_share_of_a_split_backward_is_that_of_all_layers():
    cluster = mixed((FAST, 2), (nodes("slow", rate=1e13), 2))
    costs = Placed(EVEN, cluster, OURS).costs
    pieces = [piece_seconds(EVEN, kind.cluster, OURS) for kind in cluster.groups]
    of_weights, backward = sum(piece.weight_s for piece in pieces), sum(piece.layer[1] for piece in pieces)
    assert costs.weight_share == pytest.approx(of_weights / backward)


def test_in_a_v_only_the_way_between_neighbors_counts():
    cluster = mixed((FAST, 2), (SLOW, 2), links=[slow_link("fast", "slow", gb_per_s=5)])
    run = replace(EVEN, global_batch=4)
    step = step_of(run, cluster, placement="v")
    near, far = hop_s(run, 100), hop_s(run, 5)
    assert step.run.placement == "v"
    assert step.prediction.costs.boundary_s == pytest.approx((near, far, near, near, near, far, near))
    assert step.prediction.costs.forward_s[7] < step.prediction.costs.forward_s[4]  # the head is on the fast rank 0


def test_layers_stay_where_the_run_or_its_program_puts_them():
    cluster = mixed((FAST, 2), (SLOW, 2))
    assert Placed(EVEN, cluster, OURS).balanced.run == EVEN
    assert Placed(RUN, cluster, MEGATRON).balanced.run == RUN
    assert Placed(RUN, FAST, OURS).balanced.run == RUN


def split(cluster):
    """Two groups of two nodes with the network that the cluster has anyway."""
    return mixed((replace(cluster, name="one"), 2), (replace(cluster, name="two"), 2))


SAME = {
    "a node for each rank": (RUN, OURS, {}),
    "half a node for each rank": (replace(RUN, tp=4, pp=8, loops=1), OURS, {}),
    "a device for each rank": (replace(RUN, tp=1, pp=32, loops=1), OURS, {}),
    "replicas over both": (replace(RUN, pp=1, dp=4, shard="full", global_batch=8), OURS, {}),
    "ranks over both": (replace(RUN, pp=2, tp=4, dp=4, shard="full", replicate=2, global_batch=8), OURS, {}),
    "three ranks, one over both": (replace(RUN, pp=3, tp=8, loops=2, shape=replace(SHAPE, layers=30)), OURS, {}),
    "v": (replace(RUN, global_batch=4), OURS, {"placement": "v"}),
    "tied": (replace(RUN, shape=replace(SHAPE, tied=True), global_batch=4), OURS, {}),
    "blocking": (replace(RUN, dp=2, tp=4, shard="optimizer", global_batch=8), MEGATRON, {"family": "depth-first"}),
}


@pytest.mark.parametrize("cluster", [replace(A100, adapters_per_node=4), V100], ids=["a100", "v100"])
@pytest.mark.parametrize("title", SAME)
def test_groups_that_are_alike_take_as_long_as_one_kind(title, cluster):
    run, software, how = SAME[title]
    run = replace(run, precision="fp16")
    plain, found = (step_of(run, where, software, **how) for where in (cluster, split(cluster)))
    assert found.prediction == plain.prediction
    assert found.accounts == plain.accounts
    assert (found.mfu, found.bubble_fraction) == (plain.mfu, plain.bubble_fraction)


def test_a_run_inside_one_group_does_not_know_of_the_others():
    run = replace(RUN, pp=2)
    assert step_of(run, mixed((FAST, 2), (SLOW, 2))).prediction == step_of(run, FAST).prediction


def test_a_rank_over_two_kinds_is_no_faster_than_on_either():
    run = replace(RUN, pp=1, dp=4, loops=1, global_batch=8, shard="optimizer")
    over = step_of(run, mixed((FAST, 2), (SLOW, 2), links=[slow_link("fast", "slow", gb_per_s=5)])).prediction
    assert over.costs.forward_s == Placed(run, SLOW, OURS).costs.forward_s
    assert over.costs.forward_s > Placed(run, FAST, OURS).costs.forward_s
    assert over.step_time_s > step_of(run, SLOW).prediction.step_time_s


def test_what_leaves_a_node_shares_the_adapter_of_its_own_kind():
    one = mixed((nodes("a", devices_per_node=4, adapters_per_node=1), 1), (nodes("b", devices_per_node=8), 1))
    run = replace(RUN, tp=1, dp=2, pp=6, loops=1, global_batch=2)
    links = shared_links(Placed(run, one, OURS), Placement.looped(6, 1))
    places = {stage: links.onward_of(Action.parse(f"{stage}RECV_F0"), stage) for stage in range(1, 6)}
    assert places == {1: None, 2: ("down", 1, 0), 3: None, 4: None, 5: None}
    assert links.onward_of(Action.parse("1RECV_B0"), 1) == ("down", 0, 0)  # from rank 2, by the only adapter


def test_a_message_over_a_slower_link_leaves_the_adapters_to_others():
    run = replace(RUN, tp=8, dp=1, pp=4, loops=1, global_batch=4)
    for gb_per_s, is_shared in ((5, False), (49, False), (51, True)):
        cluster = mixed((nodes("fast"), 2), (nodes("far"), 2), links=[slow_link("fast", "far", gb_per_s=gb_per_s)])
        links = shared_links(Placed(run, cluster, OURS), Placement.looped(4, 1))
        over = Action.parse("2RECV_F0")  # from the second node to the third
        assert (links.onward_of(over, 2) is not None) == is_shared
        users = [links.resource_of(Action.parse(text), rank) for text, rank in (("2RECV_F0", 2), ("0RECV_B0", 0))]
        assert (len(set(users)) == 1) == is_shared  # both leave the second node
        assert all(links.capacity[one] == 1 for one in users)


def test_collectives_leave_the_nodes_of_their_own_rank_only():
    cluster = mixed((nodes("wide"), 2), (nodes("narrow", devices_per_node=4), 4))
    run = replace(RUN, tp=1, dp=8, pp=4, loops=1, global_batch=8)
    links = shared_links(Placed(run, cluster, OURS), Placement.looped(4, 1))
    reductions = {stage: links.resource_of(Action.parse(f"{stage}REDUCE_GRAD"), stage) for stage in range(4)}
    assert reductions == {0: None, 1: None, 2: ("up", 2, 0), 3: ("up", 4, 0)}


def test_a_node_of_another_kind_has_its_own_adapters():
    cluster = mixed((nodes("one", adapters_per_node=1), 1), (nodes("eight"), 1))
    run = replace(RUN, tp=1, dp=4, pp=4, loops=1, global_batch=4)
    links = shared_links(Placed(run, cluster, OURS), Placement.looped(4, 1))
    assert links.onward_of(Action.parse("2RECV_F0"), 2) == ("down", 1, 0)
    looped = shared_links(Placed(replace(run, loops=2), cluster, OURS), Placement.looped(4, 2))
    assert looped.onward_of(Action.parse("3RECV_B0"), 3) == ("down", 1, 4)  # from rank 0
    assert looped.onward_of(Action.parse("4RECV_F0"), 0) == ("down", 0, 0)


def test_places_say_which_ranks_are_on_which_nodes():
    cluster = mixed((FAST, 3), (SLOW, 3))
    run = replace(RUN, pp=3, dp=2, loops=1, global_batch=2)
    assert describe_places(step_of(run, cluster).places) == [
        "0 on fast, nodes 0-1",
        "1 on fast + slow, nodes 2-3",
        "2 on slow, nodes 4-5",
    ]
    half = replace(RUN, pp=8, tp=4)
    assert describe_places(step_of(replace(half, shape=SHAPE, loops=1), cluster).places) == [
        "0-5 on fast, nodes 0-2", "6-7 on slow, node 3",
    ]  # fmt: skip


def test_the_peak_is_that_of_the_devices_that_are_there():
    cluster = mixed((FAST, 2), (SLOW, 2))
    step = step_of(EVEN, cluster)
    assert step.peak_flops_per_s == 16 * 1e14 + 16 * 5e13


def test_a_run_on_more_devices_than_there_are_is_refused():
    with pytest.raises(UserError, match="mixed has 16 devices"):
        step_of(RUN, mixed((FAST, 1), (SLOW, 1)))
