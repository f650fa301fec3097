"""Seconds of the data-parallel collectives: gradients reduced, weights gathered.

Ranks of one data-parallel group are ``tp`` apart. With ``replicate`` copies of what is sharded, the ranks of one copy
are neighbors on the data axis; gradients are reduced inside a copy first, and each shard then between the copies
(hybrid sharding, arXiv 2304.11277, section 3.2.2).
"""

from pipeloom.cost.hardware import Cluster, Collective, Group
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run


def reduce_s(run: Run, cluster: Cluster, software: Software, parameters: float) -> float:
    """Seconds of reducing the gradients of ``parameters``, those that one device holds of a stage or of its rank.

    Args:
        run: what is trained.
        cluster: the rank's part of it (``rank_parts``).
        software: with what.
        parameters: how many.
    """
    use, message = software.efficiency.data_bus, parameters * software.gradient_bytes
    inner = _shard_group(run, cluster)
    kind: Collective = "all_reduce" if run.shard == "none" or software.reduces_whole else "reduce_scatter"
    seconds = cluster.collective_s(kind, message, inner, use)
    # A shard each: what a copy has already added up among its ranks.
    if run.replicate > 1:
        outer = Group.strided(run.replicate, run.tp * run.shard_size, cluster.devices_per_node)
        seconds += cluster.collective_s("all_reduce", message / run.shard_size, outer, use)
    return seconds


def gather_s(run: Run, cluster: Cluster, software: Software, parameters: float) -> float:
    """Seconds of gathering the sharded weights of ``parameters``, as ``reduce_s``; 0 where nothing is sharded."""
    if run.shard == "none":
        return 0.0
    # Programs that gather in 16 bits have nothing narrower to send when they compute in 32.
    message = parameters * max(software.gather_bytes, run.element_bytes)
    return cluster.collective_s("all_gather", message, _shard_group(run, cluster), software.efficiency.data_bus)


def sum_replicated_s(run: Run, cluster: Cluster, software: Software, parameters: float) -> float:
    """Seconds in which tensor-parallel ranks add up gradients of what each of them holds whole.

    With sequence parallelism each rank has the gradients of its own tokens; without, all ranks have the same ones.

    Args:
        run: what is trained.
        cluster: the rank's part of it.
        software: with what.
        parameters: how many each rank holds whole.
    """
    if not run.sequence_parallel:
        return 0.0
    group = Group.strided(run.tp, 1, cluster.devices_per_node)
    message = parameters * software.gradient_bytes
    return cluster.collective_s("all_reduce", message, group, software.efficiency.tensor_bus)


def _shard_group(run: Run, cluster: Cluster) -> Group:
    # The tensor axis is innermost, so data-parallel neighbors are ``tp`` apart.
    return Group.strided(run.shard_size, run.tp, cluster.devices_per_node)
