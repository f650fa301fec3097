"""Devices, links and clusters: seconds of a matrix product, of memory traffic, of a collective; and what was measured.

Everything is in SI: seconds, bytes, FLOP/s, bytes/s. Files are converted where they are read (``pipeloom.catalog``).

Where a host has fewer cores than processes, what was measured is in seconds of a core: the CPU time that the process
takes while all processes are at work. What ranks wait for each other is then left to others, and the simulator shares
the cores out (``pipeloom.predict.places``).
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
        memory_bytes: what a process can allocate.
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
            # No other precision's peak stands in: their ratio is 2 on a P100 and 16 on an A100.
            known = ", ".join(self.peak_flops_per_s)
            raise UserError(f"the device '{self.name}' has no peak for {precision}; its file has {known}")
        curve = self.matmul_curves.get(precision, self.matmul_curve)
        rate = self.peak_flops_per_s[precision] * interpolate(curve, flops) * efficiency
        # Roofline: products of few rows are bound by reading the weights.
        return max(flops / rate, moved_bytes / self.memory_bytes_per_s) + self.kernel_s

    def filling(self, rows: float, columns: float) -> float:
        """Part of the device that computes useful numbers while a product's output is made, 0 to 1.

        Each multiprocessor makes one tile at a time, so that the last wave of tiles may be partly empty, and tiles at
        the edge too (NVIDIA, "Matrix multiplication background", tile and wave quantization). The library takes
        the size of tile that is best for the product.
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
    """Bytes that each rank's link carries: what nccl-tests divides by the time to get the "bus bandwidth".

    A ring moves (n - 1) / n of the whole message over each link, an all-reduce twice that.
    """
    twice = 2 if collective == "all_reduce" else 1
    return twice * (ranks - 1) / ranks * message_bytes


