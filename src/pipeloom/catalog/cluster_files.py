"""Reading of cluster files, with all problems reported together, and writing, with comments on the sources of numbers.

Files have TFLOP/s, GB, GB/s and microseconds; a ``Cluster`` has FLOP/s, bytes, bytes/s and seconds.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from textwrap import wrap
from typing import Any, cast, get_args

from pipeloom.calls import checked
from pipeloom.catalog.bases import read_based
from pipeloom.catalog.block_keys import block_keys, read_blocks
from pipeloom.catalog.expert_keys import expert_keys, read_experts
from pipeloom.catalog.general_device import KERNEL_US, LAUNCH_US, general_curve
from pipeloom.catalog.reading import LEAST_US, Reader, names, read_toml
from pipeloom.config.paths import expand_home, names_file
from pipeloom.cost.hardware import (
    Cluster,
    Collective,
    CollectiveCurve,
    Curve,
    Device,
    Link,
    MeasuredPieces,
    MeasuredUpdate,
    Vendor,
)
from pipeloom.cost.mixed import GroupLink, MixedCluster, NodeGroup, mixed_cluster
from pipeloom.cost.units import GB, GB_PER_S, GFLOP, TFLOP_PER_S
from pipeloom.errors import ConfigError, UserError
from pipeloom.registry import Registry
from pipeloom.terminal.words import UNBREAKABLE, same_name
from pipeloom.workload.dtypes import Precision, Products
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelShape
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.run import Run

_MICRO, _NANO = 1e-6, 1e-9

# For each table of a file: key -> (attribute, factor from the file's unit to the SI unit).
_MEMORY = {"memory_gb": ("memory_bytes", GB), "memory_gb_per_s": ("memory_bytes_per_s", GB_PER_S)}
_IN_SI = {key: (name, unit.scale) for key, (name, unit) in _MEMORY.items()}
_DEVICE = {**_IN_SI, "launch_us": ("launch_s", _MICRO), "kernel_us": ("kernel_s", _MICRO)}
_LINK = {"latency_us": ("latency_s", _MICRO), "gb_per_s": ("bytes_per_s", GB_PER_S.scale)}
_LATENCIES = {"launch_us", "kernel_us", "latency_us"}
_UPDATE = {"fixed_us": ("fixed_s", _MICRO), "parameter_ns": ("parameter_s", _NANO)}
_COUNTS = ("devices_per_host", "adapters_per_node", "cores_per_node")
_USUAL = {**dict.fromkeys(_COUNTS, 0), "partial_group_share": 1.0}
"""Numbers of a cluster that files omit if they have these values."""
_PRECISIONS = (*get_args(Precision), *get_args(Products))
"""Keys of the tables that have a value for each precision; any other is reported as unknown."""
_PIECE_SIZES = ("hidden", "heads", "kv_heads", "ffn", "vocab")
_PIECE_AXES = ("seq", "tp", "sequence_parallel", "micro_batch", "recompute", "precision")
_PIECES = ("embedding", "layer", "head", "stage")
"""Measured pieces, each with a forward and a backward."""

CLUSTERS: Registry[Cluster] = Registry("cluster", "pipeloom.clusters", Cluster)
"""Clusters by name: those of ``pipeloom/catalog/clusters``, read on demand, and those of plug-ins."""


@checked
def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by name (case and ``_`` for ``-`` do not matter) or from a file.

    Examples:
        >>> from pipeloom import load_cluster
        >>> load_cluster("dgx-a100").devices_per_node
        8

    Raises:
        UserError: there is no such name or file, or the file is wrong; has all problems.
    """
    if not names_file(name_or_path):
        name = name_or_path if name_or_path in CLUSTERS else same_name(name_or_path, CLUSTERS)
        if name is not None:
            return CLUSTERS[name]
        if name_or_path in CLUSTERS.broken:
            raise UserError(CLUSTERS.broken[name_or_path])
    return _read_cluster(name_or_path)


