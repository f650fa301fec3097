"""Nodes of the pipeline ranks of a run, and the network adapters and cores that their actions share."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from pipeloom.cost.hardware import Cluster, Group
from pipeloom.cost.placed import Placed
from pipeloom.schedule import Action, Kind, Placement
from pipeloom.schedule.kinds import COMPUTE_KINDS, LOAD_OF, PARTNER_MOVES, RECEIVE_KINDS, TIED_RECEIVE_KINDS
from pipeloom.schedule.lanes import other_end
from pipeloom.simulation import Sharing
from pipeloom.terminal.words import and_list
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Place:
    """Nodes of one pipeline rank.

    Attributes:
        kind: name of its group of nodes, several joined by plus signs; of the cluster, if all nodes are equal.
        first_node, last_node: nodes of its devices, numbered across the cluster from 0.
        device_memory_bytes: memory of one of its devices; the minimum if they differ.
    """

    kind: str
    first_node: int
    last_node: int
    device_memory_bytes: float


def rank_places(placed: Placed) -> tuple[Place, ...]:
    """The nodes of each pipeline rank.

    Raises:
        UserError: the cluster has too few devices.
    """
    size, node_of = placed.run.stage_devices, placed.cluster.node_of
    return tuple(
        Place(part.name, node_of(first)[0], node_of(first + size - 1)[0], part.device.memory_bytes)
        for first, part in zip(placed.first_devices, placed.parts, strict=True)
    )


def describe_places(places: Sequence[Place]) -> list[str]:
    """One line for each range of adjacent ranks of one kind, such as ``0-3 on a100, nodes 0-3``."""
    lines: list[str] = []
    for kind, run_of in groupby(enumerate(places), key=lambda pair: pair[1].kind):
        # A group of ``groupby`` can be iterated only once.
        members = list(run_of)
        first, last = members[0][0], members[-1][0]
        begin, end = min(place.first_node for _, place in members), max(place.last_node for _, place in members)
        nodes = _range("node", begin, end)
        lines.append(f"{first if first == last else f'{first}-{last}'} on {kind}, {nodes}")
    return lines


def _range(word: str, first: int, last: int) -> str:
    return f"{word} {first}" if first == last else f"{word}s {first}-{last}"


COLLECTIVES = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD})
ON_CORES = COMPUTE_KINDS | RECEIVE_KINDS | TIED_RECEIVE_KINDS | COLLECTIVES
"""Kinds of actions for which processes on a CPU use its cores; a receive counts both ends of a message."""

TURN_S = 4e-3
"""Seconds of a core that an operating system gives a process while others wait: Linux with a tick of 250 Hz
(docs/decisions/0093-ranks-take-turns-on-a-core.md). A run's profile measures it."""


