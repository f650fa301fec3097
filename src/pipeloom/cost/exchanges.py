"""Seconds of data-parallel collectives, of moves of activations, and of the step after the pipeline.

Global ranks of one data-parallel group differ by multiples of ``tp``. With hybrid sharding (arXiv 2304.11277, section
3.2.2), adjacent ranks of the data axis hold one of ``replicate`` copies of the model: gradients are reduced inside a
copy first, and each shard then between the copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeloom.cost.collectives import gather_s, reduce_s, sum_replicated_s, together_s
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster, Group
from pipeloom.cost.matrices import shared_on_rank, stage_shards
from pipeloom.cost.placed import Placed, seconds_of_parts
from pipeloom.cost.software import Software
from pipeloom.cost.stages import layer_parameters, shared_ranks, tied_ranks, trained_replicated
from pipeloom.workload.run import Run


def stage_collectives_s(placed: Placed) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage the seconds of all-gathering its weights, and of reducing its gradient, on its rank's nodes.

    Raises:
        UserError: the cluster has too few devices.
    """
    run, software = placed.run, placed.software
    gathers, reductions = data_parallel_s(placed)
    parts = [placed.parts[rank] for rank in placed.placement.rank_by_stage]
    replicated = zip(parts, trained_replicated(run, software), strict=True)
    own_s = [sum_replicated_s(run, part, software, parameters) for part, parameters in replicated]
    return gathers, tuple(each_s + more_s for each_s, more_s in zip(reductions, own_s, strict=True))


def data_parallel_s(placed: Placed) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """``stage_collectives_s`` without the reduction over tensor-parallel ranks; 0 for stages without parameters."""
    return _data_parallel_s(placed.of_state)


# A search has many runs with the same state of the same stages.
@lru_cache(maxsize=4096)
def _data_parallel_s(placed: Placed) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if len(placed.run.segments) > 1:
        both = [_data_parallel_s(placed.of(one)) for one in placed.run.segments if one.holders > 1]
        gathers_s, reductions_s = (
            tuple(float(sum(s)) for s in zip(*each, strict=True)) for each in zip(*both, strict=True)
        )
        return gathers_s, reductions_s
    run, software, trained = placed.run, placed.software, placed.trained_parameters
    # Frozen weights are sharded, and gathered, at the level ``full`` only.
    gathered = placed.parameters if run.shard == "full" else trained

    def by_stage(seconds: Callable[[Run, Cluster, Software, float], float], held: Sequence[float]) -> tuple[float, ...]:
        def of_stage(part: Cluster, number: float) -> float:
            return seconds(run, part, software, number) if number else 0.0

        parts = (placed.parts[rank] for rank in placed.placement.rank_by_stage)
        return tuple(seconds_of_parts(of_stage, parts, held))

    return by_stage(gather_s, gathered), by_stage(reduce_s, trained)


def evict_seconds(placed: Placed, partners: Sequence[int], input_bytes: Sequence[float]) -> tuple[float, ...]:
    """For each stage the seconds of evicting a micro-batch's activations, or of loading them.

    Args:
        placed: the run, its cluster and its program.
        partners: for each pipeline rank its partner; the rank itself for none, which takes 0 seconds.
        input_bytes: for each stage the bytes that it keeps of a micro-batch on one device.

    Raises:
        UserError: the cluster has too few devices.
    """
    found: list[float] = []
    use, num_senders = placed.software.efficiency, placed.run.stage_devices
    for rank, size in zip(placed.placement.rank_by_stage, input_bytes, strict=True):
        other = partners[rank]
        route, is_inside = placed.route(rank, other), placed.are_near(rank, other)
        seconds = route.p2p_s(size, is_inside=is_inside, sharing=route.sharing(num_senders), efficiency=use.p2p)
        found.append(0.0 if other == rank else seconds + use.exchange_s)
    return tuple(found)


