"""Models, clusters and programs as data: found by name in this folder or by path, each constant with its source.

Units are converted here: files have TFLOP/s, GB, GB/s and microseconds, values hold FLOP/s, bytes, bytes/s and seconds.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, cast, get_args

from pipeloom.catalog.hugging_face import read_config_json
from pipeloom.catalog.reading import ModelFile, Reader, find_name, names, read_toml
from pipeloom.config.paths import expand_home, names_file
from pipeloom.cost.hardware import Cluster, Collective, CollectiveCurve, Curve, Device, Link
from pipeloom.cost.measured import MeasuredPieces, MeasuredUpdate
from pipeloom.cost.mixed import GroupLink, MixedCluster, NodeGroup, mixed_cluster
from pipeloom.cost.software import FRACTIONS, SHARES, Division, Efficiency, Software
from pipeloom.errors import ConfigError, UserError
from pipeloom.families import FAMILIES
from pipeloom.registry import Registry
from pipeloom.terminal.words import same_name
from pipeloom.workload.dtypes import Precision
from pipeloom.workload.layout import Recompute, Shard, Way
from pipeloom.workload.model import MOST_LAYERS, ModelShape, head_problems
from pipeloom.workload.model_families import mlp_names
from pipeloom.workload.run import Run

__all__ = ["CLUSTERS", "find_name", "load_cluster", "load_model", "load_software", "names", "read_model", "source_of"]

GIGA, MICRO = 1e9, 1e-6


CLUSTERS: Registry[Cluster] = Registry("cluster", "pipeloom.clusters", Cluster)
"""Clusters by name: those of ``pipeloom/catalog/clusters``, each read when it is looked up, and those of others."""


def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by name, whatever its case and ``_`` for ``-``, or from a file.

    Raises:
        UserError: there is no such name or file, or something in the file is wrong; all problems together.
    """
    if not names_file(name_or_path):
        name = name_or_path if name_or_path in CLUSTERS else same_name(name_or_path, CLUSTERS)
        if name is not None:
            return CLUSTERS[name]
        if name_or_path in CLUSTERS.broken:
            raise UserError(CLUSTERS.broken[name_or_path])
    return _read_cluster(name_or_path)


def _read_cluster(name_or_path: str) -> Cluster:
    table, source = read_toml("clusters", name_or_path, tuple(CLUSTERS))
    reader = Reader(table, source)
    if "groups" in table:
        return _mixed(reader, Path(source).parent)
    cluster = _cluster(reader)
    reader.check(lambda: {"source"})
    return cluster


for _name in names("clusters"):
    # Read when it is looked up: a command needs one of them, and a broken file must not stop the others.
    CLUSTERS.add_later(_name, partial(_read_cluster, _name))


def _cluster(reader: Reader) -> Cluster:
    return Cluster(
        name=reader.text("name"),
        device=_device(reader.table("device")),
        devices_per_node=reader.integer("devices_per_node"),
        adapters_per_node=int(reader.number("adapters_per_node", 0)),
        intra=_link(reader.table("intra")),
        inter=_link(reader.table("inter")),
        bus_curves=_bus(reader.table("bus", is_optional=True)),
        collective_curves=_collectives(reader.tables("collectives")),
        # 0 stands for an unknown price, as a default has to be a number here.
        price_per_device_hour=reader.number("price_per_device_hour", 0.0) or None,
        cores_per_node=int(reader.number("cores_per_node", 0)),
        pieces=tuple(_pieces(one) for one in reader.tables("pieces")),
        update=_update(reader.table("update", is_optional=True)),
        host=_link(reader.table("host")) if "host" in reader.names() else None,
    )


def _mixed(reader: Reader, folder: Path) -> Cluster:
    """A cluster of several groups of nodes; files that a group names are in ``folder``."""
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
    reader.check(lambda: {"source"})
    return mixed_cluster(name, groups, links)


def _group(reader: Reader, folder: Path) -> NodeGroup:
    name, num_nodes = reader.text("name"), reader.integer("num_nodes")
    reader.entitle(f"group {name}")
    if "cluster" not in reader.names():
        return NodeGroup(cluster=_cluster(reader), num_nodes=num_nodes)
    cluster = _alike(reader, reader.text("cluster"), folder)
    price = reader.number("price_per_device_hour", cluster.price_per_device_hour or 0.0) or None
    return NodeGroup(cluster=replace(cluster, name=name, price_per_device_hour=price), num_nodes=num_nodes)