def shared_links(placed: Placed, placement: Placement, partners: Sequence[int] | None = None) -> Sharing | None:
    """The nodes' network adapters and cores as shared resources.

    Pipeline neighbors are ``stage_devices`` apart, so a rank's first device determines its node and its adapter.
    The seconds of a transfer or collective between nodes already assume that it shares the adapter with the same action
    on adjacent devices of its pipeline rank (``Cluster.sharing``); other concurrent actions on the adapter share it
    here. An adapter sends and receives at full rate at the same time: a transfer leaves through its sender's uplink and
    continues through its receiver's downlink, a collective uses both of its rank
    (docs/decisions/0098-a-link-has-two-ends.md). A message that a slower link between two kinds of nodes limits leaves
    most of a faster adapter to others, and does not share it.

    If a node has more ranks than cores (``Cluster.cores_per_node``), compute, and messages and collectives inside the
    node, which processes on a CPU copy themselves, share the cores; ranks that compute take turns there.

    Args:
        placed: the run and its cluster.
        placement: stage -> pipeline rank.
        partners: for each pipeline rank its partner; ``None`` without evictions.

    Returns:
        The sharing of each adapter's two directions by receives, evictions, loads and collectives, and of each node's
        cores; ``None`` if nothing is shared.
    """
    run, cluster = placed.run, placed.cluster
    adapters = _adapters(placed, placement.rank_by_stage, partners)
    has_shared_cores = cluster.crowding(run.num_devices) > 1
    if not adapters.are_shared and not has_shared_cores:
        return None

    def resource_of(action: Action, rank: int) -> Hashable | None:
        link = adapters.uplink_of(action, rank)
        if link is not None or not has_shared_cores:
            return link
        return _Cores(adapters.by_rank[rank][0]) if action.kind in ON_CORES else None

    capacity: dict[Hashable, float] = {_Link(way, *one): 1.0 for way in ("up", "down") for one in adapters.by_rank}
    capacity |= {_Slow(*ends): 1.0 for ends in adapters.route_bytes_per_s}
    if not has_shared_cores:
        return Sharing(resource_of, capacity, onward_of=adapters.downlink_of)
    # Devices of a pipeline rank on a node, which do the same at the same time.
    copies = min(run.stage_devices, cluster.devices_per_node)
    cores = {_Cores(node): cluster.cores_per_node / copies for node, _ in adapters.by_rank}
    turns = dict.fromkeys(cores, TURN_S)
    return Sharing(resource_of, capacity | cores, turns, ON_CORES - COMPUTE_KINDS, adapters.downlink_of)


class _Link(NamedTuple):
    """A direction of a network adapter, as a resource."""

    way: Literal["up", "down"]
    node: int
    adapter: int


class _Slow(NamedTuple):
    """Messages from one pipeline rank to another that a slower link limits, as the only user of a resource."""

    sender: int
    receiver: int


@dataclass(frozen=True)
class _Adapters:
    """The network adapters that actions use.

    Attributes:
        owner: for each stage its pipeline rank.
        by_rank: for each pipeline rank its node, and its adapter there.
        bytes_per_s: for each pipeline rank those of its nodes' network.
        is_wide: for each pipeline rank, whether its collectives leave its nodes.
        route_bytes_per_s: for each sender and receiver on different nodes those between them.
        partners: for each pipeline rank its partner; ``None`` without evictions.
    """

    owner: Sequence[int]
    by_rank: Sequence[tuple[int, int]]
    bytes_per_s: Sequence[float]
    is_wide: Sequence[bool]
    route_bytes_per_s: Mapping[tuple[int, int], float]
    partners: Sequence[int] | None

    @property
    def are_shared(self) -> bool:
        """Whether actions of a pipeline can meet on a direction of an adapter."""
        if not self.route_bytes_per_s:
            return False
        # Of two stages without partners each sends one kind of message and receives another.
        is_more = len(self.owner) > 2 or self.partners is not None
        return is_more or any(self.is_wide) or len(set(self.by_rank)) < len(self.by_rank)

    def uplink_of(self, action: Action, rank: int) -> _Link | _Slow | None:
        """Through which an action leaves a node."""
        ends = self._ends(action, rank)
        if ends is None:
            return None
        return _Link("up", *self.by_rank[ends[0]]) if self._fills(ends, ends[0]) else _Slow(*ends)

    def downlink_of(self, action: Action, rank: int) -> _Link | None:
        """Through which an action enters a node; ``None`` if it shares nothing there."""
        ends = self._ends(action, rank)
        return None if ends is None or not self._fills(ends, ends[1]) else _Link("down", *self.by_rank[ends[1]])

    def _fills(self, ends: tuple[int, int], rank: int) -> bool:
        """Whether an action needs at least half of the network bandwidth of a rank, one of its ends."""
        return self.route_bytes_per_s.get(ends, self.bytes_per_s[rank]) >= self.bytes_per_s[rank] / 2

    def _ends(self, action: Action, rank: int) -> tuple[int, int] | None:
        """The pipeline ranks that send and receive between nodes."""
        if action.kind in COLLECTIVES:
            return (rank, rank) if self.is_wide[rank] else None
        if action.kind in RECEIVE_KINDS | TIED_RECEIVE_KINDS:
            ends = self.owner[other_end(action, len(self.owner)).stage], rank
        elif action.kind in PARTNER_MOVES and self.partners is not None:
            ends = (rank, self.partners[rank]) if action.kind in LOAD_OF else (self.partners[rank], rank)
        else:
            return None
        return ends if ends in self.route_bytes_per_s else None


