"""Devices, links and clusters: seconds of a matrix product, of memory traffic, of a collective; and measurements.

Everything is in SI: seconds, bytes, FLOP/s, bytes/s. Files are converted where they are read (``pipeloom.catalog``).

Where a host has fewer cores than processes, measurements are in seconds of a core: the CPU time of a process while all
processes work. Waiting takes no CPU time, and the simulator shares the cores among ranks (``pipeloom.predict.places``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log
from typing import Literal

from pipeloom.errors import UserError
from pipeloom.workload.dtypes import Dtype, Precision, default_dtype
from pipeloom.workload.run import Run

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
Curve = tuple[tuple[float, float], ...]
"""(x, y) points with rising x."""
Both = tuple[float, float]
"""Seconds of a forward and of a backward."""

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
"""Tiles of a matrix product's output (height, width, rate): a multiprocessor computes one at a time; small ones load
more for each operation. The sizes are cuBLAS's (NVIDIA, "Matrix multiplication background"); the rates are rounded from
general experience, not fitted, and those of 256 by 64 lie where their loads for each operation put them."""


def interpolate(curve: Curve, x: float) -> float:
    """Value at ``x`` of a curve given by (x, y) points with rising x; linear in log x, flat outside."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * log(x / x0) / log(x1 / x0)
    return curve[-1][1]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: as tables of measurements spell it.
        peak_flops_per_s: by precision.
        matmul_curve: (FLOPs of one matrix product, FLOP/s reached as a fraction of the peak), in each precision that
            has no curve of its own; empty where all have one.
        matmul_curves: the curves of precisions that have their own.
        kernel_s: seconds that a kernel costs whatever it does: ramp-up and the tail of the last wave.
        memory_bytes: that a process can allocate.
        memory_bytes_per_s: nominal bandwidth.
        launch_s: seconds of the host for each kernel it launches.
        num_multiprocessors: that compute tiles of a product; 0 if products are not cut into tiles.
    """

    name: str
    peak_flops_per_s: dict[str, float]
    matmul_curve: Curve = ()
    kernel_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float
    matmul_curves: dict[str, Curve] = field(default_factory=dict)
    num_multiprocessors: int = 0

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU: its file says how many multiprocessors it has."""
        return self.num_multiprocessors > 0

    def matmul_s(self, flops: float, moved_bytes: float, precision: str, efficiency: float = 1.0) -> float:
        """Seconds of one matrix product.

        Args:
            flops: 2 m k n.
            moved_bytes: both inputs and the output, once each.
            precision: key of ``peak_flops_per_s``.
            efficiency: fraction of the curve that a real program reaches (clocks, layouts of operands).

        Raises:
            UserError: the device's file has no peak for this precision.
        """
        if flops <= 0:
            return 0.0
        if precision not in self.peak_flops_per_s:
            # No other precision's peak is used instead: their ratio is 2 on a P100 and 16 on an A100.
            known = ", ".join(self.peak_flops_per_s)
            raise UserError(f"the device '{self.name}' has no peak for {precision}; its file has {known}")
        curve = self.matmul_curves.get(precision, self.matmul_curve)
        rate = self.peak_flops_per_s[precision] * interpolate(curve, flops) * efficiency
        # Roofline: products of few rows are bound by reading the weights.
        return max(flops / rate, moved_bytes / self.memory_bytes_per_s) + self.kernel_s

    def filling(self, rows: float, columns: float) -> float:
        """Utilization of the multiprocessors by the tiles of a product's output, 0 to 1.

        Each multiprocessor computes one tile at a time, so that the last wave of tiles, and tiles at the edge, may be
        partly empty (NVIDIA, "Matrix multiplication background", tile and wave quantization). The library chooses the
        best size of tile for the product.
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
        """Seconds of kernels that are bound by memory."""
        return moved_bytes / (self.memory_bytes_per_s * efficiency)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A route between devices.

    Attributes:
        latency_s: of one hop.
        bytes_per_s: of one device and direction (inside a node), of a whole node and direction (between nodes).
    """

    latency_s: float
    bytes_per_s: float


def bus_bytes(collective: Collective, message_bytes: float, ranks: int) -> float:
    """Bytes that each rank's link carries; divided by the time they are the "bus bandwidth" of nccl-tests.

    A ring moves (n - 1) / n of the whole message over each link, an all-reduce twice that.
    """
    twice = 2 if collective == "all_reduce" else 1
    return twice * (ranks - 1) / ranks * message_bytes


