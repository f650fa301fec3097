"""Turns measurements into a cluster, and into the comments of its file."""

from collections.abc import Iterator, Mapping
from datetime import date

from pipeloom.cost.hardware import Cluster, Collective, CollectiveCurve, Curve, Device, Link
from pipeloom.measure.findings import Findings, Messages, Timing, Traffic, size_text
from pipeloom.terminal.words import UNBREAKABLE

_CLEAR = 1.25
"""A product that takes less than this many times the fixed time of a kernel is left out."""
_FREE = 0.95
"""Share of a core above which the core was not shared."""
_PEAKS: tuple[tuple[tuple[str, ...], Mapping[str, float], str], ...] = (
    (("V100-SXM2",), {"fp32": 15.7e12, "fp16": 125e12}, "NVIDIA V100 datasheet, SXM2"),
    (("A100",), {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}, "NVIDIA A100 datasheet, dense"),
    (("H100 80GB HBM3",), {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}, "NVIDIA H100 datasheet, SXM, dense"),
    (("NVIDIA H200",), {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}, "NVIDIA H200 datasheet, SXM, dense"),
)
"""(parts of the name, FLOP/s by precision, source). Dense tensor cores; fp32 without TF32."""

_OTHERS = ("MIG", "PCIe", "PCIE", "NVL", "GH200")
"""Names with one of these have other clocks or are a part of a device; A100 cards differ only in MIG."""


def describe_cluster(name: str, findings: Findings) -> tuple[Cluster, dict[str, list[str]]]:
    """Make a cluster, and the comments of its file by key (``pipeloom.catalog.cluster_files``).

    Args:
        name: of the cluster.
        findings: its measurements.
    """
    intra, inter, link_notes = _links(findings)
    curves: dict[Collective, tuple[CollectiveCurve, ...]] = {}
    for found in findings.collectives:
        curve = CollectiveCurve(ranks=found.ranks, points=found.bus)
        curves[found.collective] = (*curves.get(found.collective, ()), curve)
    cluster = Cluster(
        name=name,
        device=_device(findings),
        devices_per_node=max(findings.host.num_devices, findings.per_host),
        intra=intra,
        inter=inter,
        collective_curves=curves,
        cores_per_node=findings.host.num_devices if findings.host.kind == "cpu" else 0,
    )
    return cluster, {**_head(findings), **_device_notes(findings), **link_notes, **_collective_notes(findings)}


def datasheet_peaks(device_name: str) -> tuple[dict[str, float], str]:
    """Datasheet FLOP/s by precision, and their source; empty for a device without an entry."""
    for words, peaks, source in _PEAKS:
        is_other = any(other in device_name for other in (_OTHERS[:1] if words == ("A100",) else _OTHERS))
        if not is_other and any(word in device_name for word in words):
            return dict(peaks), source
    return {}, ""


def _device(findings: Findings) -> Device:
    rates = product_rates(findings)
    peaks, _ = datasheet_peaks(findings.host.device_name)
    peaks = {name: max(peaks.get(name, 0.0), *(rate for _, rate in curve)) for name, curve in rates.items()}
    curves = {name: tuple((flops, rate / peaks[name]) for flops, rate in curve) for name, curve in rates.items()}
    first, *others = curves
    return Device(
        name=findings.host.device_name + (", one core" if findings.host.kind == "cpu" else ""),
        peak_flops_per_s=peaks,
        matmul_curve=curves[first],
        kernel_s=findings.kernel.median_s,
        memory_bytes=findings.host.memory_bytes,
        memory_bytes_per_s=max(findings.copy.bytes_per_s, findings.add.bytes_per_s),
        launch_s=findings.launch.median_s,
        matmul_curves={name: curves[name] for name in others},
        num_multiprocessors=findings.host.num_multiprocessors,
        # PyTorch calls AMD's GPUs cuda as well.
        vendor="amd" if findings.host.kind == "cuda" and "AMD" in findings.host.device_name else "nvidia",
    )


