"""Seconds of data-parallel collectives: reductions of gradients, and gathers of sharded weights."""

from math import ceil

from pipeloom.cost.hardware import Cluster, Collective, Group
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

SLOWDOWN = 0.189
"""Mean slowdown of compute while a collective runs beside it: its kernels take multiprocessors and memory bandwidth
(arXiv 2507.03114, on A100, H100, MI210 and MI250)."""


def together_s(compute_s: float, collective_s: float) -> float:
    """Seconds until both have ended, if a collective and compute start at the same time on a device."""
    return max(collective_s, compute_s + collective_s * SLOWDOWN / (1 + SLOWDOWN))


def reduce_s(run: Run, cluster: Cluster, software: Software, parameters: float) -> float:
    """Seconds of the data-parallel reduction of gradients.

    Args:
        run: model and layout.
        cluster: the rank's part of it (``Placed.parts``).
        software: the training program.
        parameters: number of parameters on one device, of a stage or of all stages of its rank.
    """
    use, message = software.efficiency.data_bus, parameters * software.gradient_bytes
    inner = _shard_group(run, cluster)
    kind: Collective = "all_reduce" if run.shard == "none" or software.reduces_whole else "reduce_scatter"
    buckets = 1
    if run.shard == "none" and software.bucket_parameters:
        buckets = ceil(parameters / software.bucket_parameters)
    seconds = buckets * cluster.collective_s(kind, message / buckets, inner, use) if buckets else 0.0
    # Between the copies each rank reduces its shard only.
    if run.replicate > 1:
        outer = Group.strided(run.replicate, run.tp * run.shard_size, cluster.devices_per_node)
        seconds += cluster.collective_s("all_reduce", message / run.shard_size, outer, use)
    return seconds


def gather_s(run: Run, cluster: Cluster, software: Software, parameters: float) -> float:
    """Seconds of all-gathering sharded weights, with the arguments of ``reduce_s``; 0 without sharding."""
    if run.shard == "none":
        return 0.0
    # Programs that gather weights in 16 bits still send 32 bits when they compute in float32.
    message = parameters * max(software.gather_bytes, run.element_bytes)
    return cluster.collective_s("all_gather", message, _shard_group(run, cluster), software.efficiency.data_bus)


def sum_replicated_s(run: Run, cluster: Cluster, software: Software, parameters: float) -> float:
    """Seconds of the tensor-parallel reduction of gradients of replicated parameters.

    With sequence parallelism each rank has the gradients of its own tokens; without, all ranks have the same gradients.

    Args:
        run: model and layout.
        cluster: the rank's part of it.
        software: the training program.
        parameters: number of replicated parameters.
    """
    if not run.sequence_parallel:
        return 0.0
    group = Group.strided(run.tp, 1, cluster.devices_per_node)
    message = parameters * software.gradient_bytes
    return cluster.collective_s("all_reduce", message, group, software.efficiency.tensor_bus)


def _shard_group(run: Run, cluster: Cluster) -> Group:
    # Tensor-parallel ranks are adjacent, so consecutive data-parallel ranks have a stride of ``tp``.
    return Group.strided(run.shard_size, run.tp, cluster.devices_per_node)


def layer_collectives_s(run: Run, part: Cluster, software: Software) -> tuple[float, float]:
    """Seconds of the collectives of one layer in a forward and in a backward, where layers are gathered one by one."""
    if not software.gathers_layers or software.gathers_once(run.num_stages) or run.sharded != "full":
        return 0.0, 0.0
    held = run.shape.layer_matrix_parameters / run.tp
    gathered_s = gather_s(run, part, software, held)
    return gathered_s, gathered_s + reduce_s(run, part, software, held)