@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """Measurements of one collective inside a node.

    Attributes:
        ranks: of the group.
        points: (bytes of the whole tensor, bus bytes/s with the latency in it), bytes rising.
    """

    ranks: int
    points: Curve

    def seconds(self, collective: Collective, message_bytes: float, ranks: int) -> float:
        """Seconds with this or another number of ranks, at the same bus bandwidth for a message of the same size.

        The time is linear in bytes between two points, as with a latency and a bandwidth. Below the smallest measured
        message it is that message's time; above the largest, the time at its bandwidth.
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
        size: ranks of the group.
        per_node: of them, ranks on each node.
        sharing: groups that use a node's network at the same time.
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
        """Ranks 0, stride, 2 stride, ... with all the other groups of that stride working at the same time."""
        per_node = max(1, min(size, devices_per_node // stride if stride < devices_per_node else 1))
        # Groups that lie between each other's ranks do the same at the same time, and share the node's network.
        return cls(size, per_node, max(1, min(devices_per_node, devices_per_node // per_node)))


@dataclass(frozen=True, kw_only=True)
class MeasuredPieces:
    """Measured seconds of a model's pieces.

    Attributes:
        run: that was measured (``Run.of_measured_pieces``).
        embedding, layer, head: seconds for one micro-batch, with tensor-parallel collectives.
        stage: seconds of a stage besides its pieces.
        message_s: seconds of a core for a message between two stages, both ends together; 0 where cores are not shared
            and the link determines the seconds.
    """

    run: Run
    embedding: Both
    layer: Both
    head: Both
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdate:
    """Measured seconds after a step's pipeline: zeroing gradients, their norm, clipping, the optimizer.

    Attributes:
        fixed_s: of a rank, for any number of parameters.
        parameter_s: for each parameter that the rank updates.
        precision: of weights and activations.
    """

    fixed_s: float
    parameter_s: float
    precision: Precision

    def seconds(self, parameters: float) -> float:
        """Seconds of a rank that updates ``parameters``."""
        return self.fixed_s + self.parameter_s * parameters


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in nodes, nodes on a network.

    Nodes of several kinds are a ``pipeloom.cost.mixed.MixedCluster``. Costs that depend on the nodes use ``part`` and
    ``route``, which return a cluster of one kind: here this one.

    Attributes:
        name: for people.
        device: all devices are alike.
        devices_per_node: at most.
        intra: inside a node.
        inter: between nodes; the bandwidth is that of a whole node.
        bus_curves: for each collective (nodes, bus bandwidth in bytes/s with all devices of the nodes in one
            group), as nccl-tests reports it. Empty: from the links.
        collective_curves: for each collective measurements inside a node over the message's size, with one or more
            numbers of ranks. Empty: from ``bus_curves`` or the links.
        host: between a device and the memory of its host, while all devices of a node use theirs; ``None`` where
            nothing can be stored there.
        price_per_device_hour: in dollars; ``None`` where none is published.
        adapters_per_node: network adapters of a node, which its devices share evenly; 0: one for each device.
        cores_per_node: cores that the devices of a node share, where devices are processes on a CPU; 0: devices share
            nothing.
        pieces: measured seconds of models; other models have closed forms.
        update: measured seconds of updating weights; ``None``: closed forms.
    """

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link
    bus_curves: dict[Collective, Curve] = field(default_factory=dict)
    collective_curves: dict[Collective, tuple[CollectiveCurve, ...]] = field(default_factory=dict)
    host: Link | None = None
    price_per_device_hour: float | None = None
    adapters_per_node: int = 0
    cores_per_node: int = 0
    pieces: tuple[MeasuredPieces, ...] = ()
    update: MeasuredUpdate | None = None

    @property
    def host_link(self) -> Link:
        """``host``.

        Raises:
            UserError: the cluster's file has no such link.
        """
        if self.host is None:
            raise UserError(
                f"the cluster {self.name} does not say how fast a device reaches the memory of its host; add to its "
                "file a table [host] with latency_us and gb_per_s"
            )
        return self.host

    def __hash__(self) -> int:
        """Of the name: equal clusters have equal names, and caches look clusters up often."""
        return hash(self.name)

    def part(self, first: int, num_devices: int) -> "Cluster":
        """The cluster of one kind of nodes that represents adjacent devices which work in lock-step.

        Args:
            first: the first device.
            num_devices: their number.

        Raises:
            UserError: the cluster has too few devices.
        """
        del first, num_devices
        return self

    def route(self, first: int, other: int, num_devices: int) -> "Cluster":
        """The cluster of one kind of nodes that represents messages between two ranges of devices.

        Args:
            first: the first device of one range.
            other: the first device of the other range, its peer.
            num_devices: of each range.

        Raises:
            UserError: the cluster has too few devices.
        """
        del first, other, num_devices
        return self

    def kinds(self, num_devices: int) -> tuple[tuple["Cluster", int], ...]:
        """The kinds of nodes of the first devices, each with the number of its devices.

        Raises:
            UserError: the cluster has too few devices.
        """
        return ((self, num_devices),)

    def node_of(self, device: int) -> tuple[int, int]:
        """The number of a device's node, and its index there."""
        return divmod(device, self.devices_per_node)

    @property
    def num_devices(self) -> int | None:
        """Devices of all nodes; ``None`` without a limit."""
        return None

    def lack(self, num_devices: int) -> str | None:
        """The problem of a run on more devices than there are; ``None`` if there are enough."""
        del num_devices
        return None

    def orders(self) -> Iterator[tuple[str, ...]]:
        """Distinct orders of the kinds of nodes, for ``reordered``; the present one first."""
        yield ()

    def reordered(self, order: Sequence[str]) -> "Cluster":
        """The cluster with its kinds of nodes in another order; the first ranks are on the first kind."""
        assert not order, "there is one kind of nodes"
        return self

    def each(self, change: "Callable[[Cluster], Cluster]") -> "Cluster":
        """The cluster with a change to every kind of nodes and to the networks between them; names stay."""
        return change(self)

    def default_dtype(self, num_devices: int) -> Dtype:
        """The default dtype of a run on the first devices; one that all of them support, if there is one.

        Raises:
            UserError: the cluster has too few devices.
        """
        devices = [kind.device for kind, _ in self.kinds(num_devices)]
        shared = set.intersection(*(set(device.peak_flops_per_s) for device in devices))
        return default_dtype(is_gpu=any(device.is_gpu for device in devices), precisions=shared)

    def price_per_hour(self, num_devices: int) -> float | None:
        """Dollars for the first devices together; ``None`` where a kind of nodes has no price."""
        total = 0.0
        # A sum with one price missing would look cheap.
        for kind, count in self.kinds(num_devices):
            if kind.price_per_device_hour is None:
                return None
            total += count * kind.price_per_device_hour
        return total

    def peak_flops_per_s(self, num_devices: int, precision: str) -> float:
        """Peak of the first devices together."""
        return sum(count * kind.device.peak_flops_per_s[precision] for kind, count in self.kinds(num_devices))

    @property
    def num_adapters(self) -> int:
        """Network adapters of a node."""
        return min(self.adapters_per_node or self.devices_per_node, self.devices_per_node)

    def crowding(self, num_ranks: int) -> float:
        """Ranks for each core of a node, in a run of ``num_ranks``; 1 where each has a core."""
        on_node = min(num_ranks, self.devices_per_node)
        return max(1.0, on_node / self.cores_per_node) if self.cores_per_node else 1.0

    def sharing(self, copies: int) -> int:
        """Number by which the network of a node is divided for each device, while ``copies`` adjacent devices send.

        A device sends through its own adapter, even if the others of the node are idle.
        """
        return self.num_adapters * min(copies, -(-self.devices_per_node // self.num_adapters))

    def bus_bytes_per_s(self, collective: Collective, group: Group) -> float:
        """Bandwidth of each rank's link if the links are the limit, in the sense of nccl-tests' "bus bandwidth".

        Inside a node it is the link's. Over several nodes a group that has k of a node's n devices gets k / n of
        the node's network, since the n / k groups of the same kind work at the same time.
        """
        # All groups of a kind exchange at the same time: replicas end their backwards together.
        share = group.per_node / self.devices_per_node
        curve = self.bus_curves.get(collective)
        if group.num_nodes == 1:
            return curve[0][1] if curve else self.intra.bytes_per_s
        across = interpolate(curve, group.num_nodes) if curve else self.inter.bytes_per_s
        return min(self.intra.bytes_per_s, across * share)

    def collective_s(
        self, collective: Collective, message_bytes: float, group: Group, efficiency: float = 1.0
    ) -> float:
        """Seconds of one collective; where ranks share cores, seconds of a core.

        Inside a node it is the measured curve of the number of ranks that is closest in ratio, where there is one;
        otherwise, and between nodes, a latency and the bytes that a link carries over its bandwidth.

        Args:
            collective: its kind.
            message_bytes: of the whole tensor, not a rank's shard.
            group: of ranks.
            efficiency: fraction of the bus bandwidth that is reached.
        """
        if group.size <= 1:
            return 0.0
        curves = self.collective_curves.get(collective)
        if curves and group.num_nodes == 1:
            # Of two equally close ones, the larger group.
            closest = min(curves, key=lambda curve: (abs(log(curve.ranks / group.size)), -curve.ranks))
            # Measured on a clock while ranks shared cores; predictions count seconds of a core (docs/decisions/0018).
            return closest.seconds(collective, message_bytes, group.size) / self.crowding(closest.ranks) / efficiency
        moved = bus_bytes(collective, message_bytes, group.size)
        # An assumption: with n nodes a ring has n - 1 hops in a row and a tree about log n. The root lies between.
        latency = self.intra.latency_s + self.inter.latency_s * (group.num_nodes - 1) ** 0.5
        return latency + moved / (self.bus_bytes_per_s(collective, group) * efficiency)

    def p2p_s(self, message_bytes: float, *, is_inside: bool, sharing: int = 1, efficiency: float = 1.0) -> float:
        """Seconds of one message between two devices, while ``sharing`` of a node's devices send."""
        link = self.intra if is_inside else self.inter
        bandwidth = link.bytes_per_s if is_inside else link.bytes_per_s / sharing
        return link.latency_s + message_bytes / (bandwidth * efficiency)