def _read_cluster(name_or_path: str) -> Cluster:
    table, source = read_based("clusters", name_or_path, CLUSTERS)
    reader = Reader(table, source)
    if "groups" in table:
        return _mixed(reader, Path(source).parent)
    cluster = _cluster(reader)
    reader.check({"source"})
    return cluster


for _name in names("clusters"):
    # On demand: a command needs one cluster, and a broken file must not affect the others.
    CLUSTERS.add_later(_name, partial(_read_cluster, _name))


def _cluster(reader: Reader) -> Cluster:
    cluster = _read_fields(reader)
    if cluster.devices_per_node % cluster.host_size:
        reader.complain(
            f"devices_per_host must divide devices_per_node {cluster.devices_per_node}, since a node has whole hosts, "
            f"found {cluster.devices_per_host}"
        )
    return cluster


def _read_fields(reader: Reader) -> Cluster:
    return Cluster(
        name=reader.text("name"),
        device=_device(reader.table("device")),
        devices_per_node=reader.integer("devices_per_node"),
        intra=_link(reader.table("intra")),
        inter=_link(reader.table("inter")),
        bus_curves=_bus(bus := reader.table("bus", is_optional=True)),
        bus_message_bytes=bus.number("message_bytes", 0.0) if bus.names() else 0.0,
        collective_curves=_collectives(reader.tables("collectives")),
        # 0 is an unknown price, since a default must be a number here.
        price_per_device_hour=reader.number("price_per_device_hour", 0.0) or None,
        price_source=reader.text("price_source", ""),
        **{name: int(reader.number(name, 0)) for name in _COUNTS},
        partial_group_share=reader.fraction("partial_group_share", 1.0),
        pieces=tuple(map(_pieces, reader.tables("pieces"))),
        update=_update(reader.table("update", is_optional=True)),
        host=_link(reader.table("host")) if "host" in reader.names() else None,
    )


def _mixed(reader: Reader, folder: Path) -> Cluster:
    """A cluster of several groups of nodes; paths of a group's file are relative to ``folder``."""
    name, groups = reader.text("name"), [_group(inner, folder) for inner in reader.tables("groups")]
    known = [group.name for group in groups]
    if not known:
        reader.complain("groups must be at least one table")
    for twice in {name for name in known if known.count(name) > 1}:
        reader.complain(f"every group must have a name of its own, found {twice} {known.count(twice)} times")
    links = [_group_link(inner, known) for inner in reader.tables("links")]
    for one, other in combinations(links, 2):
        if set(one.between) == set(other.between):
            reader.complain(f"two links are between {' and '.join(one.between)}; expected one")
    reader.check({"source"})
    return mixed_cluster(name, groups, links)


def _group(reader: Reader, folder: Path) -> NodeGroup:
    name, num_nodes = reader.text("name"), reader.integer("num_nodes")
    reader.entitle(f"group {name}")
    if "cluster" not in reader.names():
        return NodeGroup(cluster=_cluster(reader), num_nodes=num_nodes)
    cluster = _alike(reader, reader.text("cluster"), folder)
    if "price_per_device_hour" in reader.names():  # the source of another price is none of this one
        price = reader.number("price_per_device_hour") or None
        cluster = replace(cluster, price_per_device_hour=price, price_source=reader.text("price_source", ""))
    return NodeGroup(cluster=replace(cluster, name=name), num_nodes=num_nodes)


def _alike(reader: Reader, named: str, folder: Path) -> Cluster:
    """The cluster that a group refers to, with nodes of one kind; if it is wrong, adds a problem."""
    try:
        source = str(folder / expand_home(Path(named))) if names_file(named) else named
        is_mixed = names_file(source) and "groups" in read_toml("clusters", source)[0]  # which may name itself
        cluster = None if is_mixed else load_cluster(source)
        if cluster is not None and not isinstance(cluster, MixedCluster):
            return cluster
        reader.complain(f"cluster must have nodes of one kind, found {named}, which has groups")
    except ConfigError as error:
        for problem in error.problems:
            reader.complain(f"{named}: {problem}")
    except UserError as error:
        reader.complain(str(error))
    # Any cluster, so that reading continues and finds further problems; the result is never used.
    return load_cluster(names("clusters")[0])


