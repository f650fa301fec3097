"""The program and the cluster of a row of a table of measurements."""

from collections.abc import Iterable
from functools import lru_cache

from pipeloom.accuracy.rows import Row
from pipeloom.catalog import CLUSTERS, load_software, names
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software
from pipeloom.errors import UserError

DEFAULT_SOFTWARE = "general"
"""The program of rows whose set no program names."""
ORDINARY = {"a100-sxm-80gb": "dgx-a100", "h100-sxm-80gb": "dgx-h100"}
"""Device of several clusters -> the one with the ordinary network, for rows of unknown sets."""


@lru_cache(maxsize=1)
def _programs() -> tuple[tuple[str, Software], ...]:
    return tuple((name, load_software(name)) for name in names("software"))


def _clusters() -> Iterable[Cluster]:
    return CLUSTERS.values()


def program_of(row: Row) -> tuple[str, Software]:
    """Name and value of the program that names the row's set (``Software.sets``); else ``DEFAULT_SOFTWARE``."""
    for name, software in _programs():
        if _is_for(software, row.run.attention) and any(row.set_name.startswith(begin) for begin in software.sets):
            return name, software
    return DEFAULT_SOFTWARE, dict(_programs())[DEFAULT_SOFTWARE]


def _is_for(software: Software, attention: str) -> bool:
    return not software.attentions or attention in software.attentions


def known_cluster(row: Row, software: Software) -> Cluster | None:
    """The cluster of a row: that of its set's program if it has the row's device, else the device's ordinary one.

    ``None`` if no cluster has the device.
    """
    having = {cluster.name: cluster for cluster in _clusters() if cluster.device.name == row.device}
    wanted = [software.cluster] if software.name != DEFAULT_SOFTWARE else []
    wanted += [ORDINARY.get(row.device, ""), *having]
    return next((having[name] for name in wanted if name in having), None)


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
