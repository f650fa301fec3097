"""The program and the cluster of a row of a table of measurements."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from pipeloom.accuracy.rows import Network, Row
from pipeloom.catalog import CLUSTERS, load_software, names
from pipeloom.catalog.program_files import GENERAL
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software
from pipeloom.errors import UserError

DEFAULT_SOFTWARE = GENERAL
"""The program of rows whose set no program names."""
EARLY_FACTS, EARLY_ATTENTION = "megatron-2021", "fused-softmax"
"""The facts of unknown programs with this attention kernel: it is Megatron's own, from before flash kernels and before
exchanges that overlap with products."""
ORDINARY = {"a100-sxm-80gb": "dgx-a100", "h100-sxm-80gb": "dgx-h100"}
"""Device of several clusters -> the one with the ordinary network, for rows of unknown sets."""


@lru_cache(maxsize=1)
def _programs() -> tuple[tuple[str, Software], ...]:
    return tuple((name, load_software(name)) for name in names("software"))


def _clusters() -> Iterable[Cluster]:
    return CLUSTERS.values()


def program_of(row: Row) -> tuple[str, Software]:
    """Name and value of the program that names the row's set (``Software.sets``); else ``default_of``.

    Of several, the one that names more of it: one recipe of a collection may be another program's.
    """
    found = [
        (len(begin), name, software)
        for name, software in _programs()
        if _is_for(software, row.run.attention)
        for begin in software.sets
        if row.set_name.startswith(begin)
    ]
    if not found:
        return DEFAULT_SOFTWARE, default_of(row)
    _, name, software = max(found, key=lambda one: one[0])
    return name, software


def default_of(row: Row) -> Software:
    """The program of a row whose set no program names: general efficiencies, and the facts of the row's time."""
    programs = dict(_programs())
    usual = programs[DEFAULT_SOFTWARE]
    if row.run.attention != EARLY_ATTENTION:
        return usual
    return replace(programs[EARLY_FACTS], name=usual.name, cluster=usual.cluster, efficiency=usual.efficiency)


def _is_for(software: Software, attention: str) -> bool:
    return not software.attentions or attention in software.attentions


def known_cluster(row: Row, software: Software) -> Cluster | None:
    """The cluster of a row: that of its set's program if it has the row's device, else the device's ordinary one.

    With the network that the row's note states. ``None`` if no cluster has the device.
    """
    having = {cluster.name: cluster for cluster in _clusters() if cluster.device.name == row.device}
    wanted = [software.cluster] if software.name != DEFAULT_SOFTWARE else []
    wanted += [ORDINARY.get(row.device, ""), *having]
    found = next((having[name] for name in wanted if name in having), None)
    return found if found is None or row.network is None else _with_network(found, row.network)


@lru_cache(maxsize=256)
def _with_network(cluster: Cluster, network: Network) -> Cluster:
    """The cluster with another network between its nodes, without what was measured on its own."""
    node = network.bytes_per_s * (cluster.devices_per_node if network.is_per_device else 1)
    has_each = network.is_per_device or network.adapters >= cluster.devices_per_node
    adapters = 0 if has_each else network.adapters or cluster.adapters_per_node
    if node == cluster.inter.bytes_per_s and adapters == cluster.adapters_per_node:
        return cluster
    return replace(
        cluster,
        name=f"{cluster.name} with {node * 8e-9:g} Gb/s",
        inter=replace(cluster.inter, bytes_per_s=node),
        adapters_per_node=adapters,
        bus_curves={},
        bus_message_bytes=0.0,
    )


def cluster_of(row: Row, software: Software) -> Cluster:
    """As ``known_cluster``.

    Raises:
        UserError: no cluster has the device.
    """
    cluster = known_cluster(row, software)
    if cluster is None:
        devices = ", ".join(sorted({known.device.name for known in _clusters()}))
        raise UserError(f"no cluster of the catalog has the device '{row.device}'; known: {devices}; or give --cluster")
    return cluster
