"""A cluster -> the text of its file: what ``load_cluster`` reads, with comments on where numbers come from."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from pipeloom.cost.hardware import Cluster, CollectiveCurve, Device, Link
from pipeloom.cost.measured import MeasuredPieces
from pipeloom.cost.mixed import MixedCluster

DIGITS = 6
"""Significant digits of a number; a measurement has fewer."""
WIDTH = 118
"""Columns of a comment."""
UNBREAKABLE = "\N{NO-BREAK SPACE}"
"""In a comment: a space at which no line ends."""

_Line = tuple[str, Any]


def cluster_to_toml(cluster: Cluster, notes: Mapping[str, Sequence[str]] | None = None) -> str:
    """The cluster as TOML, units as ``pipeloom.catalog`` reads them.

    Args:
        cluster: numbers are written with six significant digits.
        notes: lines of comment by what they stand above: ``""`` for the head of the file, a table such as
            ``intra``, a key such as ``device.kernel_us``, or ``collectives.2`` for the curves of two ranks.
    """
    comments = dict(notes or {})
    head, parts = _comment(comments.pop("", ())), list[list[str]]()
    if isinstance(cluster, MixedCluster):
        parts.append([*head, *_lines("", [("name", cluster.name)], comments)])
        for group in cluster.groups:
            first, *rest = _parts(group.cluster, [("num_nodes", group.num_nodes)], comments, "groups.")
            parts += [["[[groups]]", *first], *rest]
        for one in cluster.links:
            lines = [("between", list(one.between)), *_link(one.link)]
            parts.append(["[[links]]", *_lines("", lines, comments)])
    else:
        first, *rest = _parts(cluster, [], comments, "")
        parts += [[*head, *first], *rest]
    assert not comments, f"notes for what is not in the file: {', '.join(comments)}"
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _parts(
    cluster: Cluster, more: Sequence[_Line], comments: dict[str, Sequence[str]], prefix: str
) -> Iterator[list[str]]:
    """A cluster of one kind: its own keys, then its tables, whose names begin with ``prefix``."""
    top: list[_Line] = [("name", cluster.name), *more, ("devices_per_node", cluster.devices_per_node)]
    if cluster.adapters_per_node:
        top.append(("adapters_per_node", cluster.adapters_per_node))
    if cluster.cores_per_node:
        top.append(("cores_per_node", cluster.cores_per_node))
    if cluster.price_per_device_hour is not None:
        top.append(("price_per_device_hour", cluster.price_per_device_hour))
    yield _lines("", top, comments)
    yield _table(f"{prefix}device", _device(cluster.device), comments)
    links = {"intra": cluster.intra, "inter": cluster.inter}
    if cluster.host is not None:
        links["host"] = cluster.host
    for name, link in links.items():
        yield _table(f"{prefix}{name}", _link(link), comments)
    if cluster.bus_curves:
        nodes = next(iter(cluster.bus_curves.values()))
        yield _table(f"{prefix}bus", [("nodes", [x for x, _ in nodes]), *_rates(cluster.bus_curves.items())], comments)
    for (ranks, sizes), curves in _by_ranks(cluster).items():
        lines = [
            ("ranks", ranks),
            ("message_bytes", [int(size) for size in sizes]),
            *_rates((k, c.points) for k, c in curves),
        ]
        note = _comment(comments.pop(f"{prefix}collectives.{ranks}", ()))
        yield [*note, f"[[{prefix}collectives]]", *_lines("", lines, comments)]
    if cluster.update is not None:
        update = cluster.update
        seconds = [("fixed_us", update.fixed_s / 1e-6), ("parameter_ns", update.parameter_s / 1e-9)]
        yield _table(f"{prefix}update", [("precision", update.precision), *seconds], comments)
    for one in cluster.pieces:
        yield [
            *_comment(comments.pop(f"{prefix}pieces", ())),
            f"[[{prefix}pieces]]",
            *_lines("", _pieces(one), comments),
        ]


def _device(device: Device) -> list[_Line]:
    lines: list[_Line] = [
        ("name", device.name),
        ("peak_tflop_per_s", {key: value / 1e12 for key, value in device.peak_flops_per_s.items()}),
        ("memory_gb", device.memory_bytes / 1e9),
        ("memory_gb_per_s", device.memory_bytes_per_s / 1e9),
        ("launch_us", device.launch_s / 1e-6),
        ("kernel_us", device.kernel_s / 1e-6),
        ("matmul_gflop", [flops / 1e9 for flops, _ in device.matmul_curve]),
        ("matmul_fraction", [fraction for _, fraction in device.matmul_curve]),
    ]
    if device.num_multiprocessors:
        lines.append(("num_multiprocessors", device.num_multiprocessors))
    if device.matmul_curves:
        own = {key: [fraction for _, fraction in curve] for key, curve in device.matmul_curves.items()}
        lines.append(("matmul_fraction_of", own))
    return lines


_PIECE_SIZES = ("hidden", "heads", "kv_heads", "ffn", "mlp", "vocab")
_PIECE_AXES = ("seq", "tp", "sequence_parallel", "micro_batch", "recompute", "precision")


def _pieces(found: MeasuredPieces) -> list[_Line]:
    seconds = {"embedding": found.embedding, "layer": found.layer, "head": found.head, "stage": found.stage}
    run = found.run
    lines: list[_Line] = [(name, getattr(run.shape, name)) for name in _PIECE_SIZES]
    lines += [(name, getattr(run, name)) for name in _PIECE_AXES]
    lines += [(f"{name}_us", [value / 1e-6 for value in both]) for name, both in seconds.items()]
    return [*lines, ("message_us", found.message_s / 1e-6)] if found.message_s else lines


def _link(link: Link) -> list[_Line]:
    return [("latency_us", link.latency_s / 1e-6), ("gb_per_s", link.bytes_per_s / 1e9)]


def _rates(curves: Iterable[tuple[str, Sequence[tuple[float, float]]]]) -> list[_Line]:
    return [(f"{kind}_gb_per_s", [rate / 1e9 for _, rate in curve]) for kind, curve in curves]


def _by_ranks(cluster: Cluster) -> dict[tuple[int, tuple[float, ...]], list[tuple[str, CollectiveCurve]]]:
    """The curves that share a table: those of the same ranks and sizes."""
    found: dict[tuple[int, tuple[float, ...]], list[tuple[str, CollectiveCurve]]] = {}
    for kind, curves in cluster.collective_curves.items():
        for curve in curves:
            found.setdefault((curve.ranks, tuple(size for size, _ in curve.points)), []).append((kind, curve))
    return found


def _table(name: str, lines: Sequence[_Line], notes: dict[str, Sequence[str]]) -> list[str]:
    return [f"[{name}]", *_comment(notes.pop(name, ())), *_lines(f"{name}.", lines, notes)]


def _lines(prefix: str, lines: Sequence[_Line], notes: dict[str, Sequence[str]]) -> list[str]:
    """Lines of a table, each below its comment."""
    return [
        line
        for key, value in lines
        for line in (*_comment(notes.pop(f"{prefix}{key}", ())), f"{key} = {_value(value)}")
    ]


def _comment(lines: Sequence[str]) -> list[str]:
    parts = [part for line in lines for part in wrap(line, WIDTH, initial_indent="# ", subsequent_indent="# ")]
    return [part.replace(UNBREAKABLE, " ") for part in parts]


def _value(value: Any) -> str:
    """A TOML value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML basic string; other letters stay readable.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, int) or value == int(value):
        # 1 and 1.0 have different types in TOML; large whole numbers are bytes and FLOP/s, which need no point.
        return str(int(value)) if isinstance(value, int) or abs(value) >= 1e6 else f"{value:.1f}"
    return f"{value:.{DIGITS}g}"