def _group_link(reader: Reader, known: Sequence[str]) -> GroupLink:
    between = reader.texts("between")
    reader.entitle(f"link between {' and '.join(between)}")
    if len(set(between)) != 2 or len(between) != 2 or not set(between) <= set(known):
        reader.complain(f"between must be two of the groups {', '.join(known)}, found {list(between)}")
        # Two names that no group has, so that reading continues.
        between = ("", "")
    return GroupLink(between=(between[0], between[1]), link=_link(reader))


def _device(reader: Reader) -> Device:
    peaks = reader.table("peak_tflop_per_s")
    own = reader.table("matmul_fraction_of", is_optional=True)
    by_precision = {key: peaks.quantity(key, TFLOP_PER_S) for key in peaks.names() if key in _PRECISIONS}
    is_measured = {"matmul_gflop", "matmul_fraction", "matmul_fraction_of"} & set(reader.names())
    return Device(
        name=reader.text("name"),
        peak_flops_per_s=by_precision,
        matmul_curve=reader.curve("matmul_gflop", "matmul_fraction", x_unit=GFLOP)
        if is_measured
        else general_curve(by_precision),
        **{name: reader.quantity(key, unit) for key, (name, unit) in _MEMORY.items()},
        launch_s=reader.latency("launch_us", LAUNCH_US),
        kernel_s=reader.latency("kernel_us", KERNEL_US),
        matmul_curves={
            key: reader.curve("matmul_gflop", key, x_unit=GFLOP, within=own)
            for key in own.names()
            if key in _PRECISIONS
        },
        num_multiprocessors=int(reader.number("num_multiprocessors", 0)),
        vendor=cast("Vendor", reader.text("vendor", "nvidia", among=get_args(Vendor))),
        early_kernels=reader.fraction("early_kernels", 1.0),
    )


def _link(reader: Reader) -> Link:
    return Link(
        latency_s=reader.latency("latency_us"),
        bytes_per_s=reader.quantity("gb_per_s", GB_PER_S),
    )


def _bus(reader: Reader) -> dict[Collective, Curve]:
    if not reader.names():
        return {}
    return {kind: reader.curve("nodes", _rate(kind), y_unit=GB_PER_S) for kind in get_args(Collective)}


def _collectives(readers: Sequence[Reader]) -> dict[Collective, tuple[CollectiveCurve, ...]]:
    curves: dict[Collective, tuple[CollectiveCurve, ...]] = {}
    for reader in readers:
        ranks = reader.integer("ranks")
        for kind in get_args(Collective):
            if _rate(kind) in reader.names():
                points = reader.curve("message_bytes", _rate(kind), y_unit=GB_PER_S)
                curves[kind] = (*curves.get(kind, ()), CollectiveCurve(ranks=ranks, points=points))
    return curves


def _rate(kind: str) -> str:
    return f"{kind}_gb_per_s"


def _pieces(reader: Reader) -> MeasuredPieces:
    sizes: dict[str, Any] = {name: reader.integer(name) for name in _PIECE_SIZES}
    if "head_size" in reader.names():
        sizes["own_head_size"] = reader.integer("head_size")
    family = reader.text("family", among=MODELS)
    run = Run(
        shape=ModelShape(
            layers=1,
            family=family,
            tied=False,
            attn_softcap=MODELS[family].attn_softcap,
            logit_softcap=MODELS[family].logit_softcap,
            experts=read_experts(reader, sizes["ffn"]),
            blocks=read_blocks(reader),
            **sizes,
        ),
        seq=reader.integer("seq"),
        micro_batch=reader.integer("micro_batch"),
        tp=reader.integer("tp", 1),
        sequence_parallel=reader.flag("sequence_parallel", default=False),
        recompute=cast("Recompute", reader.text("recompute", "none", among=get_args(Recompute))),
        precision=_precision(reader),
    )
    both = {name: reader.pair(f"{name}_us", scale=_MICRO) for name in _PIECES}
    return MeasuredPieces(run=run.of_measured_pieces, **both, message_s=reader.number("message_us", 0.0, scale=_MICRO))