def offload_seconds(placed: Placed, input_bytes: Sequence[float]) -> tuple[float, ...]:
    """For each stage the seconds of moving a micro-batch's activations to the host, or back.

    Args:
        placed: the run, its cluster and its program.
        input_bytes: for each stage the bytes that it keeps of a micro-batch on one device.

    Raises:
        UserError: the cluster has too few devices, or its file has no ``[host]`` link.
    """
    hosts = [part.host_link for part in placed.parts]
    owner = placed.placement.rank_by_stage
    return tuple(
        hosts[rank].latency_s + size / hosts[rank].bytes_per_s for rank, size in zip(owner, input_bytes, strict=True)
    )


def drain_s(run: Run, software: Software, costs: StageCosts) -> float:
    """Observed seconds of filling and draining a pipeline beyond its schedule's (``Software.extra_drain_slots``)."""
    # An observation, not physics: other models and longer sequences are predicted without it.
    if run.pp == 1 or run.seq > software.drain_seq or run.shape.name not in software.drain_models:
        return 0.0
    slot_s = max(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))
    return software.extra_drain_slots * slot_s


@dataclass(frozen=True)
class StepTerms:
    """Seconds that a step takes outside the pipeline.

    Attributes:
        reduce_s: exposed reduction of gradients, and gather of updated weights.
        tied_s: all-reduce of a tied embedding's gradients between the two ranks that hold it, after the pipeline.
        shared_s: all-reduce of the gradients of layers that share their weights over stages, between the ranks that
            have such layers, of all replicas.
        average_s: of the average of weights between replicas that step alone, the part of one update.
        optimizer_s: update of the weights; 0 where the pipeline updates each stage (``Run.updates_stages``).
        fixed_s: constant overhead.
    """

    reduce_s: float
    tied_s: float
    shared_s: float
    average_s: float
    optimizer_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        """Their sum."""
        return self.reduce_s + self.tied_s + self.shared_s + self.average_s + self.optimizer_s + self.fixed_s


def step_terms(placed: Placed, backward_s: float) -> StepTerms:
    """Seconds of the step after the pipeline, each part on the rank where it takes longest.

    If collectives have a lane, reductions and gathers belong to the pipeline and are not included.

    Args:
        placed: the run, its cluster and its program.
        backward_s: seconds of a rank's backward of the last micro-batch, which can overlap with a reduction.
    """
    run, software, use = placed.run, placed.software, placed.software.efficiency
    exposed_s = 0.0
    if not software.has_reduction_lane:
        most: dict[Cluster, float] = {}
        for part, held in dict.fromkeys(zip(placed.parts, placed.rank_parameters, strict=True)):
            most[part] = max(held, most.get(part, 0.0))
        exposed_s = max(_exposed_s(run, part, software, held, backward_s) for part, held in most.items())
    tied_s, ends = 0.0, tied_ranks(run)
    if ends is not None and not software.lends_tied:
        route = placed.route(*ends)
        pair = Group(2, 2 if run.num_devices <= route.devices_per_node else 1, route.devices_per_node)
        message = run.shape.embedding_parameters / run.tp * software.gradient_bytes
        tied_s = route.collective_s("all_reduce", message, pair, use.data_bus)
    crowding = placed.cluster.crowding(run.num_devices)
    shared_s = 0.0 if run.shape.sharing is None else _shared_s(placed)
    average_s = 0.0 if run.updates is None else _average_s(placed) / max(run.updates)
    return StepTerms(
        reduce_s=exposed_s * crowding,
        tied_s=tied_s * crowding,
        shared_s=shared_s * crowding,
        average_s=average_s * crowding,
        optimizer_s=0.0 if run.updates_stages else update_s(placed.of_state),
        fixed_s=use.step_s,
    )


_AVERAGED_BYTES = 32
"""Bytes moved for each parameter by the outer step: weights, their begin and the momentum are read and written, and the
momentum is read again."""


def _average_s(placed: Placed) -> float:
    """Seconds of the average of weights over the replicas, with the outer step, on the slowest rank."""
    run, software = placed.run, placed.software

    def seconds(part: Cluster, held: float) -> float:
        return reduce_s(run, part, software, held) + part.device.memory_s(_AVERAGED_BYTES * held)

    return max(seconds_of_parts(seconds, placed.parts, placed.trained_rank_parameters))


