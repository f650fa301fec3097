"""Seconds of collectives: reductions of gradients, gathers of sharded weights, and small exchanges inside layers.

With expert parallelism tokens travel to the ranks of their experts and back. With n ranks in a group, and equal loads,
a rank keeps 1 / n of its pairs of a token and an expert, and sends the others a row each: there and back in a forward,
and the gradients there and back in a backward. With unequal loads the exchange takes as long as the rank needs to which
most rows travel. Before the first of these the ranks exchange how many rows they send. What is computed meanwhile is in
``cost.overlap``.
"""

from math import ceil

from pipeloom.cost.hardware import Cluster, Collective, Group
from pipeloom.cost.measured import Both
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

SLOWDOWN = 0.189
"""Mean slowdown of compute while a collective runs beside it: its kernels take multiprocessors and memory bandwidth
(arXiv 2507.03114, on A100, H100, MI210 and MI250)."""
_COUNT_BYTES = 8
"""Bytes of a number of rows: PyTorch uses int64."""
_WAYS = 2
"""Times that rows travel in a forward, and their gradients in a backward: to the experts and back."""

Exchanges = tuple[int, float]
"""Their number, and their seconds together."""


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
    seconds = cluster.collective_s(kind, message, inner, use)
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
    # A broadcast goes around the ring of an all-gather, and each takes the latency of all of its hops.
    number = _num_owners(run, parameters) if software.owns_tensors else 1
    group, use = _shard_group(run, cluster), software.efficiency.data_bus
    return number * cluster.collective_s("all_gather", message / number, group, use)


def _num_owners(run: Run, parameters: float) -> int:
    """Number of ranks that own one of a device's ``parameters``, if each has whole matrices and norms only."""
    kind = run.shape.kind
    # Queries, keys and values are one matrix.
    each = 3 + kind.gates + kind.layer_norms
    return max(1, min(run.shard_size, ceil(each * parameters * run.tp / run.shape.layer_matrix_parameters)))


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
    # Tensor-parallel ranks are adjacent, so consecutive data-parallel ranks have a stride of ``tp``; those with other
    # experts lie between the ranks with the same ones.
    stride = run.tp * (run.ep if run.segment == "experts" else 1)
    return Group.strided(run.shard_size, stride, cluster.devices_per_node)


def layer_collectives_s(run: Run, part: Cluster, software: Software) -> tuple[float, float]:
    """Seconds of the collectives of one layer in a forward and in a backward, where layers are gathered one by one."""
    if not software.gathers_layers or software.gathers_once(run.num_stages) or run.sharded != "full":
        return 0.0, 0.0
    held = run.shape.layer_matrix_parameters / run.tp
    gathered_s = gather_s(run, part, software, held)
    return gathered_s, gathered_s + reduce_s(run, part, software, held)


def inner_exchanges(run: Run, cluster: Cluster, software: Software) -> tuple[Exchanges, Exchanges]:
    """The exchanges of a layer, forward and backward; the arguments are those of ``travel_s``."""
    forth, back = _norm_exchanges(run, cluster, software)
    forth_s, back_s = travel_s(run, cluster, software)
    return (
        (forth[0] + (_WAYS + 1 if forth_s else 0), forth[1] + forth_s),
        (back[0] + (_WAYS if back_s else 0), back[1] + back_s),
    )


def _norm_exchanges(run: Run, cluster: Cluster, software: Software) -> tuple[Exchanges, Exchanges]:
    """The tensor-parallel sums of norms of queries and keys, forward and backward."""
    kind = run.shape.kind.qk_norm
    if kind == "none" or run.tp == 1 or (kind == "head" and run.sequence_parallel):
        return (0, 0.0), (0, 0.0)
    # Of all heads: the squares of each token and their gradients; of each head: the gradient of the weight.
    message = 4 * run.tokens if kind == "width" else run.shape.head_size * run.element_bytes
    group = Group.strided(run.tp, 1, cluster.devices_per_node)
    both = 2, 2 * cluster.collective_s("all_reduce", message, group, software.efficiency.tensor_bus)
    return (both if kind == "width" else (0, 0.0)), both


def travel_s(run: Run, cluster: Cluster, software: Software) -> Both:
    """Seconds of the exchanges of a layer, forward and backward; 0 if it has no experts, or every rank has all of them.

    Args:
        run: model and layout; all of its layers are alike.
        cluster: the rank's part of it.
        software: the training program.
    """
    experts = run.shape.experts
    if experts is None or run.ep == 1:
        return 0.0, 0.0
    both_s = _WAYS * rows_s(run, cluster, software)
    return _exchange_s(run, cluster, software, _COUNT_BYTES * experts.count) + both_s, both_s


def rows_s(run: Run, cluster: Cluster, software: Software) -> float:
    """Seconds of one of these exchanges of rows, with the arguments of ``travel_s``."""
    # Tensor-parallel ranks have all tokens, and a share of the width of each expert: each of them sends whole rows.
    return _exchange_s(run, cluster, software, travel_bytes(run))


def travel_bytes(run: Run) -> float:
    """Bytes of the rows that come to a rank's experts, one for each pair of a token and an expert, its own included."""
    return run.computed_pairs * run.shape.hidden * run.element_bytes


def _exchange_s(run: Run, cluster: Cluster, software: Software, message_bytes: float) -> float:
    """Seconds in which each rank sends ``message_bytes`` in equal parts to all ranks of its group, itself included."""
    # Tensor-parallel ranks are adjacent, so neighbors on the data axis have a stride of ``tp``.
    group, use = Group.strided(run.ep, run.tp, cluster.devices_per_node), software.efficiency
    # Inside a node each link carries as much as in an all-gather of as many bytes.
    inside = Group(group.per_node, group.per_node, 1)
    inside_s = cluster.collective_s("all_gather", message_bytes * inside.size / group.size, inside, use.tensor_bus)
    if group.num_nodes == 1:
        return inside_s
    # Every device of a node sends to other nodes at the same time; links inside carry their part meanwhile.
    sent, sharing = message_bytes * (1 - inside.size / group.size), cluster.sharing(cluster.devices_per_node)
    return max(inside_s, cluster.p2p_s(sent, is_inside=False, sharing=sharing, efficiency=use.p2p))
