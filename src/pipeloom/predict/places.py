"""On which nodes the pipeline ranks of a run are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.ranks import first_device, rank_parts
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Place:
    """Where one pipeline rank is.

    Attributes:
        kind: the name of its group of nodes, of several joined with plus signs; of the cluster, if nodes are alike.
        first_node, last_node: of its devices, counted through the whole cluster from 0.
        device_memory_bytes: what each of its devices can hold; the least, if they are not alike.
    """

    kind: str
    first_node: int
    last_node: int
    device_memory_bytes: float


def rank_places(run: Run, cluster: Cluster) -> tuple[Place, ...]:
    """For each pipeline rank where it is.

    Raises:
        UserError: the cluster has not so many devices.
    """
    size = run.dp * run.tp
    return tuple(
        Place(
            part.name,
            cluster.node_of(first_device(run, rank))[0],
            cluster.node_of(first_device(run, rank) + size - 1)[0],
            part.device.memory_bytes,
        )
        for rank, part in enumerate(rank_parts(run, cluster))
    )


def describe_places(places: Sequence[Place]) -> list[str]:
    """For people: neighboring ranks of one kind together, such as ``0-3 on a100, nodes 0-3``."""
    lines: list[str] = []
    for kind, run_of in groupby(enumerate(places), key=lambda pair: pair[1].kind):
        # A group of ``groupby`` can be read only once.
        members = list(run_of)
        first, last = members[0][0], members[-1][0]
        begin, end = min(place.first_node for _, place in members), max(place.last_node for _, place in members)
        nodes = _range("node", begin, end)
        lines.append(f"{first if first == last else f'{first}-{last}'} on {kind}, {nodes}")
    return lines


def _range(word: str, first: int, last: int) -> str:
    return f"{word} {first}" if first == last else f"{word}s {first}-{last}"
