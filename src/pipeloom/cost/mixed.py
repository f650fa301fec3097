"""Clusters with several kinds of nodes, or with slower links between some of them.

Ranks fill the groups of nodes in order. Devices of one group have the costs of the group's cluster. Devices of several
groups work in lockstep at the speed of the slowest: they have the costs of a cluster with the slowest of everything.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations

from pipeloom.calls import checked_class
from pipeloom.cost.hardware import Cluster, Collective, CollectiveCurve, Curve, Device, Link, interpolate
from pipeloom.errors import UserError


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind in one place, such as a rack or a site.

    Attributes:
        cluster: devices, links and price. Its name is the group's name.
        num_nodes: number of nodes.
    """

    cluster: Cluster
    num_nodes: int

    @property
    def name(self) -> str:
        """Name of the group."""
        return self.cluster.name

    @property
    def num_devices(self) -> int:
        """Number of devices of all its nodes."""
        return self.num_nodes * self.cluster.devices_per_node


@dataclass(frozen=True, kw_only=True)
class GroupLink:
    """The network between the nodes of two groups.

    Attributes:
        between: names of the groups.
        link: its bandwidth is that of one node.
    """

    between: tuple[str, str]
    link: Link


@checked_class
@dataclass(frozen=True, kw_only=True)
class MixedCluster(Cluster):
    """Groups of nodes; ``mixed_cluster`` makes it.

    Its fields as a ``Cluster`` are the slowest of all groups and links.

    Attributes:
        groups: in the order of the ranks; their names differ.
        links: between pairs of groups, at most one for each. Without a link, a pair has the slower network of both.
    """

    groups: tuple[NodeGroup, ...]
    links: tuple[GroupLink, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Compare name, groups and links, which determine all other fields."""
        if not isinstance(other, MixedCluster):
            return NotImplemented
        return (self.name, self.groups, self.links) == (other.name, other.groups, other.links)

    def __hash__(self) -> int:
        """Hash of the name, as of any cluster."""
        return hash(self.name)

    def part(self, first: int, num_devices: int) -> Cluster:
        """The cluster of the devices' group; for several groups the slowest of them and of the links between them."""
        key = ("part", first, num_devices)
        if key not in self._cache:
            self._cache[key] = self._shared(tuple(index for index, _ in self._spread(first, num_devices)))
        return self._cache[key]

    def route(self, first: int, other: int, num_devices: int) -> Cluster:
        """A cluster whose ``inter`` is the link between the groups of both ends; the slowest of several such links."""
        key = ("route", first, other, num_devices)
        if key not in self._cache:
            ends = [self._spread(begin, num_devices) for begin in (first, other)]
            # The groups of both ends change only at these offsets, so one pair of devices for each suffices.
            offsets = {offset for end in ends for offset in accumulate((count for _, count in end), initial=0)}
            pairs = {
                tuple(sorted({self._spread(begin + offset, 1)[0][0] for begin in (first, other)}))
                for offset in offsets - {num_devices}
            }
            self._cache[key] = self._route(tuple(sorted(pairs)))
        return self._cache[key]

    def kinds(self, num_devices: int) -> tuple[tuple[Cluster, int], ...]:
        """The clusters of the groups of the first ``num_devices`` devices, each with its number of devices."""
        return tuple((self.groups[index].cluster, count) for index, count in self._spread(0, num_devices))

    def node_of(self, device: int) -> tuple[int, int]:
        """Index of a device's node across all groups, and of the device in the node."""
        ((index, _),) = self._spread(device, 1)
        before = self.groups[:index]
        own = device - sum(group.num_devices for group in before)
        node, place = self.groups[index].cluster.node_of(own)
        return sum(group.num_nodes for group in before) + node, place

    @property
    def num_devices(self) -> int:
        """Number of devices of all groups."""
        return sum(group.num_devices for group in self.groups)

    def lack(self, num_devices: int) -> str | None:
        """The message about a run on more devices than all groups have; ``None`` if there are enough."""
        if num_devices <= self.num_devices:
            return None
        made_of = ", ".join(
            f"{group.num_nodes} x {group.cluster.devices_per_node} {group.name}" for group in self.groups
        )
        return f"the cluster {self.name} has {self.num_devices} devices ({made_of}), found a run on {num_devices}"

    def orders(self) -> Iterator[tuple[str, ...]]:
        """Distinct orders of the groups' names; an exchange of equal groups with equal links is not distinct."""
        indices = range(len(self.groups))
        alike = [next(other for other in indices if self._are_alike(other, index)) for index in indices]

        def orders_of(left: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
            if not left:
                yield ()
            for kind in dict.fromkeys(alike[index] for index in left):
                taken = next(index for index in left if alike[index] == kind)
                for rest in orders_of(tuple(index for index in left if index != taken)):
                    yield self.groups[taken].name, *rest

        yield from orders_of(tuple(indices))

    def reordered(self, order: Sequence[str]) -> Cluster:
        """The cluster with its groups in the order of the names."""
        by_name = {group.name: group for group in self.groups}
        assert sorted(by_name) == sorted(order), "every group once"
        return replace(self, groups=tuple(by_name[name] for name in order))

    def each(self, change: Callable[[Cluster], Cluster]) -> Cluster:
        """The cluster with ``change`` applied to every group, and to every link as the ``inter`` of a cluster."""
        groups = [replace(one, cluster=replace(change(one.cluster), name=one.name)) for one in self.groups]
        index = {group.name: index for index, group in enumerate(self.groups)}
        routes = [self._route((tuple(sorted(index[name] for name in one.between)),)) for one in self.links]
        links = [replace(one, link=change(route).inter) for one, route in zip(self.links, routes, strict=True)]
        return mixed_cluster(self.name, groups, links)

    def _spread(self, first: int, num_devices: int) -> list[tuple[int, int]]:
        """Indices of the groups of a range of devices, each with its number of devices in the range."""
        found, begin, last = list[tuple[int, int]](), 0, first + num_devices
        for index, group in enumerate(self.groups):
            end = begin + group.num_devices
            count = min(end, last) - max(begin, first)
            if count > 0:
                found.append((index, count))
            begin = end
        if last > begin:
            raise UserError(str(self.lack(last)))
        return found

    def _link(self, one: int, other: int) -> Link:
        """The link between the nodes of two groups."""
        ends = [self.groups[index].cluster for index in (one, other)]
        names = {cluster.name for cluster in ends}
        named = (known.link for known in self.links if set(known.between) == names)
        # Without a link of their own, the slower of both networks.
        return next(named, None) or _slowest_link([cluster.inter for cluster in ends])

    def _are_alike(self, one: int, other: int) -> bool:
        """Whether two groups are interchangeable: they and their links to other groups are equal."""
        groups = [self.groups[index] for index in (one, other)]
        plain = [replace(group, cluster=replace(group.cluster, name="")) for group in groups]
        # The link between the two is symmetric, so only links to third groups can differ.
        thirds = set(range(len(self.groups))) - {one, other}
        return plain[0] == plain[1] and all(self._link(one, third) == self._link(other, third) for third in thirds)

    @cached_property
    def _cache(self) -> dict[tuple[object, ...], Cluster]:
        """Parts and routes. Equal ones are the same object, which speeds up caches whose keys contain them."""
        return {}

    def _shared(self, indices: tuple[int, ...]) -> Cluster:
        """A cluster with nodes of one kind for several groups."""
        if indices not in self._cache:
            clusters = [self.groups[index].cluster for index in indices]
            links = [self._link(*pair) for pair in combinations(indices, 2)]
            self._cache[indices] = _slowest_cluster(clusters, links)
        return self._cache[indices]

    def _route(self, pairs: tuple[tuple[int, ...], ...]) -> Cluster:
        """The route inside a group or between two, or the slowest of several."""
        if pairs not in self._cache:
            routes = [
                replace(self._shared(pair), inter=self._link(*pair)) if len(pair) == 2 else self._shared(pair)
                for pair in pairs
            ]
            self._cache[pairs] = _slowest_cluster(routes, [])
        return self._cache[pairs]


def mixed_cluster(name: str, groups: Sequence[NodeGroup], links: Sequence[GroupLink] = ()) -> MixedCluster:
    """A cluster of several groups of nodes.

    Args:
        name: of the cluster.
        groups: at least one, in the order of the ranks.
        links: between groups.
    """
    every = _slowest_cluster([group.cluster for group in groups], [one.link for one in links])
    return MixedCluster(
        name=name,
        device=every.device,
        devices_per_node=every.devices_per_node,
        intra=every.intra,
        inter=every.inter,
        bus_curves=every.bus_curves,
        bus_message_bytes=every.bus_message_bytes,
        collective_curves=every.collective_curves,
        host=every.host,
        devices_per_host=every.devices_per_host,
        adapters_per_node=every.adapters_per_node,
        partial_group_share=every.partial_group_share,
        groups=tuple(groups),
        links=tuple(links),
    )


def _slowest_cluster(clusters: Sequence[Cluster], links: Sequence[Link]) -> Cluster:
    """A cluster with nodes of one kind: the slowest of everything in several clusters and links."""
    first = clusters[0]
    inter = _slowest_link([*(cluster.inter for cluster in clusters), *links])
    # Return the same object if possible: comparisons of cache keys are faster.
    if inter == first.inter and all(replace(cluster, name=first.name) == first for cluster in clusters):
        return first
    hosts = [cluster.host for cluster in clusters]
    return Cluster(
        name=" + ".join(cluster.name for cluster in clusters),
        device=_slowest_device([cluster.device for cluster in clusters]),
        devices_per_node=min(cluster.devices_per_node for cluster in clusters),
        intra=_slowest_link([cluster.intra for cluster in clusters]),
        inter=inter,
        bus_curves=_lowest_bus(clusters, inter),
        bus_message_bytes=min(cluster.bus_message_bytes for cluster in clusters),
        collective_curves=_slowest_curves(clusters),
        host=None if None in hosts else _slowest_link([host for host in hosts if host is not None]),
        devices_per_host=min(cluster.host_size for cluster in clusters),
        adapters_per_node=min(cluster.num_adapters for cluster in clusters),
        partial_group_share=min(cluster.partial_group_share for cluster in clusters),
    )


def _slowest_link(links: Sequence[Link]) -> Link:
    latency_s, bytes_per_s = max(link.latency_s for link in links), min(link.bytes_per_s for link in links)
    return Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


def _slowest_device(devices: Sequence[Device]) -> Device:
    """A device with the lowest rate of all for each size of a matrix product, in each precision that all support."""
    first = devices[0]
    if all(device == first for device in devices):
        return first
    known = [name for name in first.peak_flops_per_s if all(name in device.peak_flops_per_s for device in devices)]
    slowest = min(devices, key=lambda device: sum(device.peak_flops_per_s[name] for name in known))
    return Device(
        name=" + ".join(dict.fromkeys(device.name for device in devices)),
        peak_flops_per_s={name: min(device.peak_flops_per_s[name] for device in devices) for name in known},
        kernel_s=max(device.kernel_s for device in devices),
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bytes_per_s=min(device.memory_bytes_per_s for device in devices),
        launch_s=max(device.launch_s for device in devices),
        matmul_curves={name: _lowest_fractions(devices, name) for name in known},
        num_multiprocessors=slowest.num_multiprocessors,
        vendor=slowest.vendor,
        early_kernels=slowest.early_kernels,
    )


def _lowest_fractions(devices: Sequence[Device], precision: str) -> Curve:
    """(FLOPs, lowest rate of the devices as a fraction of the lowest peak)."""
    curves = [device.matmul_curves.get(precision, device.matmul_curve) for device in devices]
    peaks = [device.peak_flops_per_s[precision] for device in devices]
    both = list(zip(peaks, curves, strict=True))
    sizes = sorted({flops for curve in curves for flops, _ in curve})
    return tuple((size, min(peak * interpolate(curve, size) for peak, curve in both) / min(peaks)) for size in sizes)


def _lowest_bus(clusters: Sequence[Cluster], inter: Link) -> dict[Collective, Curve]:
    """Collective -> (number of nodes, lowest bus bandwidth), scaled to the network ``inter``."""
    curves: dict[Collective, Curve] = {}
    for kind in dict.fromkeys(kind for cluster in clusters for kind in cluster.bus_curves):
        sizes = sorted({num for cluster in clusters for num, _ in cluster.bus_curves.get(kind, ())})
        curves[kind] = tuple((num, min(_bus_at(cluster, kind, num, inter) for cluster in clusters)) for num in sizes)
    return curves


def _bus_at(cluster: Cluster, kind: Collective, num_nodes: float, inter: Link) -> float:
    curve = cluster.bus_curves.get(kind)
    if num_nodes <= 1:
        return interpolate(curve, num_nodes) if curve else cluster.intra.bytes_per_s
    across = interpolate(curve, num_nodes) if curve else cluster.inter.bytes_per_s
    # The curve was measured on the group's own network; a slower one reduces it in proportion.
    return across * min(1.0, inter.bytes_per_s / cluster.inter.bytes_per_s)


def _slowest_curves(clusters: Sequence[Cluster]) -> dict[Collective, tuple[CollectiveCurve, ...]]:
    """For each collective and group size, the measured curve that is lowest at its largest message."""
    found: dict[Collective, dict[int, CollectiveCurve]] = {}
    for cluster in clusters:
        for kind, curves in cluster.collective_curves.items():
            by_ranks = found.setdefault(kind, {})
            for curve in curves:
                by_ranks[curve.ranks] = min(by_ranks.get(curve.ranks, curve), curve, key=lambda one: one.points[-1][1])
    return {kind: tuple(by_ranks.values()) for kind, by_ranks in found.items()}
