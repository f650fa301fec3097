"""Which actions of a step draw on the same network card."""

from collections.abc import Hashable

from pipeloom.cost.hardware import Cluster, Group
from pipeloom.cost.shape import Run
from pipeloom.schedule import Action, Kind, Placement
from pipeloom.schedule.action import RECEIVE_KINDS
from pipeloom.simulate import Sharing


def shared_links(run: Run, cluster: Cluster, placement: Placement) -> Sharing | None:
    """The nodes' networks, as far as anything could compete for one.

    Pipeline neighbors are ``dp x tp`` devices apart, so a rank's first device tells its node. Alone, a transfer between
    nodes or a collective over nodes has a node's whole network for itself and its copies on the other devices of its
    pipeline rank (``Cluster.p2p_s``, ``Cluster.collective_s``); each further one on the same node takes its share.

    Returns:
        Sharing with a resource for each node, its receives and collectives on it; ``None`` where there is nothing to
        share.
    """
    stride, size = run.dp * run.tp, cluster.devices_per_node
    node_of = [rank * stride // size for rank in range(run.pp)]
    is_wide = Group.strided(run.shard_size, run.tp, size).num_nodes > 1 or (stride > size > 1 and run.replicate > 1)
    crosses = any(node_of[a] != node_of[b] for a, b in _edges(placement))
    if not crosses or (not is_wide and len(set(node_of)) == run.pp):
        return None
    owner = placement.rank_by_stage

    def resource_of(action: Action, rank: int) -> Hashable | None:
        if action.kind in RECEIVE_KINDS:
            sender = owner[action.stage + (-1 if action.kind is Kind.RECV_F else 1)]
            return node_of[rank] if node_of[sender] != node_of[rank] else None
        return node_of[rank] if is_wide and action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD) else None

    return Sharing(resource_of, dict.fromkeys(node_of, 1.0))


def _edges(placement: Placement) -> set[tuple[int, int]]:
    owner = placement.rank_by_stage
    return {(owner[stage], owner[stage + 1]) for stage in range(len(owner) - 1)}
