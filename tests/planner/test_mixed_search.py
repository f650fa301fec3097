"""Planning over several kinds of nodes: orders of the groups are tried, and bounds leave out nothing that is best."""

from dataclasses import replace

import pytest
from clusters import mixed, nodes, slow_link

from pipeloom.catalog import load_model, load_software
from pipeloom.errors import ConfigError
from pipeloom.planner.plan import plan as make_plan
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.search import search

OURS = load_software("pipeloom")
SHAPE = replace(load_model("gpt-6.6b"), layers=8, tied=False)
FAST, SLOW = (nodes(name, rate=rate, devices_per_node=2) for name, rate in (("fast", 1e14), ("slow", 4e13)))
FEW = Limits(families=("1f1b", "breadth-first"), micro_batch=(1, 2), shards=("none", "full"), loops=(1, 2))


def question(cluster, num_devices=8, **limits):
    return Question(
        shape=SHAPE,
        cluster=cluster,
        software=OURS,
        num_devices=num_devices,
        global_batch=8,
        seq=1024,
        limits=replace(FEW, **limits),
    )


def answers(found):
    return [
        (step.prediction.step_time_s, step.run, tuple(kind.name for kind, _ in step.cluster.kinds(8)))
        for step in found.steps
    ]


@pytest.mark.parametrize("memory_gb", [80, 13], ids=["ample", "short on the slow nodes"])
def test_bounds_leave_out_nothing_that_is_among_the_best(memory_gb):
    short = replace(SLOW, device=replace(SLOW.device, memory_bytes=memory_gb * 1e9))
    requested = question(mixed((FAST, 2), (short, 2), links=[slow_link("fast", "slow", gb_per_s=3)]))
    pruned, every = search(requested), search(requested, prunes=False)
    assert answers(pruned) == answers(every)
    assert pruned.counts.simulated < every.counts.simulated
    assert len(pruned.steps) == 10
    assert all(step.prediction.fits for step in pruned.steps)
    if memory_gb < 80:
        assert pruned.counts.too_large > 0


def test_sites_are_put_in_the_order_in_which_neighbors_have_the_good_links():
    names = "acbd"  # the file's order is a bad one
    good = {"ab", "bc", "cd"}
    pairs = ("ab", "ac", "ad", "bc", "bd", "cd")
    links = [slow_link(*pair, gb_per_s=100 if pair in good else 0.5) for pair in pairs]
    cluster = mixed(*((nodes(name, devices_per_node=2), 1) for name in names), links=links)
    best = search(question(cluster, tp=(2,), pp=(4,), loops=(1,))).best
    assert best is not None
    assert tuple(kind.name for kind, _ in best.cluster.kinds(8)) in {tuple("abcd"), tuple("dcba")}


def test_the_whole_run_goes_to_the_kind_where_it_is_fastest():
    cluster = mixed((SLOW, 4), (FAST, 4))
    best = search(question(cluster)).best
    assert best is not None
    assert [kind.name for kind, _ in best.cluster.kinds(8)] == ["fast"]
    alone = search(question(FAST)).best
    assert alone is not None
    assert best.prediction.step_time_s == alone.prediction.step_time_s


def test_slow_nodes_get_fewer_layers():
    best = search(question(mixed((FAST, 2), (SLOW, 2)), pp=(4,), loops=(1,))).best
    assert best is not None
    assert best.run.layers_by_stage is not None
    kinds = [place.kind for place in best.places]
    layers = dict(zip(best.run.layers_by_stage, kinds, strict=True))
    assert layers[max(layers)] == "fast"
    assert layers[min(layers)] == "slow"


def test_only_orders_whose_devices_compute_in_the_precision_are_tried():
    old = replace(SLOW, device=replace(SLOW.device, peak_flops_per_s={"fp32": 1e13}))
    cluster = mixed((old, 4), (FAST, 4))
    assert [one.part(0, 8).name for one in question(cluster).clusters] == ["fast"]
    with pytest.raises(ConfigError, match="the dtype must be one that device computes in: float32, found bfloat16"):
        question(cluster, num_devices=12)


def test_more_devices_than_the_cluster_has_are_refused():
    with pytest.raises(ConfigError, match="mixed has 8 devices"):
        question(mixed((FAST, 2), (SLOW, 2)), num_devices=16)


def test_a_plan_says_what_each_kind_alone_would_take_and_what_would_change_it():
    cluster = mixed((FAST, 2), (SLOW, 2), links=[slow_link("fast", "slow", gb_per_s=3)])
    requested = question(cluster, families=("1f1b",), loops=(1,), pp=(2, 4), tp=(1, 2), micro_batch=(1,))
    plan = make_plan(requested, 3)
    assert plan.best is not None
    alone = {rival.kind: rival.step for rival in plan.rivals if rival.kind.endswith("alone")}
    assert set(alone) == {"4 devices of fast alone", "4 devices of slow alone"}
    fast, slow = alone["4 devices of fast alone"], alone["4 devices of slow alone"]
    assert fast is not None
    assert slow is not None
    assert plan.best.prediction.step_time_s < fast.prediction.step_time_s < slow.prediction.step_time_s
    speeds = {change.what: change.speed for change in plan.changes}
    assert speeds["twice the bandwidth between nodes"] > 1


def test_nodes_that_only_hold_the_others_up_are_better_left_out():
    slower = nodes("slow", rate=5e12, devices_per_node=2)
    cluster = mixed((FAST, 2), (slower, 2), links=[slow_link("fast", "slow", gb_per_s=0.1)])
    requested = question(cluster, families=("1f1b",), loops=(1,), pp=(2, 4), tp=(1, 2), micro_batch=(1,))
    alone_advice = [advice for advice in make_plan(requested, 3).advice if "Do not use the other nodes" in advice]
    assert len(alone_advice) == 1
    assert "4 devices of fast alone" in alone_advice[0]


def test_where_nothing_fits_the_rank_with_the_least_room_is_reported():
    small = replace(SLOW, device=replace(SLOW.device, memory_bytes=2e9))
    requested = question(mixed((FAST, 2), (small, 2)), pp=(4,), dp=(1,), tp=(2,), loops=(1,), recompute=("full",))
    near = make_plan(requested, 1).closest
    assert near is not None
    assert near.least_bytes - near.missing_bytes == pytest.approx(2e9)
    assert not any(what.endswith("devices") for what, _ in near.ways_out)  # there are no more