def shared_bytes(run: Run, software: Software) -> tuple[tuple[tuple[int, ...], float], ...]:
    """For each sum of gradients of layers that share their weights over stages: the pipeline ranks, and the bytes."""
    if run.data_ranks == 1:
        return tuple((ranks, _shared_message(run, software)) for ranks in shared_ranks(run, software) if len(ranks) > 1)
    return tuple((ranks, _shared_message(run, software)) for ranks in shared_ranks(run, software))


def _shared_message(run: Run, software: Software) -> float:
    return layer_parameters(run) * software.gradient_bytes


def _shared_s(placed: Placed) -> float:
    """Seconds of the sums of gradients of layers that share their weights over stages, on the rank with most of them.

    They follow each other, since ranks that have several sets take them in one order.
    """
    run, found = placed.run, [0.0] * placed.run.pp
    for ranks, message in shared_bytes(run, placed.software):
        route, size = placed.route(ranks[0], ranks[-1]), len(ranks) * run.data_ranks
        per_node = min(size, route.devices_per_node) if run.num_devices > route.devices_per_node else size
        each_s = route.collective_s(
            "all_reduce", message, Group(size, per_node, 1), placed.software.efficiency.data_bus
        )
        for rank in ranks:
            found[rank] += each_s
    return max(found)


def _exposed_s(run: Run, part: Cluster, software: Software, parameters: float, backward_s: float) -> float:
    """Exposed seconds of a rank's collectives after the pipeline."""
    whole_s, share, gather_share = reduce_s(run, part, software, parameters), software.overlap, software.gather_overlap
    if software.gathers_layers and run.shard == "full":
        if not software.gathers_once(run.num_stages):
            return 0.0
        # Layer by layer beside the first forward and the last backward.
        share = gather_share = 1.0
    if run.shard == "none":
        share = max(share, software.replica_overlap)
    # The gather cannot overlap with the backward: the weights are updated after it.
    gather = gather_s(run, part, software, parameters)
    # What overlaps is compute of the pipeline, whose seconds are counted there.
    beside_s = share * backward_s, gather_share * backward_s / _BACKWARDS
    return sum(
        together_s(each_s, moved_s) - each_s for each_s, moved_s in zip(beside_s, (whole_s, gather), strict=True)
    )


_BACKWARDS = 2
"""Seconds of a backward / those of a forward."""


_CLEARED_BYTES = 8
"""Bytes moved for each parameter of a rank at any sharding level: its gradient in single precision is read for the norm
and set to zero. An assumption; ``Efficiency.optimizer_bytes`` is the sharded rest."""


@lru_cache(maxsize=4096)
def update_s(placed: Placed) -> float:
    """Seconds of the optimizer's step on the slowest rank, or on all ranks that share cores.

    Args:
        placed: the run, or that for a segment of its parameters.
    """
    if len(placed.run.segments) > 1:
        return sum(update_s(placed.of(one)) for one in placed.run.segments)
    run, software = placed.run, placed.software
    shards = run.shard_size if run.sharded != "none" else 1

    def seconds(part: Cluster, held: float, products_s: float) -> float:
        if part.update is not None and part.update.precision == run.precision:
            return part.update.seconds(held / shards) + products_s
        moved = software.efficiency.optimizer_bytes * (held / shards) + _CLEARED_BYTES * held
        return part.device.memory_s(moved) + products_s

    each_s = seconds_of_parts(seconds, placed.parts, placed.trained_rank_parameters, _matrices_s(placed))
    return max(*each_s, placed.cluster.crowding(run.num_devices) * sum(each_s) / len(each_s))


def _matrices_s(placed: Placed) -> list[float]:
    """For each pipeline rank the seconds of products in the update of whole matrices, on the device with most of them.

    In the precision of the run; each product has the rate of a large one.
    """
    run, software, shards = placed.run, placed.software, stage_shards(placed.run, placed.software)
    if shards is None:
        return [0.0] * run.pp
    found: list[float] = []
    for rank, part in enumerate(placed.parts):
        by_shard = zip(*(shards[stage].flops for stage in placed.placement.stages_of(rank)), strict=True)
        flops = max(sum(each) for each in by_shard)
        flops += 0.0 if run.shape.sharing is None else shared_on_rank(run, software, rank)[1]
        found.append(part.device.matmul_s(flops, 0.0, run.precision, software.efficiency.matmul))
    return found
