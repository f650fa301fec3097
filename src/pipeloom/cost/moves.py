"""Seconds of moving what stages keep for backwards: to the partner of their rank, or to the host, and back."""

from collections.abc import Sequence

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.ranks import are_near, placement_of, rank_parts, rank_route
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run


def evict_seconds(
    run: Run, cluster: Cluster, software: Software, partners: Sequence[int], input_bytes: Sequence[float]
) -> tuple[float, ...]:
    """For each stage the seconds of evicting what it keeps for a micro-batch, or of loading it, over the link there is.

    Args:
        run: what is trained.
        cluster: where.
        software: with what.
        partners: for each pipeline rank the one to which it evicts; 0 seconds for its own.
        input_bytes: for each stage what it keeps of a micro-batch on one device.

    Raises:
        UserError: the cluster has not so many devices.
    """
    found: list[float] = []
    for rank, size in zip(placement_of(run).rank_by_stage, input_bytes, strict=True):
        other, use = partners[rank], software.efficiency
        route = rank_route(run, cluster, rank, other)
        is_inside, sharing = are_near(run, cluster, rank, other), route.sharing(run.tp * run.dp)
        seconds = route.p2p_s(size, is_inside=is_inside, sharing=sharing, efficiency=use.p2p) + use.exchange_s
        # A rank without a partner is named as its own.
        found.append(0.0 if other == rank else seconds)
    return tuple(found)


def offload_seconds(run: Run, cluster: Cluster, input_bytes: Sequence[float]) -> tuple[float, ...]:
    """For each stage the seconds of moving what it keeps for a micro-batch to the host, or back.

    Args:
        run: what is trained.
        cluster: where.
        input_bytes: for each stage what it keeps of a micro-batch on one device.

    Raises:
        UserError: the cluster has not so many devices, or does not say how fast they reach the host.
    """
    hosts = [part.host_link for part in rank_parts(run, cluster)]
    owner = placement_of(run).rank_by_stage
    return tuple(
        hosts[rank].latency_s + size / hosts[rank].bytes_per_s for rank, size in zip(owner, input_bytes, strict=True)
    )