def product_rates(findings: Findings) -> dict[str, Curve]:
    """(FLOPs of a product, FLOP/s without the fixed time of a kernel) by precision; the same sizes for each.

    A size that takes hardly longer than that fixed time in one of the precisions is left out, except the largest.
    """
    kernel_s = findings.kernel.median_s
    largest = max(product.flops for product in findings.products)
    unclear = {p.flops for p in findings.products if p.timing.median_s < _CLEAR * kernel_s} - {largest}
    rates: dict[str, list[tuple[float, float]]] = {}
    for product in findings.products:
        if product.flops not in unclear:
            # The largest stays even if it is short; its time is then bounded from below.
            alone_s = max(product.timing.median_s - kernel_s, product.timing.median_s * (1 - 1 / _CLEAR))
            rates.setdefault(product.precision, []).append((product.flops, product.flops / alone_s))
    return {name: tuple(curve) for name, curve in rates.items()}


def _links(findings: Findings) -> tuple[Link, Link, dict[str, list[str]]]:
    """Links inside and between hosts, the one in place of the other if only one was measured; and notes about them."""
    intra, inter = findings.intra, findings.inter
    notes = {"intra": _messages_note(intra), "inter": _messages_note(inter)}
    if intra is None and inter is None:
        notes["intra"] = ["NOT MEASURED, one process has no link: the memory's bandwidth, the host's time to launch."]
        traffic = max(findings.copy.bytes_per_s, findings.add.bytes_per_s)
        links = [Link(latency_s=findings.launch.median_s, bytes_per_s=traffic)] * 2
    else:
        links = [found.link for found in (intra, inter) if found is not None]
        if intra is None:
            notes["intra"] = ["NOT MEASURED, each host has one process: the same as between hosts."]
    if inter is None:
        notes["inter"] = ["NOT MEASURED, there was one host: the same as inside it. Edit it for a cluster of several."]
    return links[0], links[-1], notes


def _messages_note(found: Messages | None) -> list[str]:
    if found is None:
        return []
    pairs = "one pair" if found.num_pairs == 1 else f"{found.num_pairs} pairs at once, the bandwidth is their sum"
    return [
        f"Half of there and back, {pairs}: {_points(found.points)}.",
        "The line through these that has the least squares of relative errors.",
        f"At a measured size it is off by up to {found.worst_error:.0%}.",
    ]


def _head(findings: Findings) -> dict[str, list[str]]:
    host, hosts = findings.host, findings.num_processes // findings.per_host
    where = f"{host.device_name}, {host.devices}" + (f", {hosts} hosts" if hosts > 1 else "")
    return {
        "": [
            f"Measured by `pipeloom profile` on {date.today()}, in {findings.seconds:.0f} s.",
            f"Host: {where}; {host.software}.",
            f"Processes: {findings.num_processes}; they computed at the same time, and the times are those of rank 0.",
            *([crowding(findings)] if crowding(findings) else []),
            "Every value is the median of repeats; the percentage is the distance between their quartiles.",
        ]
    }


def crowding(findings: Findings) -> str:
    """A warning if the machine was busy, else empty."""
    if findings.host.kind != "cpu" or findings.core_share >= _FREE:
        return ""
    return (
        f"While it computed, rank 0 had {findings.core_share:.0%} of a core: other programs or virtual machines were "
        "running, or there were more processes than cores."
    )


