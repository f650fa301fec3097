"""Devices, links and clusters: seconds of matrix products, memory traffic and collectives.

All units are SI: seconds, bytes, FLOP/s, bytes/s. ``pipeloom.catalog`` converts the units of files.

If a host has fewer cores than processes, measured seconds are seconds of a core: the CPU time of a process while all
processes work, without waiting. The simulator shares the cores among the ranks (``pipeloom.predict.places``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log, log2
from typing import Literal

from pipeloom.calls import checked_class
from pipeloom.cost.measured import MeasuredPieces, MeasuredUpdate
from pipeloom.cost.units import Amount, AmountOrNone, Share
from pipeloom.errors import UserError
from pipeloom.workload.dtypes import Dtype, default_dtype
from pipeloom.workload.limits import Count, CountOrNone

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
Vendor = Literal["nvidia", "amd", "google"]
Curve = tuple[tuple[Amount, Amount], ...]
"""(x, y) points with rising x."""

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.92),
    (256, 64, 0.82),
    (64, 256, 0.82),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.5),
)
"""Tiles of a matrix product's output: (height, width, relative rate). A multiprocessor computes one tile at a time;
small tiles load more bytes per operation. The sizes are cuBLAS's (NVIDIA, "Matrix multiplication background"); the
rates are rounded from general experience, not fitted; those of 256 by 64 follow from their loads per operation."""

HOP_S = 3.4e-6
"""Seconds of a hop between devices of a node, in a collective over several nodes (NVIDIA/nccl, src/graph/tuning.cc,
``hwLat``: NVLink, ring, simple protocol). A hop between nodes takes the latency of their link, 14 us there."""


def interpolate(curve: Curve, x: float) -> float:
    """Value at ``x`` of a curve given by (x, y) points with rising x; linear in log x, flat outside."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * log(x / x0) / log(x1 / x0)
    return curve[-1][1]


def usual_peak(peak_flops_per_s: Mapping[str, float]) -> float:
    """The peak of 16 bits among peaks by precision; without one the highest, and 1 without any."""
    return peak_flops_per_s.get("bf16") or peak_flops_per_s.get("fp16") or max(peak_flops_per_s.values(), default=1.0)