def _alike(reader: Reader, named: str, folder: Path) -> Cluster:
    """The cluster of one kind that a group names; one of the catalog, and a problem noted, if it is wrong."""
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
    # Any cluster of one kind, so that reading goes on and finds the other problems; the result is never used.
    return load_cluster(names("clusters")[0])


def _group_link(reader: Reader, known: Sequence[str]) -> GroupLink:
    between = reader.texts("between")
    reader.entitle(f"link between {' and '.join(between)}")
    if len(set(between)) != 2 or len(between) != 2 or not set(between) <= set(known):
        reader.complain(f"between must be two of the groups {', '.join(known)}, found {list(between)}")
        # Two names that no group has, so that the rest of the file is still read.
        between = ("", "")
    return GroupLink(between=(between[0], between[1]), link=_link(reader))


def _device(reader: Reader) -> Device:
    peaks = reader.table("peak_tflop_per_s")
    own = reader.table("matmul_fraction_of", is_optional=True)
    return Device(
        name=reader.text("name"),
        peak_flops_per_s={key: peaks.number(key, scale=1e12) for key in peaks.names()},
        matmul_curve=reader.curve("matmul_gflop", "matmul_fraction", x_scale=GIGA, y_most=1.0),
        kernel_s=reader.number("kernel_us", scale=MICRO),
        memory_bytes=reader.number("memory_gb", scale=GIGA),
        memory_bytes_per_s=reader.number("memory_gb_per_s", scale=GIGA),
        launch_s=reader.number("launch_us", scale=MICRO),
        matmul_curves={
            key: reader.curve("matmul_gflop", key, x_scale=GIGA, y_most=1.0, within=own) for key in own.names()
        },
        num_multiprocessors=int(reader.number("num_multiprocessors", 0)),
    )


def _link(reader: Reader) -> Link:
    return Link(
        latency_s=reader.number("latency_us", scale=MICRO),
        bytes_per_s=reader.number("gb_per_s", scale=GIGA, least=1e-6),
    )


def _bus(reader: Reader) -> dict[Collective, Curve]:
    if not reader.names():
        return {}
    return {kind: reader.curve("nodes", f"{kind}_gb_per_s", y_scale=GIGA) for kind in get_args(Collective)}


def _collectives(readers: Sequence[Reader]) -> dict[Collective, tuple[CollectiveCurve, ...]]:
    curves: dict[Collective, list[CollectiveCurve]] = {}
    for reader in readers:
        ranks = reader.integer("ranks")
        for kind in get_args(Collective):
            key = f"{kind}_gb_per_s"
            if key in reader.names():
                points = reader.curve("message_bytes", key, y_scale=GIGA)
                curves.setdefault(kind, []).append(CollectiveCurve(ranks=ranks, points=points))
    return {kind: tuple(found) for kind, found in curves.items()}


def _pieces(reader: Reader) -> MeasuredPieces:
    run = Run(
        shape=ModelShape(
            layers=1,
            hidden=reader.integer("hidden"),
            heads=reader.integer("heads"),
            kv_heads=reader.integer("kv_heads"),
            ffn=reader.integer("ffn"),
            mlp=reader.text("mlp", among=mlp_names()),
            vocab=reader.integer("vocab"),
            tied=False,
        ),
        seq=reader.integer("seq"),
        micro_batch=reader.integer("micro_batch"),
        tp=reader.integer("tp", 1),
        sequence_parallel=reader.flag("sequence_parallel", default=False),
        recompute=cast("Recompute", reader.text("recompute", "none", among=get_args(Recompute))),
        precision=cast("Precision", reader.text("precision", among=get_args(Precision))),
    )
    both = {name: reader.pair(f"{name}_us", scale=MICRO) for name in ("embedding", "layer", "head", "stage")}
    return MeasuredPieces(run=run.of_measured_pieces, **both, message_s=reader.number("message_us", 0.0, scale=MICRO))


