"""A cluster with one of its figures changed: for questions of the kind "what if the network were twice as fast"."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from pipeloom.cost.hardware import Cluster, Link, usual_peak
from pipeloom.cost.mixed import MixedCluster
from pipeloom.cost.units import GB, GB_PER_S, TFLOP_PER_S, Unit
from pipeloom.terminal.words import leading_number

INTER, INTRA, MEMORY = "inter_bandwidth", "intra_bandwidth", "memory"
PEAK, MEMORY_BANDWIDTH = "peak", "memory_bandwidth"


_FIGURES: dict[str, tuple[Unit, Callable[[Cluster], float]]] = {
    INTER: (GB_PER_S, lambda cluster: cluster.inter.bytes_per_s),
    INTRA: (GB_PER_S, lambda cluster: cluster.intra.bytes_per_s),
    MEMORY: (GB, lambda cluster: cluster.device.memory_bytes),
    PEAK: (TFLOP_PER_S, lambda cluster: usual_peak(cluster.device.peak_flops_per_s)),
    MEMORY_BANDWIDTH: (GB_PER_S, lambda cluster: cluster.device.memory_bytes_per_s),
}
"""Name of a change -> unit of an absolute value, the figure of a cluster in SI units."""
_FACTORS = Unit("", "", 1.0, most=1e9)


def what_if_problems(changes: Mapping[str, str]) -> list[str]:
    """A sentence for each change that is neither a factor nor an absolute value, or not a plausible one.

    Args:
        changes: name -> ``2x`` or a value in the unit of cluster files.
    """
    found = []
    for name, text in changes.items():
        unit, (number, is_factor) = _FIGURES[name][0], _amount(text) or (0.0, False)
        if number == 0:
            wanted = f"a factor such as 2x or 0.5x, or a number above 0 in {unit.name}"
            found.append(f"machine.{name} must be {wanted}, found '{text}'")
        elif not (_FACTORS if is_factor else unit).has(number):
            wanted = f"a factor {_FACTORS.words}" if is_factor else f"a number {unit.words}"
            found.append(f"machine.{name} must be {wanted}, found '{text}'{'' if is_factor else unit.hint(number)}")
    return found


def _amount(text: str) -> tuple[float, bool] | None:
    """The number of a change, and whether it is a factor; ``None`` if the text is neither."""
    number, behind = leading_number(text.strip().lower()) or (0.0, "")
    behind = behind.removeprefix(" ")
    return (number, bool(behind)) if number > 0 and behind in ("", "x") else None


def without_effect(cluster: Cluster, changes: Mapping[str, str], num_devices: int) -> list[str]:
    """A sentence for each change that changes nothing of a run on the first ``num_devices`` devices, or is unclear.

    Args:
        cluster: as it is.
        changes: without ``what_if_problems``.
        num_devices: of the run.
    """
    found = list[str]()
    if num_devices == 1 and (links := [f"machine.{name}" for name in (INTER, INTRA) if name in changes]):
        has, leave = ("has", "leave it out") if len(links) == 1 else ("have", "leave them out")
        found.append(f"{' and '.join(links)} {has} no effect on one device, which sends nothing to others; {leave}")
    elif INTER in changes and cluster.lack(num_devices) is None and cluster.node_of(num_devices - 1)[0] == 0:
        found.append(
            f"machine.{INTER} has no effect: the {num_devices} devices of the run are in one node of {cluster.name}; "
            f"use machine.{INTRA}, or leave it out"
        )
    if isinstance(cluster, MixedCluster):
        found += [
            f"machine.{name} must be a factor such as 2x, since {cluster.name} has several kinds of nodes, "
            f"found '{text}'"
            for name, text in changes.items()
            if (amount := _amount(text)) is not None and not amount[1]
        ]
    return found


def changed(cluster: Cluster, changes: Mapping[str, str]) -> Cluster:
    """The cluster with its figures changed; itself without changes.

    Args:
        cluster: with nodes of one kind; of several kinds if every change is a factor.
        changes: without problems.
    """
    if not changes:
        return cluster

    def change(one: Cluster) -> Cluster:
        factors = {name: _factor(one, name, text) for name, text in changes.items()}
        one = with_bandwidth(one, intra=factors.get(INTRA, 1.0), inter=factors.get(INTER, 1.0))
        one = with_memory(one, factors[MEMORY]) if MEMORY in factors else one
        return _with_speed(one, factors.get(PEAK, 1.0), factors.get(MEMORY_BANDWIDTH, 1.0))

    words = ", ".join(f"{name.replace('_', ' ')} {_shown(name, text)}" for name, text in changes.items())
    return replace(cluster.each(change), name=f"{cluster.name}, {words}")


def _factor(cluster: Cluster, name: str, text: str) -> float:
    amount = _amount(text)
    assert amount is not None, "what_if_problems refuses it"
    number, is_factor = amount
    unit, figure = _FIGURES[name]
    return number if is_factor else number * unit.scale / figure(cluster)


def _shown(name: str, text: str) -> str:
    number, is_factor = _amount(text) or (1.0, True)
    return f"x {number:g}" if is_factor else f"{number:g} {_FIGURES[name][0].name}"


def _with_speed(cluster: Cluster, peak: float, memory_bandwidth: float) -> Cluster:
    """The cluster with other peaks and memory bandwidth of its devices; measured pieces are those of another device."""
    if peak == memory_bandwidth == 1:
        return cluster
    device = cluster.device
    device = replace(
        device,
        # Its measured errors are not those of the device that it is made from.
        name=f"{device.name}, changed",
        peak_flops_per_s={key: value * peak for key, value in device.peak_flops_per_s.items()},
        # A product of the same seconds at the peak reaches the same fraction of it.
        matmul_curve=tuple((flops * peak, fraction) for flops, fraction in device.matmul_curve),
        matmul_curves={
            key: tuple((flops * peak, fraction) for flops, fraction in curve)
            for key, curve in device.matmul_curves.items()
        },
        memory_bytes_per_s=device.memory_bytes_per_s * memory_bandwidth,
    )
    return replace(cluster, device=device, pieces=(), update=None)


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with the memory of its devices multiplied."""
    device = replace(cluster.device, memory_bytes=cluster.device.memory_bytes * factor)
    return replace(cluster, name=f"{cluster.name}, memory x {factor:g}", device=device)


def with_bandwidth(cluster: Cluster, *, intra: float = 1.0, inter: float = 1.0) -> Cluster:
    """The cluster with its bandwidths multiplied: inside a node, between nodes."""

    def times(link: Link, factor: float) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    factors = {"inside nodes": intra, "between nodes": inter}
    changed = [f"bandwidth {where} x {factor:g}" for where, factor in factors.items() if factor != 1]
    return replace(
        cluster,
        name=", ".join([cluster.name, *changed]),
        intra=times(cluster.intra, intra),
        inter=times(cluster.inter, inter),
        bus_curves={
            kind: tuple((nodes, rate * (intra if nodes <= 1 else inter)) for nodes, rate in curve)
            for kind, curve in cluster.bus_curves.items()
        },
        collective_curves={
            kind: tuple(
                replace(curve, points=tuple((size, rate * intra) for size, rate in curve.points)) for curve in curves
            )
            for kind, curves in cluster.collective_curves.items()
        },
    )