@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """One collective as it was measured inside a node.

    Attributes:
        ranks: that took part.
        points: (bytes of the whole tensor, bus bytes/s with the latency in it), bytes rising.
    """

    ranks: int
    points: Curve

    def seconds(self, collective: Collective, message_bytes: float, ranks: int) -> float:
        """Seconds with this or another number of ranks, at the same bus bandwidth for a message of the same size.

        Between two points the time grows evenly with the bytes, as it does with a latency and a bandwidth. A smaller
        message than was measured takes as long as the smallest one; a larger one gets the largest one's bandwidth.
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
    """How a group of ranks lies on nodes.

    Attributes:
        size: ranks of the group.
        per_node: ranks of it on each node.
        sharing: groups that use a node's network at the same time.
    """

    size: int
    per_node: int
    sharing: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the group touches."""
        return -(-self.size // self.per_node)

    @classmethod
    def strided(cls, size: int, stride: int, devices_per_node: int) -> "Group":
        """Ranks 0, stride, 2 stride, ... with all the other groups of that stride working at the same time."""
        per_node = max(1, min(size, devices_per_node // stride if stride < devices_per_node else 1))
        # Groups that lie between each other's ranks do the same at the same time, and share the node's network.
        return cls(size, per_node, max(1, min(devices_per_node, devices_per_node // per_node)))


@dataclass(frozen=True, kw_only=True)
class MeasuredPieces:
    """A model's pieces as they were measured.

    Attributes:
        run: of what (``Run.of_measured_pieces``).
        embedding, layer, head: seconds for one micro-batch, with tensor-parallel exchanges.
        stage: seconds of a stage beside its pieces.
        message_s: seconds of a core that a message between two stages takes at both ends together; 0 where cores are
            not shared, so that the seconds are the link's.
    """

    run: Run
    embedding: Both
    layer: Both
    head: Both
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdate:
    """What follows a step's pipeline, as it was measured: gradients to zero, their norm, clipping, the optimizer.

    Attributes:
        fixed_s: seconds of a rank whatever it holds.
        parameter_s: seconds for each parameter that the rank updates.
        precision: of weights and activations.
    """

    fixed_s: float
    parameter_s: float
    precision: Precision

    def seconds(self, parameters: float) -> float:
        """Of a rank that updates so many."""
        return self.fixed_s + self.parameter_s * parameters


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in nodes, nodes on a network.

    Nodes of several kinds are a ``pipeloom.cost.mixed.MixedCluster``. What depends on where devices stand asks
    ``part`` and ``route``, which answer with a cluster of one kind: here with this one.

    Attributes:
        name: for people.
        device: every device is alike.
        devices_per_node: at most.
        intra: inside a node.
        inter: between nodes; the bandwidth is that of a whole node.
        bus_curves: for each collective (nodes, bus bandwidth in bytes/s with all devices of the nodes in one
            group), as nccl-tests reports it. Empty: from the links.
        collective_curves: for each collective what was measured inside a node over the message's size, with one or
            more numbers of ranks. Empty: from ``bus_curves`` or the links.
        host: between a device and the memory of its host, while all devices of a node use theirs; ``None`` where
            nothing can be left there.
        price_per_device_hour: in dollars; ``None`` where nobody publishes one.
        adapters_per_node: network adapters of a node, which its devices share evenly; 0: one for each device.
        cores_per_node: cores that the devices of a node share, where devices are processes on a CPU; 0: every device
            computes by itself.
        pieces: what was measured of models; where nothing was, closed forms tell.
        update: what was measured of updating weights.
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
        """``host``, where something is left there.

        Raises:
            UserError: the cluster's file does not say how fast it is.
        """
        if self.host is None:
            raise UserError(
                f"the cluster {self.name} does not say how fast a device reaches the memory of its host; add to its "
                "file a table [host] with latency_us and gb_per_s"
            )
        return self.host

    def __hash__(self) -> int:
        """Of the name: equal clusters have equal names, and what is remembered of a cluster is looked up often."""
        return hash(self.name)

    def part(self, first: int, num_devices: int) -> "Cluster":
        """The cluster as devices see it that work in lock-step: nodes of one kind.

        Args:
            first: the first device.
            num_devices: from there on.

        Raises:
            UserError: there are not so many devices.
        """
        del first, num_devices
        return self

    def route(self, first: int, other: int, num_devices: int) -> "Cluster":
        """The cluster as messages see it that go from each of some devices to one of as many others.

        Args:
            first: the first device at one end.
            other: its partner at the other end.
            num_devices: at each end.

        Raises:
            UserError: there are not so many devices.
        """
        del first, other, num_devices
        return self

    def kinds(self, num_devices: int) -> tuple[tuple["Cluster", int], ...]:
        """The kinds of nodes that the first devices are on, each with how many of them.

        Raises:
            UserError: there are not so many devices.
        """
        return ((self, num_devices),)

    def node_of(self, device: int) -> tuple[int, int]:
        """The number of a device's node, and its place there."""
        return divmod(device, self.devices_per_node)

    @property
    def num_devices(self) -> int | None:
        """Devices of all nodes; ``None`` for as many as anybody wants."""
        return None

    def lack(self, num_devices: int) -> str | None:
        """What is wrong with a run on so many devices; ``None`` if there are enough."""
        del num_devices
        return None

    def orders(self) -> Iterator[tuple[str, ...]]:
        """Orders of the kinds of nodes that make a difference, for ``reordered``; the present one first."""
        yield ()

    def reordered(self, order: Sequence[str]) -> "Cluster":
        """The same cluster with its kinds of nodes in another order: the first ranks are on the first of them."""
        assert not order, "there is one kind of nodes"
        return self

    def each(self, change: "Callable[[Cluster], Cluster]") -> "Cluster":
        """The cluster with a change to every kind of nodes and to the networks between them; names stay."""
        return change(self)

    def default_dtype(self, num_devices: int) -> Dtype:
        """The type of a run on the first devices that names none, which all of them compute in if there is one.

        Raises:
            UserError: there are not so many devices.
        """
        devices = [kind.device for kind, _ in self.kinds(num_devices)]
        shared = set.intersection(*(set(device.peak_flops_per_s) for device in devices))
        return default_dtype(is_gpu=any(device.is_gpu for device in devices), precisions=shared)

    def price_per_hour(self, num_devices: int) -> float | None:
        """Dollars for the first devices together; ``None`` where a price is not known."""
        total = 0.0
        # A sum with one price missing would look cheap.
        for kind, count in self.kinds(num_devices):
            if kind.price_per_device_hour is None:
                return None
            total += count * kind.price_per_device_hour
        return total

    def peak_flops_per_s(self, num_devices: int, precision: str) -> float:
        """Of the first devices together."""
        return sum(count * kind.device.peak_flops_per_s[precision] for kind, count in self.kinds(num_devices))

    @property
    def num_adapters(self) -> int:
        """Network adapters of a node."""
        return min(self.adapters_per_node or self.devices_per_node, self.devices_per_node)

    def crowding(self, num_ranks: int) -> float:
        """Ranks on each core of a node while so many are on the cluster; 1 where each has one to itself."""
        on_node = min(num_ranks, self.devices_per_node)
        return max(1.0, on_node / self.cores_per_node) if self.cores_per_node else 1.0

    def sharing(self, copies: int) -> int:
        """Devices that the network of a node has to be divided by, while ``copies`` neighboring devices send.

        A device sends through its own adapter, whatever the others of the node do.
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
            collective: which.
            message_bytes: the whole tensor, not a rank's shard.
            group: who takes part.
            efficiency: fraction of the bus bandwidth that is reached.
        """
        if group.size <= 1:
            return 0.0
        curves = self.collective_curves.get(collective)
        if curves and group.num_nodes == 1:
            # Of two that are as close, the larger group.
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
