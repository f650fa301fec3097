"""What was measured, as it was measured: plain values that travel between processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from pipeloom.cost.hardware import Collective, Link, bus_bytes
from pipeloom.terminal.words import count


@dataclass(frozen=True)
class Timing:
    """One measurement, repeated.

    Attributes:
        median_s: seconds, the median of the repeats.
        spread: distance between the quartiles as a fraction of the median.
        repeats: how many.
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

        Of n normal values it is 1.25 sigma / sqrt(n), and their quartiles are 1.35 sigma apart.
        """
        return 0.93 * self.spread / self.repeats**0.5


@dataclass(frozen=True)
class Product:
    """A product of two square matrices, with the fixed time of a kernel in it.

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
        """FLOP/s with everything in it."""
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
    """A size in powers of two, for people."""
    scales = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
    scale, unit = next(pair for pair in scales if size >= pair[0])
    return f"{size / scale:,.0f} {unit}"


@dataclass(frozen=True)
class Messages:
    """Messages of several sizes from process to process.

    Attributes:
        num_pairs: pairs of processes that exchanged messages at the same time.
        points: (bytes of one message, its timing), bytes rising.
    """

    num_pairs: int
    points: tuple[tuple[float, Timing], ...]

    @property
    def link(self) -> Link:
        """The latency and the bandwidth of all pairs together that fit the medians best, in relative error."""
        latency_s, seconds_per_byte = fit_line([(size, timing.median_s) for size, timing in self.points])
        return Link(latency_s=latency_s, bytes_per_s=self.num_pairs / seconds_per_byte)

    @property
    def worst_error(self) -> float:
        """Largest relative error of the link at a size that was measured."""
        link = self.link
        predicted = [link.latency_s + size * self.num_pairs / link.bytes_per_s for size, _ in self.points]
        return max(
            abs(seconds / timing.median_s - 1) for seconds, (_, timing) in zip(predicted, self.points, strict=True)
        )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and seconds for each byte, both of at least 0, with the least squares of the relative errors.

    Args:
        points: (bytes, seconds), two or more of different bytes.
    """
    # Divided by its seconds each point counts alike; else the largest message alone would decide.
    weights = [(1 / seconds, size / seconds) for size, seconds in points]
    uu, uv, vv = (sum(w[i] * w[j] for w in weights) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(w[i] for w in weights) for i in (0, 1))
    determinant = uu * vv - uv * uv
    latency_s, seconds_per_byte = (vv * u - uv * v) / determinant, (uu * v - uv * u) / determinant
    # On the border of what is allowed the least squares have one unknown left.
    if latency_s < 0:
        return 0.0, v / vv
    if seconds_per_byte <= 0:
        return median(seconds for _, seconds in points), min(seconds / size for size, seconds in points)
    return latency_s, seconds_per_byte


@dataclass(frozen=True)
class Collectives:
    """One collective over messages of several sizes, inside a node.

    Attributes:
        collective: which.
        ranks: that took part.
        points: (bytes of the whole tensor, its timing), bytes rising.
    """

    collective: Collective
    ranks: int
    points: tuple[tuple[float, Timing], ...]

    @property
    def bus(self) -> tuple[tuple[float, float], ...]:
        """(bytes of the whole tensor, bus bytes/s), as nccl-tests counts them."""
        return tuple((size, bus_bytes(self.collective, size, self.ranks) / t.median_s) for size, t in self.points)


@dataclass(frozen=True)
class Host:
    """What was measured on.

    Attributes:
        kind: "cpu" or "cuda".
        device_name: of the CPU or the GPU, as it calls itself.
        num_devices: cores or GPUs of a host.
        memory_bytes: of one device; of a core, its share of the host's.
        num_multiprocessors: of a GPU; 0 on CPUs.
        software: operating system, Python, PyTorch and what carries messages, for people.
    """

    kind: str
    device_name: str
    num_devices: int
    memory_bytes: float
    num_multiprocessors: int
    software: str

    @property
    def devices(self) -> str:
        """Their number, for people."""
        return count(self.num_devices, "core" if self.kind == "cpu" else "GPU")


@dataclass(frozen=True)
class Findings:
    """All of it.

    Attributes:
        host: where.
        num_processes: that computed at the same time, on all hosts together.
        per_host: of them on each host.
        core_share: CPU time by time while rank 0 computed; below 1 where it had to share its core. Tells nothing on
            CUDA.
        products: matrix products; every precision has the same sizes.
        too_slow: precisions that were left out, with the FLOP/s they reached.
        kernel: a product of tiny matrices.
        launch: a tiny operation, seconds of the host.
        copy: a large tensor into another one.
        add: the sum of two large tensors into a third one.
        intra: messages between two processes of a host; ``None`` where a host has but one.
        inter: messages between two hosts; ``None`` on a single one.
        collectives: inside a host.
        seconds: that the measuring took.
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
