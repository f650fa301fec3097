"""Which ranks compete for a node's network, and what that costs."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.costs import Costs
from pipeloom.cost.measured import MeasuredPieces
from pipeloom.cost.placed import Placed
from pipeloom.families import Choice
from pipeloom.predict.places import shared_links
from pipeloom.predict.step import simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import Action, Kind, Placement, parse_schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS
from pipeloom.simulation import simulate
from pipeloom.workload.run import Run

CLUSTER = load_cluster("dgx-a100")
OURS = load_software("pipeloom")
RUN = Run(shape=load_model("gpt-52b"), seq=1024, pp=4, tp=8, dp=2)
SMALL = Run(shape=replace(RUN.shape, layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=16, tied=False), seq=16)


def ends(links, action, rank):
    """(node, adapter) of the uplink and of the downlink that an action uses."""
    link, onward = links.resource_of(action, rank), links.onward_of(action, rank)
    assert (link is None) == (onward is None)
    if link is None:
        return None
    assert (link[0], onward[0]) == ("up", "down")
    assert links.capacity[link] == links.capacity[onward] == 1
    return link[1:], onward[1:]


def resources(run, placement=None):
    links = shared_links(Placed(run, CLUSTER, OURS), placement or Placement.looped(run.pp, 2))
    if links is None:
        return None
    kinds = {"1RECV_F0": 1, "0RECV_B0": 0, "2UNSHARD": 2, "3REDUCE_GRAD": 3, "1F0": 1, "1SEND_F0": 1, "2RESHARD": 2}
    return {text: ends(links, Action.parse(text), rank) for text, rank in kinds.items()}


def test_a_rank_that_fills_nodes_shares_its_network_with_its_own_collectives():
    assert resources(RUN) == {  # 16 devices, two nodes, for each pipeline rank
        "1RECV_F0": ((0, 0), (2, 0)),
        "0RECV_B0": ((2, 0), (0, 0)),
        "2UNSHARD": ((4, 0), (4, 0)),
        "3REDUCE_GRAD": ((6, 0), (6, 0)),
        "1F0": None,
        "1SEND_F0": None,
        "2RESHARD": None,
    }


def test_a_tied_matrix_goes_from_the_adapter_of_its_sender_to_that_of_its_receiver():
    links = shared_links(Placed(RUN, CLUSTER, OURS), Placement.looped(4, 2))
    assert ends(links, Action(Kind.RECV_TIED, 7), 3) == ((0, 0), (6, 0))
    assert ends(links, Action(Kind.RECV_TIED_GRAD, 0), 0) == ((6, 0), (0, 0))
    assert ends(links, Action(Kind.SEND_TIED, 0), 0) is None
    near = replace(RUN, tp=2, dp=2)  # two pipeline ranks on each of two nodes
    links = shared_links(Placed(near, replace(CLUSTER, adapters_per_node=1), OURS), Placement((0, 1, 2, 3, 3, 2, 1)))
    assert ends(links, Action(Kind.RECV_TIED, 6), 1) is None  # from rank 0, on the same node


def test_nothing_is_shared_where_only_one_thing_at_a_time_leaves_a_node():
    two = replace(RUN, pp=2, dp=1)  # a node for each of two stages, no collectives
    assert shared_links(Placed(two, CLUSTER, OURS), Placement.looped(2, 1)) is None
    assert resources(replace(RUN, tp=1, dp=2)) is None  # everything inside one node


def test_both_kinds_of_messages_of_a_rank_share_its_adapter():
    links = shared_links(Placed(replace(RUN, dp=1), CLUSTER, OURS), Placement.looped(4, 2))
    assert ends(links, Action(Kind.RECV_F, 1, 0), 1) == ((0, 0), (1, 0))
    assert ends(links, Action(Kind.RECV_B, 1, 0), 1) == ((2, 0), (1, 0))


def test_ranks_of_one_adapter_share_what_leaves_by_it():
    run = replace(RUN, tp=2, dp=2)  # two pipeline ranks on each of two nodes; collectives stay inside
    assert ends(shared_links(Placed(run, CLUSTER, OURS), Placement.looped(4, 2)), Action(Kind.RECV_F, 2, 0), 2) == (
        (0, 4),  # an adapter for each device
        (1, 0),
    )
    one = replace(CLUSTER, adapters_per_node=1)
    links = shared_links(Placed(run, one, OURS), Placement.looped(4, 2))
    assert ends(links, Action(Kind.RECV_F, 2, 0), 2) == ((0, 0), (1, 0))  # from rank 1
    assert ends(links, Action(Kind.RECV_F, 4, 0), 0) == ((1, 0), (0, 0))  # from rank 3, round the loop
    assert ends(links, Action(Kind.RECV_F, 1, 0), 1) is None  # from rank 0, on the same node
    assert ends(links, Action(Kind.UNSHARD, 2), 2) is None


@pytest.mark.parametrize(
    ("adapters", "copies", "sharing"), [(0, 1, 8), (0, 8, 8), (4, 1, 4), (4, 2, 8), (4, 8, 8), (1, 1, 1), (1, 16, 8)]
)
def test_a_device_has_its_adapter_and_shares_it_with_its_copies(adapters, copies, sharing):
    assert replace(CLUSTER, adapters_per_node=adapters).sharing(copies) == sharing


def test_a_transfer_and_a_reduction_on_one_network_slow_each_other_down():
    run = replace(RUN, pp=2, tp=8, dp=2)
    schedule = parse_schedule("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD\n1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD\n")
    links = shared_links(Placed(run, CLUSTER, OURS), schedule.placement)
    costs = Costs(1, 2, transfer_s=4, reduce_s=4)
    alone = {str(s.action): s for s in simulate(schedule, costs).spans}
    shared = {str(s.action): s for s in simulate(schedule, costs, links).spans}
    # 1B0 ends at 8: the gradient leaves rank 1's node beside its reduction, both at half the speed.
    assert alone["0RECV_B0"].end_s == alone["1REDUCE_GRAD"].end_s == 12
    assert shared["0RECV_B0"].end_s == shared["1REDUCE_GRAD"].end_s == 16
    both = parse_schedule(
        "0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE_GRAD 0RECV_B0 0B0 0REDUCE_GRAD\n"
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1REDUCE_GRAD\n"
    )
    links = shared_links(Placed(run, CLUSTER, OURS), both.placement)
    alone = {str(s.action): s for s in simulate(both, costs).spans}
    shared = {str(s.action): s for s in simulate(both, costs, links).spans}
    # Rank 0 reduces stage 2 from 13 on, while its gradient leaves.
    assert alone["2REDUCE_GRAD"].end_s == alone["1RECV_B0"].end_s == 17
    assert shared["2REDUCE_GRAD"].end_s == shared["1RECV_B0"].end_s == 21
    late = Costs(1, 2, transfer_s=4, reduce_s=20)
    alone = {str(s.action): s for s in simulate(both, late).spans}
    shared = {str(s.action): s for s in simulate(both, late, links).spans}
    assert alone["0RECV_B0"].end_s == 23
    # 1B0 ends at 23. Its gradient leaves rank 1's node beside a reduction, and enters rank 0's beside another one.
    assert shared["0RECV_B0"].end_s == 31
    # That one has 14 left at 23. Up to 31 its uplink does 8 of them, its downlink 4: from then on it has 10 left.
    assert shared["2REDUCE_GRAD"].end_s == 41


def test_ranks_that_share_the_cores_of_a_node_compute_as_much_slower():
    pieces = MeasuredPieces(run=SMALL.of_measured_pieces, embedding=(0, 0), layer=(1, 2), head=(0, 0))
    host = replace(CLUSTER, name="host", devices_per_node=4, pieces=(pieces,))
    shared = replace(host, name="shared host", cores_per_node=2)
    gloo = load_software("pipeloom-gloo")

    def pipeline_s(run, cluster):
        choice = Choice(family="gpipe", pp=run.pp, loops=1, num_microbatches=run.num_microbatches)
        return simulate_step(Placed(run, cluster, gloo), Knobs(choice=choice)).prediction.pipeline_s

    alone = replace(SMALL, dp=4, pp=1, global_batch=8)  # two micro-batches of two layers each
    assert pipeline_s(alone, host) == pytest.approx(12, rel=1e-3)
    assert pipeline_s(alone, shared) == pytest.approx(24, rel=1e-3)
    two = replace(SMALL, pp=2, global_batch=2)  # a rank for each core
    assert pipeline_s(two, shared) == pipeline_s(two, host)


def test_a_short_pipeline_fills_while_cores_are_free():
    schedule = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1\n")
    run = replace(SMALL, pp=3)
    cluster = replace(CLUSTER, name="three on two", cores_per_node=2)
    sharing = shared_links(Placed(run, cluster, OURS), schedule.placement)
    spans = {str(s.action): s for s in simulate(schedule, Costs(1, 1), sharing).spans}
    assert spans["1F0"].end_s == 2  # two ranks, two cores
    assert spans["0B1"].end_s == 8  # never more than two at once
    one = shared_links(Placed(run, replace(cluster, name="three on one", cores_per_node=1), OURS), schedule.placement)
    end_s = max(s.end_s for s in simulate(schedule, Costs(1, 1), one).spans)
    assert end_s == pytest.approx(12)  # all the work, one core


def test_ranks_take_turns_on_the_cores_and_messages_do_not_wait():
    cluster = replace(CLUSTER, name="three on one", cores_per_node=1)
    sharing = shared_links(Placed(replace(SMALL, pp=3), cluster, OURS), Placement.looped(3, 1))
    (cores,) = sharing.turn_s
    assert sharing.capacity[cores] == 1
    assert Kind.RECV_F in sharing.at_once
    assert not sharing.at_once & COMPUTE_KINDS


def test_what_stays_on_a_node_draws_on_its_cores_and_what_leaves_it_on_its_adapter():
    cluster = replace(CLUSTER, name="crowded", cores_per_node=4, adapters_per_node=1)
    links = shared_links(Placed(replace(RUN, tp=2, dp=2), cluster, OURS), Placement.looped(4, 2))
    crossing = links.resource_of(Action(Kind.RECV_F, 2, 0), 2)
    staying = links.resource_of(Action(Kind.RECV_F, 1, 0), 1)
    assert (links.capacity[crossing], links.capacity[staying]) == (1.0, 1.0)  # four devices of a rank, four cores
    assert crossing == ("up", 0, 0)
    assert staying == links.resource_of(Action(Kind.FORWARD, 0, 0), 0) == links.resource_of(Action(Kind.UNSHARD, 1), 1)
    assert staying != links.resource_of(Action(Kind.FORWARD, 2, 0), 2)
    assert links.resource_of(Action(Kind.SEND_F, 0, 0), 0) is None