@checked_class
@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: as in tables of measurements.
        peak_flops_per_s: precision -> peak.
        matmul_curve: (FLOPs of one matrix product, fraction of the peak that it reaches), for precisions that are not
            in ``matmul_curves``; may be empty if all are.
        matmul_curves: precision -> its own curve.
        kernel_s: fixed seconds of a kernel on the device: ramp-up and the tail of the last wave.
        memory_bytes: memory that a process can allocate.
        memory_bytes_per_s: nominal memory bandwidth.
        launch_s: seconds of the host to launch a kernel.
        num_multiprocessors: of a GPU, for tile quantization; 0 for other devices.
        vendor: of a GPU or a TPU; without meaning for cores of a CPU.
        early_kernels: share of the peak that kernels written for earlier devices (FlashAttention-1 and 2) can use.
    """

    name: str
    peak_flops_per_s: dict[str, Amount]
    matmul_curve: Curve = ()
    kernel_s: AmountOrNone
    memory_bytes: Amount
    memory_bytes_per_s: Amount
    launch_s: AmountOrNone
    matmul_curves: dict[str, Curve] = field(default_factory=dict)
    num_multiprocessors: CountOrNone = 0
    vendor: Vendor = "nvidia"
    early_kernels: Share = 1.0

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU or similar: with multiprocessors, or 10 TFLOP/s, which no core of a CPU has."""
        return self.num_multiprocessors > 0 or max(self.peak_flops_per_s.values(), default=0) >= 1e13

    def matmul_s(self, flops: float, moved_bytes: float, precision: str, efficiency: float = 1.0) -> float:
        """Seconds of one matrix product.

        Args:
            flops: 2 m k n.
            moved_bytes: bytes of both inputs and the output.
            precision: key of ``peak_flops_per_s``.
            efficiency: fraction of the curve that a real program reaches (clocks, layouts of operands).

        Raises:
            UserError: the device has no peak for this precision.
        """
        if flops <= 0:
            return 0.0
        if precision not in self.peak_flops_per_s:
            # The peak of another precision is no substitute: their ratio is 2 on a P100 and 16 on an A100.
            known = ", ".join(self.peak_flops_per_s)
            raise UserError(f"the device '{self.name}' has no peak for {precision}; its file has {known}")
        curve = self.matmul_curves.get(precision, self.matmul_curve)
        rate = self.peak_flops_per_s[precision] * interpolate(curve, flops) * efficiency
        # Roofline: products of few rows are limited by reading the weights.
        return max(flops / rate, moved_bytes / self.memory_bytes_per_s) + self.kernel_s

    def filling(self, rows: float, columns: float) -> float:
        """Utilization of the multiprocessors by a product whose output is ``rows`` x ``columns``, 0 to 1.

        Each multiprocessor computes one tile at a time, so the last wave of tiles and the tiles at the edges may be
        partly empty (NVIDIA, "Matrix multiplication background", tile and wave quantization). The library is assumed to
        choose the best tile size.
        """
        if self.num_multiprocessors == 0:
            return 1.0
        best = 0.0
        for height, width, rate in TILES:
            waves = -(-(-(-rows // height) * -(-columns // width)) // self.num_multiprocessors)
            made = waves * self.num_multiprocessors * height * width
            best = max(best, rate * rows * columns / made)
        return best

    def memory_s(self, moved_bytes: float, efficiency: float = 1.0) -> float:
        """Seconds of kernels that are limited by memory bandwidth."""
        return moved_bytes / (self.memory_bytes_per_s * efficiency)


@checked_class
@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices.

    Attributes:
        latency_s: of one hop.
        bytes_per_s: bandwidth in one direction, of a device inside a node, or of a whole node between nodes.
    """

    latency_s: AmountOrNone
    bytes_per_s: Amount


def bus_bytes(collective: Collective, message_bytes: float, ranks: int) -> float:
    """Bytes that each rank's link carries; divided by the time, the "bus bandwidth" of nccl-tests.

    A ring sends (n - 1) / n of the whole message over each link, for an all-reduce twice that.
    """
    twice = 2 if collective == "all_reduce" else 1
    return twice * (ranks - 1) / ranks * message_bytes


@checked_class
@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """Measurements of one collective inside a node.

    Attributes:
        ranks: size of the group.
        points: (bytes of the whole tensor, bus bandwidth in bytes/s including latency), bytes rising.
    """

    ranks: Count
    points: Curve

    def seconds(self, collective: Collective, message_bytes: float, ranks: int) -> float:
        """Seconds with ``ranks`` ranks, assuming the bus bandwidth that was measured with ``self.ranks``.

        Between two points the time is linear in the bytes. Messages below the smallest measured one take its time;
        those above the largest have its bandwidth.
        """
        times = tuple((size, bus_bytes(collective, size, ranks) / rate) for size, rate in self.points)
        if message_bytes <= times[0][0]:
            return times[0][1]
        for (size0, time0), (size1, time1) in pairwise(times):
            if message_bytes <= size1:
                return time0 + (time1 - time0) * (message_bytes - size0) / (size1 - size0)
        return times[-1][1] * message_bytes / times[-1][0]


@dataclass(frozen=True)
class Group:
    """Distribution of a group of ranks over nodes.

    Attributes:
        size: number of ranks of the group.
        per_node: number of its ranks on each node.
        sharing: number of groups that use a node's network at the same time.
    """

    size: int
    per_node: int
    sharing: int

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return -(-self.size // self.per_node)

    @classmethod
    def strided(cls, size: int, stride: int, devices_per_node: int) -> "Group":
        """The group of ranks 0, stride, 2 stride, ..., while all other groups of that stride communicate, too."""
        per_node = max(1, min(size, devices_per_node // stride if stride < devices_per_node else 1))
        # Interleaved groups run the same collective at the same time, and share the node's network.
        return cls(size, per_node, max(1, min(devices_per_node, devices_per_node // per_node)))


@checked_class
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in nodes, nodes on a network.

    ``MixedCluster`` (``pipeloom.cost.mixed``) has nodes of several kinds. Costs that depend on nodes use ``part`` and
    ``route``, which return a cluster with nodes of one kind; here the cluster itself.

    Attributes:
        name: in messages and reports.
        device: the kind of all devices.
        devices_per_node: their number.
        intra: link between devices of a node.
        inter: link between nodes, with the bandwidth of a whole node.
        bus_curves: collective -> (number of nodes, bus bandwidth in bytes/s of a group of all their devices), as from
            nccl-tests. Empty: computed from the links.
        bus_message_bytes: size of the message of these measurements; what it takes longer than at the links' bandwidth
            is latency, the same for every size. 0: the bandwidths hold for every size.
        collective_curves: collective -> measurements inside a node over message sizes, for one or more group sizes.
            Empty: computed from ``bus_curves`` or the links.
        host: link between a device and host memory while all devices of the node use theirs; ``None``: none, so that
            nothing can move to the host.
        price_per_device_hour: in dollars; ``None`` if unknown.
        price_source: whose price it is, and of which date; empty if unknown.
        devices_per_host: devices of a host, where a node, whose devices share ``intra``, is several hosts, such as a
            rack with one NVLink domain; 0: a node is one host.
        adapters_per_node: network adapters that the devices of a node share evenly; 0: one for each device.
        partial_group_share: fraction of a node's network that groups with several of its devices, but not all, reach.
        cores_per_node: cores that the devices of a node share, if devices are processes on a CPU; 0: not shared.
        pieces: measured seconds of models; for other models closed forms are used.
        update: measured seconds of updating weights; ``None``: closed forms are used.
    """

    name: str
    device: Device
    devices_per_node: Count
    intra: Link
    inter: Link
    bus_curves: dict[Collective, Curve] = field(default_factory=dict)
    bus_message_bytes: AmountOrNone = 0.0
    collective_curves: dict[Collective, tuple[CollectiveCurve, ...]] = field(default_factory=dict)
    host: Link | None = None
    price_per_device_hour: AmountOrNone | None = None
    price_source: str = ""
    devices_per_host: CountOrNone = 0
    adapters_per_node: CountOrNone = 0
    partial_group_share: Share = 1.0
    cores_per_node: CountOrNone = 0
    pieces: tuple[MeasuredPieces, ...] = ()
    update: MeasuredUpdate | None = None

    @property
    def host_link(self) -> Link:
        """``host``.

        Raises:
            UserError: the cluster has no such link.
        """
        if self.host is None:
            raise UserError(
                f"the cluster {self.name} has no link between devices and host memory; add a table [host] with "
                "latency_us and gb_per_s to its file"
            )
        return self.host

    def __hash__(self) -> int:
        """Hash of the name, which is fast: clusters are keys of caches."""
        return hash(self.name)

    def part(self, first: int, num_devices: int) -> "Cluster":
        """A cluster with nodes of one kind that represents adjacent devices which work in lockstep.

        Args:
            first: the first device.
            num_devices: their number.

        Raises:
            UserError: the cluster has too few devices.
        """
        del first, num_devices
        return self

    def route(self, first: int, other: int, num_devices: int) -> "Cluster":
        """A cluster with nodes of one kind that represents messages between two ranges of devices.

        Args:
            first: the first device of one range.
            other: the first device of the other range.
            num_devices: of each range.

        Raises:
            UserError: the cluster has too few devices.
        """
        del first, other, num_devices
        return self

    def kinds(self, num_devices: int) -> tuple[tuple["Cluster", int], ...]:
        """The kinds of nodes of the first ``num_devices`` devices, each with its number of devices.

        Raises:
            UserError: the cluster has too few devices.
        """
        return ((self, num_devices),)

    def node_of(self, device: int) -> tuple[int, int]:
        """Index of a device's node, and of the device in the node."""
        return divmod(device, self.devices_per_node)

    @property
    def num_devices(self) -> int | None:
        """Number of devices; ``None`` for no limit."""
        return None

    def lack(self, num_devices: int) -> str | None:
        """The message about a run on more devices than the cluster has; ``None`` if it has enough."""
        del num_devices
        return None

    def orders(self) -> Iterator[tuple[str, ...]]:
        """Distinct orders of the groups of nodes, for ``reordered``; the current one first."""
        yield ()

    def reordered(self, order: Sequence[str]) -> "Cluster":
        """The cluster with its groups of nodes in another order; the first ranks are on the first group."""
        assert not order, "there is one kind of nodes"
        return self

    def each(self, change: "Callable[[Cluster], Cluster]") -> "Cluster":
        """The cluster with ``change`` applied to every kind of nodes and the networks between them; names stay."""
        return change(self)

    def default_dtype(self, num_devices: int) -> Dtype:
        """The default dtype of a run on the first ``num_devices`` devices; if possible, one that all of them support.

        Raises:
            UserError: the cluster has too few devices.
        """
        devices = [kind.device for kind, _ in self.kinds(num_devices)]
        shared = set.intersection(*(set(device.peak_flops_per_s) for device in devices))
        return default_dtype(is_gpu=any(device.is_gpu for device in devices), precisions=shared)

    def price_per_hour(self, num_devices: int) -> float | None:
        """Dollars per hour of the first ``num_devices`` devices; ``None`` if one of them has no price."""
        total = 0.0
        # A sum without a missing price would be too low.
        for kind, count in self.kinds(num_devices):
            if kind.price_per_device_hour is None:
                return None
            total += count * kind.price_per_device_hour
        return total

    def peak_flops_per_s(self, num_devices: int, precision: str) -> float:
        """Peak FLOP/s of the first ``num_devices`` devices together."""
        return sum(count * kind.device.peak_flops_per_s[precision] for kind, count in self.kinds(num_devices))

    @property
    def host_size(self) -> int:
        """Devices of a host, on each of which a launcher starts processes."""
        return self.devices_per_host or self.devices_per_node

    @property
    def num_adapters(self) -> int:
        """Network adapters of a node."""
        return min(self.adapters_per_node or self.devices_per_node, self.devices_per_node)

    def crowding(self, num_ranks: int) -> float:
        """Ranks per core of a node, in a run of ``num_ranks``; 1 if each rank has a core."""
        on_node = min(num_ranks, self.devices_per_node)
        return max(1.0, on_node / self.cores_per_node) if self.cores_per_node else 1.0

    def sharing(self, copies: int) -> int:
        """Divisor of a node's bandwidth for each device, while ``copies`` adjacent devices send.

        A device sends through its own adapter only, even if other adapters are idle.
        """
        return self.num_adapters * min(copies, -(-self.devices_per_node // self.num_adapters))

    def bus_bytes_per_s(self, collective: Collective, group: Group) -> float:
        """Bus bandwidth in bytes/s, as defined by nccl-tests.

        Inside a node, that of ``bus_curves`` for one node, or of the link. Between nodes, a group with k of a node's n
        devices gets k / n of the node's network, or of ``partial_group_share`` of it.
        """
        # The n / k groups of a node communicate at the same time: replicas end their backwards together.
        share = group.per_node / self.devices_per_node
        if 1 < group.per_node < self.devices_per_node:
            share *= self.partial_group_share
        curve = self.bus_curves.get(collective)
        if group.num_nodes == 1:
            return curve[0][1] if curve else self.intra.bytes_per_s
        across = interpolate(curve, group.num_nodes) if curve and not self.bus_message_bytes else self.inter.bytes_per_s
        return min(self.intra.bytes_per_s, across * share)

    def collective_s(
        self, collective: Collective, message_bytes: float, group: Group, efficiency: float = 1.0
    ) -> float:
        """Seconds of one collective; seconds of a core if ranks share cores.

        Inside a node, from the measured curve for the closest group size, if there is one. Otherwise latency + bytes of
        a link (``bus_bytes``) / bus bandwidth.

        Args:
            collective: its kind.
            message_bytes: of the whole tensor, not of a shard.
            group: its ranks.
            efficiency: fraction of the bus bandwidth that is reached.
        """
        if group.size <= 1:
            return 0.0
        curves = self.collective_curves.get(collective)
        if curves and group.num_nodes == 1:
            # Closest in ratio; of two equally close ones, the larger group.
            closest = min(curves, key=lambda curve: (abs(log(curve.ranks / group.size)), -curve.ranks))
            # Measured in wall-clock time while ranks shared cores; costs are seconds of a core (docs/decisions/0018).
            return closest.seconds(collective, message_bytes, group.size) / self.crowding(closest.ranks) / efficiency
        moved = bus_bytes(collective, message_bytes, group.size)
        if self.bus_message_bytes and group.num_nodes > 1:
            latency = self._measured_latency_s(collective, group.num_nodes)
            return latency + moved / (self.bus_bytes_per_s(collective, group) * efficiency)
        latency = self.intra.latency_s + self._hops_s(collective, group)
        return latency + moved / (self.bus_bytes_per_s(collective, group) * efficiency)

    def _hops_s(self, collective: Collective, group: Group) -> float:
        """Seconds of the sequential hops of a collective between nodes (``HOP_S``); 0 inside a node.

        As NCCL's own model: all-gathers and reduce-scatters go around a ring of all ranks, all-reduces up and down a
        tree of nodes, each a chain of its ranks.
        """
        if group.num_nodes == 1:
            return 0.0
        if collective == "all_reduce":
            return 2 * ((group.per_node - 1) * HOP_S + log2(group.num_nodes) * self.inter.latency_s)
        return (group.size - group.num_nodes) * HOP_S + (group.num_nodes - 1) * self.inter.latency_s

    def _measured_latency_s(self, collective: Collective, num_nodes: int) -> float:
        """Seconds of the measured message on whole nodes beyond those at the links' bandwidth."""
        moved = bus_bytes(collective, self.bus_message_bytes, num_nodes * self.devices_per_node)
        most = min(self.intra.bytes_per_s, self.inter.bytes_per_s)
        return max(0.0, moved / interpolate(self.bus_curves[collective], num_nodes) - moved / most)

    def p2p_s(self, message_bytes: float, *, is_inside: bool, sharing: int = 1, efficiency: float = 1.0) -> float:
        """Seconds of one message between two devices, while ``sharing`` of a node's devices send."""
        link = self.intra if is_inside else self.inter
        bandwidth = link.bytes_per_s if is_inside else link.bytes_per_s / sharing
        return link.latency_s + message_bytes / (bandwidth * efficiency)
