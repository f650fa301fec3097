"""Which actions of a step draw on the same network adapter."""

from collections.abc import Hashable

from pipeloom.cost.hardware import Cluster, Group
from pipeloom.cost.ranks import rank_parts
from pipeloom.cost.shape import Run
from pipeloom.schedule import Action, Kind, Placement
from pipeloom.schedule.action import RECEIVE_KINDS, TIED_RECEIVE_KINDS
from pipeloom.schedule.depend import tied_partner
from pipeloom.simulate import Sharing


def shared_links(run: Run, cluster: Cluster, placement: Placement) -> Sharing | None:
    """The nodes' network adapters, as far as anything could compete for one.

    Pipeline neighbors are ``dp x tp`` devices apart, so a rank's first device tells its node and its adapter. Alone, a
    transfer between nodes or a collective over nodes has that adapter for itself and its copies on the neighboring
    devices of its pipeline rank (``Cluster.sharing``); each further one on the same adapter takes its share.

    Returns:
        Sharing with a resource for each adapter, the receives and collectives on it; ``None`` where there is nothing
        to share.
    """
    parts = rank_parts(run, cluster)
    adapter = [_adapter(rank * run.dp * run.tp, cluster) for rank in range(run.pp)]
    is_wide = [_is_wide(run, part) for part in parts]
    crosses = any(adapter[a][0] != adapter[b][0] for a, b in _edges(placement))
    if not crosses or (not any(is_wide) and len(set(adapter)) == run.pp):
        return None
    owner = placement.rank_by_stage

    def resource_of(action: Action, rank: int) -> Hashable | None:
        if action.kind in RECEIVE_KINDS | TIED_RECEIVE_KINDS:
            is_tied = action.kind in TIED_RECEIVE_KINDS
            before = action.stage + (-1 if action.kind is Kind.RECV_F else 1)
            sender = owner[tied_partner(action, len(owner)).stage if is_tied else before]
            return adapter[rank] if adapter[sender][0] != adapter[rank][0] else None
        return adapter[rank] if is_wide[rank] and action.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD) else None

    return Sharing(resource_of, dict.fromkeys(adapter, 1.0))


def _adapter(device: int, cluster: Cluster) -> tuple[int, int]:
    """The node of a device, and which adapter it has there."""
    node, place = cluster.node_of(device)
    own = cluster.part(device, 1)
    return node, place * own.num_adapters // own.devices_per_node


def _is_wide(run: Run, part: Cluster) -> bool:
    """Whether collectives of a rank leave its nodes."""
    stride, size = run.dp * run.tp, part.devices_per_node
    return Group.strided(run.shard_size, run.tp, size).num_nodes > 1 or (stride > size > 1 and run.replicate > 1)


def _edges(placement: Placement) -> set[tuple[int, int]]:
    owner = placement.rank_by_stage
    return {(owner[stage], owner[stage + 1]) for stage in range(len(owner) - 1)}