def _update(reader: Reader) -> MeasuredUpdate | None:
    if not reader.names():
        return None
    return MeasuredUpdate(**reader.numbers_of(_UPDATE), precision=_precision(reader))


def _precision(reader: Reader) -> Precision:
    return cast("Precision", reader.text("precision", among=get_args(Precision)))


DIGITS = 6
"""Significant digits of a written number, more than a measurement has."""
WIDTH = 118
"""Characters in a line of a comment."""

Notes = dict[str, Sequence[str]]
_Lines = dict[str, Any]


def cluster_to_toml(cluster: Cluster, notes: Mapping[str, Sequence[str]] | None = None) -> str:
    """The cluster as TOML, which ``load_cluster`` reads.

    Args:
        cluster: its numbers are rounded to six significant digits.
        notes: comments by place: above ``""``, the head of the file; a table such as ``intra``; a key such as
            ``device.kernel_us``; or ``collectives.2``, the curves of two ranks.
    """
    comments = dict(notes or {})
    head, parts = _comment(comments.pop("", ())), list[list[str]]()
    if isinstance(cluster, MixedCluster):
        parts.append([*head, *_lines("", {"name": cluster.name}, comments)])
        for group in cluster.groups:
            first, *rest = _parts(group.cluster, {"num_nodes": group.num_nodes}, comments, "groups.")
            parts += [["[[groups]]", *first], *rest]
        for one in cluster.links:
            lines = {"between": list(one.between), **_in_units(one.link, _LINK)}
            parts.append(["[[links]]", *_lines("", lines, comments)])
    else:
        first, *rest = _parts(cluster, {}, comments, "")
        parts += [[*head, *first], *rest]
    assert not comments, f"notes for what is not in the file: {', '.join(comments)}"
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _parts(cluster: Cluster, more: _Lines, comments: Notes, prefix: str) -> Iterator[list[str]]:
    """Blocks of lines of a cluster with nodes of one kind: its keys, then its tables, whose names get ``prefix``."""
    top = {"name": cluster.name, **more, "devices_per_node": cluster.devices_per_node}
    top |= {name: number for name, usual in _USUAL.items() if (number := getattr(cluster, name)) != usual}
    if cluster.price_per_device_hour is not None:
        top["price_per_device_hour"] = cluster.price_per_device_hour
    if cluster.price_source:
        top["price_source"] = cluster.price_source
    yield _lines("", top, comments)
    tables: dict[str, _Lines] = {"device": _device_lines(cluster.device)}
    for name, link in (("intra", cluster.intra), ("inter", cluster.inter), ("host", cluster.host)):
        if link is not None:
            tables[name] = _in_units(link, _LINK)
    if cluster.bus_curves:
        nodes = next(iter(cluster.bus_curves.values()))
        size = {"message_bytes": cluster.bus_message_bytes} if cluster.bus_message_bytes else {}
        tables["bus"] = {"nodes": [x for x, _ in nodes], **size, **_rates(cluster.bus_curves.items())}
    for name, lines in tables.items():
        yield _table(f"{prefix}{name}", lines, comments)
    for (ranks, sizes), curves in _by_ranks(cluster).items():
        note = _comment(comments.pop(f"{prefix}collectives.{ranks}", ()))
        lines = {"ranks": ranks, "message_bytes": list(map(int, sizes)), **_rates(curves)}
        yield [*note, f"[[{prefix}collectives]]", *_lines("", lines, comments)]
    if cluster.update is not None:
        lines = {"precision": cluster.update.precision, **_in_units(cluster.update, _UPDATE)}
        yield _table(f"{prefix}update", lines, comments)
    for one in cluster.pieces:
        note = _comment(comments.pop(f"{prefix}pieces", ()))
        yield [*note, f"[[{prefix}pieces]]", *_lines("", _piece_lines(one), comments)]


