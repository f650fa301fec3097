"""Raw measurements, as values that can be pickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from pipeloom.cost.hardware import Collective, Link, bus_bytes
from pipeloom.terminal.words import count


@dataclass(frozen=True)
class Timing:
    """A repeated measurement.

    Attributes:
        median_s: median seconds.
        spread: interquartile range as a fraction of the median.
        repeats: number of repeats.
    """

    median_s: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Timing":
        """The timing of two or more repeats."""
        low, middle, high = quantiles(times_s, n=4, method="inclusive")
        return cls(middle, (high - low) / middle if middle > 0 else 0.0, len(times_s))

    @property
    def uncertainty(self) -> float:
        """Standard error of the median as a fraction of it.

        For n normal values it is 1.25 sigma / sqrt(n), and the interquartile range is 1.35 sigma.
        """
        return 0.93 * self.spread / self.repeats**0.5


@dataclass(frozen=True)
class Product:
    """A product of two square matrices, including the fixed time of a kernel.

    Attributes:
        precision: of the operands.
        flops: 2 n^3.
        timing: of one product.
    """

    precision: str
    flops: float
    timing: Timing

    @property
    def width(self) -> int:
        """Rows and columns of each matrix."""
        return round((self.flops / 2) ** (1 / 3))

    @property
    def flops_per_s(self) -> float:
        """FLOP/s, including the fixed time of a kernel."""
        return self.flops / self.timing.median_s


@dataclass(frozen=True)
class Traffic:
    """A pass over memory.

    Attributes:
        moved_bytes: read and written.
        timing: of one pass.
    """

    moved_bytes: float
    timing: Timing

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth."""
        return self.moved_bytes / self.timing.median_s


def size_text(size: float) -> str:
    """Format bytes with binary units."""
    scales = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
    scale, unit = next(pair for pair in scales if size >= pair[0])
    return f"{size / scale:,.0f} {unit}"


@dataclass(frozen=True)
class Messages:
    """Messages of several sizes between processes.

    Attributes:
        num_pairs: pairs of processes that exchanged messages at the same time.
        points: (bytes of one message, its timing), bytes rising.
    """

    num_pairs: int
    points: tuple[tuple[float, Timing], ...]

    @property
    def link(self) -> Link:
        """Least-squares fit of the medians in relative error: latency, and bandwidth of all pairs together."""
        latency_s, seconds_per_byte = fit_line([(size, timing.median_s) for size, timing in self.points])
        return Link(latency_s=latency_s, bytes_per_s=self.num_pairs / seconds_per_byte)

    @property
    def worst_error(self) -> float:
        """Largest relative error of the fit at a measured size."""
        link = self.link
        predicted = [link.latency_s + size * self.num_pairs / link.bytes_per_s for size, _ in self.points]
        return max(
            abs(seconds / timing.median_s - 1) for seconds, (_, timing) in zip(predicted, self.points, strict=True)
        )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Non-negative least-squares fit in relative errors; returns latency in seconds, and seconds per byte.

    Args:
        points: (bytes, seconds), two or more of different bytes.
    """
    # Divided by its seconds, each point has the same weight; otherwise the largest message would dominate.
    weights = [(1 / seconds, size / seconds) for size, seconds in points]
    uu, uv, vv = (sum(w[i] * w[j] for w in weights) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(w[i] for w in weights) for i in (0, 1))
    determinant = uu * vv - uv * uv
    latency_s, seconds_per_byte = (vv * u - uv * v) / determinant, (uu * v - uv * u) / determinant
    # On the boundary one unknown is left.
    if latency_s < 0:
        return 0.0, v / vv
    if seconds_per_byte <= 0:
        return median(seconds for _, seconds in points), min(seconds / size for size, seconds in points)
    return latency_s, seconds_per_byte


@dataclass(frozen=True)
class Collectives:
    """One collective for several sizes, inside a node.

    Attributes:
        collective: its name.
        ranks: size of the group.
        points: (bytes of the whole tensor, its timing), bytes rising.
    """

    collective: Collective
    ranks: int
    points: tuple[tuple[float, Timing], ...]

    @property
    def bus(self) -> tuple[tuple[float, float], ...]:
        """(bytes of the whole tensor, bus bandwidth in bytes/s), as defined by nccl-tests."""
        return tuple((size, bus_bytes(self.collective, size, self.ranks) / t.median_s) for size, t in self.points)


@dataclass(frozen=True)
class Host:
    """The measured host.

    Attributes:
        kind: "cpu" or "cuda".
        device_name: model of the CPU or the GPU.
        num_devices: cores or GPUs of a host.
        memory_bytes: of one device; for a core, its share of the host's memory.
        num_multiprocessors: of a GPU; 0 on CPUs.
        software: operating system, Python, PyTorch and communication backend, as text.
    """

    kind: str
    device_name: str
    num_devices: int
    memory_bytes: float
    num_multiprocessors: int
    software: str

    @property
    def devices(self) -> str:
        """Number and kind of devices, as text."""
        return count(self.num_devices, "core" if self.kind == "cpu" else "GPU")


@dataclass(frozen=True)
class Findings:
    """All measurements of a machine.

    Attributes:
        host: the host of rank 0.
        num_processes: number of processes, which measured at the same time, on all hosts.
        per_host: processes on each host.
        core_share: CPU time divided by wall-clock time while rank 0 computed; below 1 if it shared its core. Without
            meaning on CUDA.
        products: matrix products; every precision has the same sizes.
        too_slow: FLOP/s of the precisions that were left out.
        kernel: a product of tiny matrices.
        launch: a tiny operation, on the host's clock.
        copy: copy of a large tensor.
        add: sum of two large tensors into a third one.
        intra: messages between two processes of a host; ``None`` with one process per host.
        inter: messages between two hosts; ``None`` with one host.
        collectives: inside a host.
        seconds: duration of all measurements.
    """

    host: Host
    num_processes: int
    per_host: int
    core_share: float
    products: tuple[Product, ...]
    too_slow: dict[str, float]
    kernel: Timing
    launch: Timing
    copy: Traffic
    add: Traffic
    intra: Messages | None
    inter: Messages | None
    collectives: tuple[Collectives, ...]
    seconds: float