def _adapters(placed: Placed, owner: Sequence[int], partners: Sequence[int] | None) -> _Adapters:
    by_rank = tuple(_adapter(first, placed.cluster) for first in placed.first_devices)
    neighbors = {*pairwise(owner), *enumerate(partners or ()), (owner[0], owner[-1])}
    crossing = {pair for pair in neighbors if by_rank[pair[0]][0] != by_rank[pair[1]][0]}
    route_bytes_per_s = {pair: placed.route(*pair).inter.bytes_per_s for pair in crossing}
    return _Adapters(
        owner,
        by_rank,
        tuple(part.inter.bytes_per_s for part in placed.parts),
        tuple(_is_wide(placed.run, part) for part in placed.parts),
        route_bytes_per_s | {pair[::-1]: rate for pair, rate in route_bytes_per_s.items()},
        partners,
    )


class _Cores(NamedTuple):
    """The cores of a node, as a resource."""

    node: int


def _adapter(device: int, cluster: Cluster) -> tuple[int, int]:
    """Indices of a device's node, and of its adapter in the node."""
    node, place = cluster.node_of(device)
    own = cluster.part(device, 1)
    return node, place * own.num_adapters // own.devices_per_node


def _is_wide(run: Run, part: Cluster) -> bool:
    """Whether collectives of a rank leave its nodes."""
    stride, size = run.stage_devices, part.devices_per_node
    return Group.strided(run.shard_size, run.tp, size).num_nodes > 1 or (stride > size > 1 and run.replicate > 1)


def num_hosts(cluster: Cluster, num_devices: int) -> int:
    """Hosts of the first ``num_devices`` devices; the last of each kind may be used in part.

    Raises:
        UserError: the cluster has too few devices.
    """
    return sum(-(-devices // kind.host_size) for kind, devices in cluster.kinds(num_devices))


def tpus_of(cluster: Cluster, num_devices: int) -> list[str]:
    """Names of the nodes of the first ``num_devices`` devices that are TPUs, on which no run is started.

    Raises:
        UserError: the cluster has too few devices.
    """
    return [kind.name for kind, _ in cluster.kinds(num_devices) if kind.device.vendor == "google"]


def node_problems(cluster: Cluster, num_ranks: int) -> list[str]:
    """Why one command for each host cannot start so many ranks on a cluster; empty if it can."""
    lack, per_node = cluster.lack(num_ranks), cluster.host_size
    if lack is not None:
        return [lack]
    kinds = cluster.kinds(num_ranks)
    if tpus := tpus_of(cluster, num_ranks):
        what = f"the devices of {and_list(tpus)} are TPUs, for which steps are predicted only"
        return [f"{what}: pipeloom writes start files for CPUs and GPUs; use a cluster with these"]
    sizes = {kind.name: kind.host_size for kind, _ in kinds}
    if len(set(sizes.values())) > 1:
        key = "devices_per_host" if any(kind.devices_per_host for kind, _ in kinds) else "devices_per_node"
        what = f"nodes have different numbers of devices ({', '.join(f'{n} in {kind}' for kind, n in sizes.items())})"
        way_out = f"describe the larger ones with {key} {per_node}"
    elif num_ranks > per_node and num_ranks % per_node:
        what = f"{num_ranks} processes do not fill nodes of {per_node} devices ({cluster.name})"
        way_out = f"use a multiple of {per_node}, or fewer devices of a node"
    else:
        return []
    return [f"{what}, but one command for all nodes starts the same number of processes on each; {way_out}"]