def _device_notes(findings: Findings) -> dict[str, list[str]]:
    peaks, source = datasheet_peaks(findings.host.device_name)
    best = f"{source}." if peaks else "No datasheet's peak: the best rate that was measured."
    slow = [
        f"{name} reached {rate / 1e9:.3g} GFLOP/s, less than a quarter of fp32's: left out."
        for name, rate in findings.too_slow.items()
    ]
    memory = "All of the GPU's." if findings.host.kind == "cuda" else "A core's share of the host's."
    launched = "Host's time to launch" if findings.host.kind == "cuda" else "Time of"
    return {
        "device.peak_tflop_per_s": [best, *slow],
        "device.memory_gb": [memory],
        "device.memory_gb_per_s": [
            f"The faster of: copy of {_traffic(findings.copy)}, sum of two into a third {_traffic(findings.add)}."
        ],
        "device.launch_us": [f"{launched} a sum of 16 numbers, {_timing(findings.launch)}."],
        "device.kernel_us": [f"A product of two 8 x 8 matrices, {_timing(findings.kernel)}."],
        "device.matmul_gflop": [
            "Products of square matrices; the fractions are without kernel_us. With it they reached, in GFLOP/s:",
            *(f"{name}: {_products(findings, name)}." for name in product_rates(findings)),
        ],
    }


def _products(findings: Findings, precision: str) -> str:
    return ", ".join(
        _together(f"{product.width} wide {product.flops_per_s / 1e9:.4g} {_spread(product.timing)}")
        for product in findings.products
        if product.precision == precision
    )


def _collective_notes(findings: Findings) -> dict[str, list[str]]:
    notes: dict[str, list[str]] = {}
    for found in findings.collectives:
        begin = [f"{found.ranks} processes of a host; the bytes are those of the whole tensor."]
        lines = notes.setdefault(f"collectives.{found.ranks}", begin)
        lines.append(f"{found.collective}: {_points(found.points)}.")
    return notes


def _points(points: tuple[tuple[float, Timing], ...]) -> str:
    return ", ".join(_together(f"{size_text(size)} {_timing(timing)}") for size, timing in points)


def _together(text: str) -> str:
    """A text without line breaks."""
    return text.replace(" ", UNBREAKABLE)


def _traffic(traffic: Traffic) -> str:
    return f"{_rate(traffic.bytes_per_s)} {_spread(traffic.timing)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _timing(timing: Timing) -> str:
    return f"{_seconds(timing.median_s)} {_spread(timing)}"


def _seconds(seconds: float) -> str:
    scale, unit = next(
        pair for pair in ((1e6, "us"), (1e3, "ms"), (1.0, "s")) if seconds * pair[0] < 1e3 or pair[0] == 1
    )
    return f"{seconds * scale:.3g} {unit}"


def _spread(timing: Timing) -> str:
    return f"({timing.spread:.0%})"


def table_rows(findings: Findings) -> Iterator[tuple[str, str, Timing | None]]:
    """Rows of a table: name, value, and the timing if there is a single one."""
    for product in findings.products:
        name = f"{product.precision} product, {product.width} wide"
        yield name, f"{product.flops_per_s / 1e9:,.1f} GFLOP/s", product.timing
    for name, rate in findings.too_slow.items():
        yield f"{name} products: emulated, left out", f"{rate / 1e9:,.1f} GFLOP/s", None
    for name, timing in (
        ("fixed time of a kernel", findings.kernel),
        ("host's time for an operation", findings.launch),
    ):
        yield name, _seconds(timing.median_s), timing
    for name, traffic in (("copy", findings.copy), ("sum", findings.add)):
        yield f"memory, {name}", _rate(traffic.bytes_per_s), traffic.timing
    yield "memory of a device", f"{findings.host.memory_bytes / 1e9:,.1f} GB", None
    for between, link in (("two processes", findings.intra), ("two hosts", findings.inter)):
        if link is not None:
            yield f"link of {between}: latency", _seconds(link.link.latency_s), None
            yield f"link of {between}: bandwidth", _rate(link.link.bytes_per_s), None
            for size, timing in (link.points[0], link.points[-1]):
                yield f"  message of {size_text(size)}", _seconds(timing.median_s), timing
    for found in findings.collectives:
        (least, shortest), (most, longest) = found.points[0], found.points[-1]
        name = f"{found.collective} of {found.ranks}"
        yield f"{name}, {size_text(least)}", _seconds(shortest.median_s), shortest
        yield f"{name}, {size_text(most)}, bus", _rate(found.bus[-1][1]), longest