def _update(reader: Reader) -> MeasuredUpdate | None:
    if not reader.names():
        return None
    return MeasuredUpdate(
        fixed_s=reader.number("fixed_us", scale=MICRO),
        parameter_s=reader.number("parameter_ns", scale=1e-9),
        precision=cast("Precision", reader.text("precision", among=get_args(Precision))),
    )


def load_model(name_or_path: str, seq_len: int | None = None) -> ModelShape:
    """The sizes of ``read_model``."""
    return read_model(name_or_path, seq_len).shape


def read_model(name_or_path: str, seq_len: int | None = None) -> ModelFile:
    """A model by name (``pipeloom/catalog/models``), from a TOML file, or from a Hugging Face ``config.json``.

    Args:
        name_or_path: its name or its file.
        seq_len: tokens of a sequence, on which the function of some models depends; ``None`` to leave that open.

    Raises:
        UserError: there is no such file, or something in it is wrong; all problems together.
    """
    if Path(name_or_path).suffix == ".json":
        return read_config_json(Path(name_or_path), seq_len)
    table, source = read_toml("models", name_or_path)
    reader = Reader(table, source)
    mlp = reader.text("mlp", among=mlp_names())
    shape = ModelShape(
        name=reader.text("name"),
        layers=reader.integer("layers", most=MOST_LAYERS),
        hidden=reader.integer("hidden"),
        heads=reader.integer("heads"),
        kv_heads=reader.integer("kv_heads", table.get("heads")),
        ffn=reader.integer("ffn"),
        mlp=mlp,
        vocab=reader.integer("vocab"),
        tied=reader.flag("tied"),
    )
    if not reader.has_problems:
        heads = (shape.hidden, shape.heads, shape.kv_heads)
        for problem in head_problems(*heads, is_rotary=shape.family.is_rotary, names=("hidden", "heads", "kv_heads")):
            reader.complain(problem)
    norm_eps = reader.positive("norm_eps") if "norm_eps" in table else None
    rope_theta = reader.positive("rope_theta") if "rope_theta" in table and shape.family.is_rotary else None
    reader.check(lambda: {"source"})
    return ModelFile(shape, norm_eps, rope_theta)


def load_software(name_or_path: str) -> Software:
    """A training program by name (``pipeloom/catalog/software``) or from a file.

    Raises:
        UserError: there is no such file, or something in it is wrong; all problems together.
    """
    table, source = read_toml("software", name_or_path)
    reader = Reader(table, source)
    calibrated, default = reader.table("efficiency", is_optional=True), Software(name="")
    known = {item.name for item in fields(Efficiency)}
    values = {key: _efficiency(calibrated, key) for key in calibrated.names() if key in known}
    plain = {
        item.name: _plain(reader, item.name, getattr(default, item.name))
        for item in fields(Software)
        # By the type of the default, so that a new setting of a program is read without a line here.
        if isinstance(getattr(default, item.name), bool | int | float)
    }
    software = Software(
        name=reader.text("name"),
        partition=cast("Division", reader.text("partition", "even", among=get_args(Division))),
        efficiency=Efficiency(**values),
        cluster=reader.text("cluster", default.cluster),
        sets=reader.texts("sets"),
        attentions=reader.texts("attentions"),
        families=reader.texts("families", among=tuple(FAMILIES)),
        ways=reader.texts("ways", among=get_args(Way)),
        shards=cast("tuple[Shard, ...]", reader.texts("shards", among=get_args(Shard))),
        **plain,
    )
    calibrated.check()
    reader.check(lambda: {"source", "provenance"})
    return software


def _efficiency(reader: Reader, key: str) -> float:
    return reader.fraction(key, most=FRACTIONS[key]) if key in FRACTIONS else reader.number(key)


def _plain(reader: Reader, key: str, default: Any) -> Any:
    if isinstance(default, bool):
        return reader.flag(key, default=default)
    if key in SHARES:
        return reader.fraction(key, default, is_zero_allowed=True)
    return reader.number(key, default)


def source_of(folder: str, name_or_path: str) -> str:
    """The sources of the facts in a file of the catalog; empty if it names none."""
    return str(read_toml(folder, name_or_path)[0].get("source", ""))
