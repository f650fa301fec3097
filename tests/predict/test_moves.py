"""Steps whose activations move: to partners over the links where ranks stand, to hosts; counted memory is simulated."""

from dataclasses import replace

import pytest

from pipeloom.analysis.summary import communication
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.exchanges import evict_seconds, offload_seconds
from pipeloom.cost.placed import Placed
from pipeloom.errors import UserError
from pipeloom.families import Choice
from pipeloom.passes import Moves
from pipeloom.predict.memory import memory_by_rank
from pipeloom.predict.places import shared_links
from pipeloom.predict.step import simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import Action, Kind
from pipeloom.workload.layout import paired_order
from pipeloom.workload.run import Run

A100 = load_cluster("dgx-a100")
OURS, MEGATRON = load_software("pipeloom"), load_software("megatron-2021")
PAIRED = (0, 7, 1, 6, 2, 5, 3, 4)
RUN = Run(
    shape=load_model("llama-65b"), seq=2048, pp=8, tp=4, micro_batch=4, global_batch=128,
    sequence_parallel=True, pipeline_order=PAIRED,
)  # fmt: skip


def step(run=RUN, software=OURS, cluster=A100, family="1f1b", **moving):
    choice = Choice(family=family, pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)
    return simulate_step(Placed(run, cluster, software), Knobs(choice=choice, moves=Moves(**moving)))


def activations(found):
    return [memory.activations_bytes for memory in found.prediction.memory_by_rank]


@pytest.mark.parametrize("how", ["balance", "offload"])
@pytest.mark.parametrize("software", [OURS, MEGATRON], ids=["ours", "megatron"])
def test_the_memory_that_is_counted_is_the_one_that_is_simulated(how, software):
    room = 0.99 * max(activations(step(software=software))) if how == "offload" else None
    found = step(software=software, budget_bytes=room, **{how: True})
    assert sum(found.schedule.facts.row.is_kind(Kind.EVICT, Kind.OFFLOAD)) > 0
    for memory, curve in zip(found.prediction.memory_by_rank, found.memory_over_time, strict=True):
        simulated = curve.peak_bytes - curve.peak_parts["always"] - curve.peak_parts["receive buffers"]
        assert simulated <= (memory.activations_bytes + memory.head_bytes) * (1 + 1e-9)
        assert simulated >= 0.97 * (memory.activations_bytes + memory.head_bytes)


def test_balance_in_pairs_on_one_node_takes_no_time_and_flattens_memory():
    shorter = replace(RUN, seq=1920)
    plain, balanced = step(shorter), step(shorter, balance=True)
    assert balanced.prediction.step_time_s == pytest.approx(plain.prediction.step_time_s, rel=1e-3)
    assert (plain.prediction.fits, balanced.prediction.fits) == (False, True)
    assert max(activations(balanced)) < 0.66 * max(activations(plain))
    assert balanced.schedule.partners == tuple(reversed(range(8)))
    lanes = {use.lane.name for use in communication(balanced.trace) if use.busy_s}
    assert {"evict", "load"} <= lanes


def test_where_partners_are_far_apart_less_is_moved():
    near, far = step(balance=True), step(replace(RUN, pipeline_order=None), balance=True)
    assert far.prediction.costs.evict_s[0] > 5 * near.prediction.costs.evict_s[0]
    assert max(activations(near)) < max(activations(far))


def test_a_paired_order_puts_partners_on_one_node():
    partners = tuple(reversed(range(8)))
    assert paired_order(partners) == PAIRED
    assert paired_order((2, 1, 0)) == (0, 2, 1)
    assert [Placed(RUN, A100, OURS).first_device(rank) for rank in range(8)] == [0, 8, 16, 24, 28, 20, 12, 4]
    assert all(Placed(RUN, A100, OURS).are_near(rank, partners[rank]) for rank in range(8))
    ascending = replace(RUN, pipeline_order=None)
    assert [Placed(ascending, A100, OURS).are_near(rank, rank + 1) for rank in range(7)] == [True, False] * 3 + [True]
    assert not any(Placed(ascending, A100, OURS).are_near(rank, partners[rank]) for rank in (0, 1, 2))
    assert Placed(ascending, A100, OURS).are_near(3, 4) is False


def test_messages_between_stages_take_the_links_where_their_ranks_stand():
    costs = step().prediction.costs
    inside = costs.boundary_s[3]  # ranks 3 and 4 share the last node
    assert all(seconds > 2 * inside for number, seconds in enumerate(costs.boundary_s) if number != 3)
    assert [place.first_node for place in step().places] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_seconds_of_a_swap_are_bytes_over_the_link():
    sizes, partners = [1e9] * 8, tuple(reversed(range(8)))
    near = evict_seconds(Placed(RUN, A100, OURS), partners, sizes)
    use = OURS.efficiency
    assert near[0] == pytest.approx(A100.intra.latency_s + 1e9 / (300e9 * use.p2p) + use.exchange_s)
    far = evict_seconds(Placed(replace(RUN, pipeline_order=None), A100, OURS), partners, sizes)
    assert far[0] == pytest.approx(A100.inter.latency_s + 1e9 / (200e9 / 8 * use.p2p) + use.exchange_s)
    assert evict_seconds(Placed(RUN, A100, OURS), tuple(range(8)), sizes) == (0.0,) * 8


def test_swaps_between_nodes_draw_on_the_network_adapter():
    run, one = replace(RUN, tp=2, pipeline_order=None), replace(A100, adapters_per_node=1)
    partners = tuple(reversed(range(8)))
    links = shared_links(Placed(run, one, OURS), step().schedule.placement, partners)
    assert links is not None
    # Rank 7 is on the second node.
    assert (
        links.resource_of(Action(Kind.EVICT, 0, 0), 0) == links.resource_of(Action(Kind.LOAD, 7, 0), 7) == ("up", 0, 0)
    )
    assert links.onward_of(Action(Kind.EVICT, 0, 0), 0) == ("down", 1, 0)
    assert links.onward_of(Action(Kind.LOAD, 0, 0), 0) == ("down", 0, 0)
    near = shared_links(Placed(replace(run, pipeline_order=PAIRED), one, OURS), step().schedule.placement, partners)
    assert near is not None
    assert near.resource_of(Action(Kind.EVICT, 0, 0), 0) is None


def test_offload_goes_at_the_speed_of_the_host_and_names_a_cluster_that_has_none():
    assert A100.host is not None
    assert (
        offload_seconds(Placed(RUN, A100, OURS), [1e9] * 8) == (A100.host.latency_s + 1e9 / A100.host.bytes_per_s,) * 8
    )
    alone = replace(A100, name="alone", host=None)
    with pytest.raises(UserError, match="alone has no link .* add a table .host."):
        step(cluster=alone, offload=True, budget_bytes=1e15)


def test_a_budget_that_cannot_be_kept_is_the_users_error():
    with pytest.raises(UserError, match="pipeline rank 0 still holds"):
        step(balance=True, budget_bytes=1e9)


def test_without_a_trace_memory_is_counted_on_a_clock_of_its_own():
    found = step(balance=True)
    counted = memory_by_rank(found.run, OURS, found.schedule, 2)
    for mine, theirs in zip(counted, found.prediction.memory_by_rank, strict=True):
        assert mine.activations_bytes == pytest.approx(theirs.activations_bytes, rel=0.25)
        assert mine.weights_bytes == theirs.weights_bytes
