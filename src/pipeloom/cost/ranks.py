"""Where the ranks of a run stand: what each of them sees of the cluster, and what is between two of them.

Ranks are numbered with the tensor axis innermost, then data, then pipeline (``pipeloom.workload.layout``), so that a
pipeline rank has ``dp x tp`` devices that follow each other. They work in lock-step, tensor-parallel ranks at each
exchange and replicas at the end of a step, so that the slowest of them counts.
"""

from dataclasses import replace
from functools import lru_cache

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.pieces import PieceSeconds, piece_seconds
from pipeloom.cost.software import Software
from pipeloom.schedule import PLACEMENTS, Placement
from pipeloom.workload.layout import Recompute, place_of
from pipeloom.workload.run import Run


@lru_cache(maxsize=512)
def placement_named(name: str, pp: int, loops: int) -> Placement:
    """The placement of a name (``PLACEMENTS``); the same one each time."""
    return PLACEMENTS[name](pp, loops)


def placement_of(run: Run) -> Placement:
    """Stages, and the pipeline rank of each."""
    return placement_named(run.placement, run.pp, run.loops)


def first_device(run: Run, rank: int) -> int:
    """The first of a pipeline rank's devices; the others follow it."""
    return place_of(rank, run.pipeline_order) * run.dp * run.tp


def are_near(run: Run, cluster: Cluster, one: int, other: int) -> bool:
    """Whether two pipeline ranks share nodes: each device of the one stands on the same node as its partner."""
    begin, end = first_device(run, one), first_device(run, other)
    return all(cluster.node_of(begin + n)[0] == cluster.node_of(end + n)[0] for n in range(run.dp * run.tp))


def rank_parts(run: Run, cluster: Cluster) -> tuple[Cluster, ...]:
    """For each pipeline rank the cluster as its devices see it.

    Raises:
        UserError: the cluster has not so many devices.
    """
    return _parts(cluster, run.dp * run.tp, run.pp, run.pipeline_order)


@lru_cache(maxsize=4096)
def _parts(cluster: Cluster, size: int, pp: int, order: tuple[int, ...] | None) -> tuple[Cluster, ...]:
    return tuple(cluster.part(place_of(rank, order) * size, size) for rank in range(pp))


@lru_cache(maxsize=4096)
def _kinds(cluster: Cluster, size: int, pp: int, order: tuple[int, ...] | None) -> tuple[Cluster, ...]:
    """The different ones of ``_parts``."""
    return tuple(dict.fromkeys(_parts(cluster, size, pp, order)))


def _rank_kinds(run: Run, cluster: Cluster) -> tuple[Cluster, ...]:
    return _kinds(cluster, run.dp * run.tp, run.pp, run.pipeline_order)


def rank_device_bytes(run: Run, cluster: Cluster) -> tuple[float, ...]:
    """What a device of each pipeline rank can hold.

    Raises:
        UserError: the cluster has not so many devices.
    """
    kinds = _rank_kinds(run, cluster)
    # Most clusters are of one kind: then nothing has to be looked up rank by rank.
    if len(kinds) == 1:
        return (kinds[0].device.memory_bytes,) * run.pp
    return tuple(part.device.memory_bytes for part in rank_parts(run, cluster))


def rank_pieces(run: Run, cluster: Cluster, software: Software) -> tuple[PieceSeconds, ...]:
    """For each pipeline rank the seconds of the model's pieces there, of which all layers recompute ``run.recompute``.

    Raises:
        UserError: the cluster has not so many devices.
    """
    of_part = {part: piece_seconds(run, part, software) for part in _rank_kinds(run, cluster)}
    if len(of_part) == 1:
        return tuple(of_part.values()) * run.pp
    return tuple(of_part[part] for part in rank_parts(run, cluster))


def fastest_pieces(run: Run, cluster: Cluster, software: Software) -> PieceSeconds:
    """Seconds of the model's pieces, each on the rank where it is fastest.

    Raises:
        UserError: the cluster has not so many devices.
    """
    pieces = [piece_seconds(run, part, software) for part in _rank_kinds(run, cluster)]
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        min(pieces, key=lambda each: sum(each.layer)),
        embedding=min((each.embedding for each in pieces), key=sum),
        head=min((each.head for each in pieces), key=sum),
    )


KINDS: tuple[Recompute, Recompute] = ("none", "full")


def recompute_s(run: Run, cluster: Cluster, software: Software) -> tuple[float, ...]:
    """For each pipeline rank the seconds that a layer takes more if its backward computes it again.

    Not those of its forward: where a host's launches take longest, those of forward and backward overlap the device's.
    """
    plain, again = (
        rank_pieces(replace(run, recompute=kind, recompute_layers=None), cluster, software) for kind in KINDS
    )
    return tuple(max(0.0, full.layer[1] - none.layer[1]) for none, full in zip(plain, again, strict=True))


def rank_route(run: Run, cluster: Cluster, one: int, other: int) -> Cluster:
    """The cluster as messages between two pipeline ranks see it.

    Raises:
        UserError: the cluster has not so many devices.
    """
    return cluster.route(first_device(run, one), first_device(run, other), run.dp * run.tp)


def rank_slowness(run: Run, cluster: Cluster, software: Software) -> tuple[float, ...]:
    """For each pipeline rank the seconds of a layer, forward and backward, as a multiple of the fastest rank's.

    Raises:
        UserError: the cluster has not so many devices.
    """
    layer_s = [sum(pieces.layer) for pieces in rank_pieces(run, cluster, software)]
    fastest_s = min(layer_s)
    return tuple(seconds / fastest_s for seconds in layer_s)