def _in_units(value: object, units: Mapping[str, tuple[str, float]]) -> _Lines:
    """The inverse of ``Reader.numbers_of`` and ``Reader.latency``: a fit may find a shorter one than that takes."""
    found = {key: getattr(value, name) / scale for key, (name, scale) in units.items()}
    return found | {key: 0.0 for key in _LATENCIES & found.keys() if found[key] < LEAST_US}


def _device_lines(device: Device) -> _Lines:
    lines: _Lines = {
        "name": device.name,
        "peak_tflop_per_s": {key: value / TFLOP_PER_S.scale for key, value in device.peak_flops_per_s.items()},
        **_in_units(device, _DEVICE),
        "matmul_gflop": [flops / GFLOP.scale for flops, _ in device.matmul_curve],
        "matmul_fraction": [fraction for _, fraction in device.matmul_curve],
    }
    if device.num_multiprocessors:
        lines["num_multiprocessors"] = device.num_multiprocessors
    if device.vendor != "nvidia":
        lines["vendor"] = device.vendor
    if device.early_kernels != 1:
        lines["early_kernels"] = device.early_kernels
    if device.matmul_curves:
        curves = device.matmul_curves.items()
        lines["matmul_fraction_of"] = {key: [fraction for _, fraction in curve] for key, curve in curves}
    return lines


def _piece_lines(found: MeasuredPieces) -> _Lines:
    shape = found.run.shape
    lines: _Lines = {name: getattr(shape, name) for name in (*_PIECE_SIZES, "family")}
    lines |= {} if shape.own_head_size is None else {"head_size": shape.own_head_size}
    lines |= expert_keys(shape.experts) | block_keys(shape.blocks)
    lines |= {name: getattr(found.run, name) for name in _PIECE_AXES}
    lines |= {f"{name}_us": [value / _MICRO for value in getattr(found, name)] for name in _PIECES}
    return lines | ({"message_us": found.message_s / _MICRO} if found.message_s else {})


def _rates(curves: Iterable[tuple[str, Curve]]) -> _Lines:
    return {_rate(kind): [rate / GB_PER_S.scale for _, rate in curve] for kind, curve in curves}


def _by_ranks(cluster: Cluster) -> dict[tuple[int, tuple[float, ...]], list[tuple[str, Curve]]]:
    """(ranks, message sizes) -> the curves of one table: collective, points."""
    found: dict[tuple[int, tuple[float, ...]], list[tuple[str, Curve]]] = {}
    for kind, curves in cluster.collective_curves.items():
        for curve in curves:
            sizes = tuple(size for size, _ in curve.points)
            found.setdefault((curve.ranks, sizes), []).append((kind, curve.points))
    return found


def _table(name: str, lines: _Lines, comments: Notes) -> list[str]:
    return [f"[{name}]", *_comment(comments.pop(name, ())), *_lines(f"{name}.", lines, comments)]


def _lines(prefix: str, lines: _Lines, comments: Notes) -> list[str]:
    """Lines of a table, each below its comment."""
    return [
        line
        for key, value in lines.items()
        for line in (*_comment(comments.pop(f"{prefix}{key}", ())), f"{key} = {_value(value)}")
    ]


def _comment(lines: Sequence[str]) -> list[str]:
    parts = [part for line in lines for part in wrap(line, WIDTH, initial_indent="# ", subsequent_indent="# ")]
    return [part.replace(UNBREAKABLE, " ") for part in parts]


def _value(value: Any) -> str:
    """A TOML value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML basic string, also with letters that are not ASCII.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, int) or value == int(value):
        # In TOML 1 and 1.0 have different types; large whole numbers, such as bytes, are written without a point.
        return str(int(value)) if isinstance(value, int) or abs(value) >= 1e6 else f"{value:.1f}"
    return f"{value:.{DIGITS}g}"
