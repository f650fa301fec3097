"""A described run -> seconds of each stage's forward and backward, and of what a step does outside the pipeline."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.data_parallel import gather_s, reduce_s, sum_replicated_s
from pipeloom.cost.flops import piece_flops
from pipeloom.cost.hardware import Cluster, Group
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.ranks import (
    are_near,
    fastest_pieces,
    placement_named,
    placement_of,
    rank_parts,
    rank_pieces,
    rank_route,
    rank_slowness,
)
from pipeloom.cost.software import Division, Software
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run


def stage_layers(run: Run, software: Software) -> tuple[tuple[int, ...], int]:
    """How many layers each stage of a run has, and which stage has the head.

    As the run says, or else as its program divides them; ``balanced`` cuts [embedding, layers, head] so that the
    rank with the most FLOPs in a step has as few as can be (``fastest_partition``).
    """
    if run.layers_by_stage is not None:
        return run.layers_by_stage, run.num_stages - 1
    if software.partition != "balanced":
        return layers_of_stages(run.shape, run.num_stages, software.partition)
    recompute = run.recompute if run.recompute_layers is None else run.recompute_layers
    sizes = _balanced(run.shape, run.seq, recompute, run.placement, (run.pp, run.loops))
    return layers_of_pieces(sizes), run.num_stages - 1


# A search asks for the same partition with each micro-batch, sharding and family.
@lru_cache(maxsize=4096)
def _balanced(
    shape: ModelShape, seq: int, recompute: Recompute | tuple[Recompute, ...], placement: str, axes: tuple[int, int]
) -> tuple[int, ...]:
    by_layer = (recompute,) * shape.layers if isinstance(recompute, str) else recompute
    return fastest_partition(piece_flops(shape, seq, by_layer), placement_named(placement, *axes))


def layers_of_pieces(partition: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each stage, given its pieces; the first piece is the embedding, the last one the head."""
    layers = list(partition)
    layers[0] -= 1
    layers[-1] -= 1
    return tuple(layers)


def layers_of_stages(shape: ModelShape, num_stages: int, division: Division) -> tuple[tuple[int, ...], int]:
    """How many layers each stage has, and which stage has the head.

    ``even``: the first stages take the remainder. ``uniform-items``: the list [embedding, layers, norm, head] is
    cut into parts of equal length, the first parts take the remainder (the default of the layouts sweep's program).
    ``light-ends``: the first and the last stage have one layer less (arXiv 2401.10241, section 5.1). ``by-cost``:
    a stage is closed when the parameters so far, the head's among them, reach its share (nanotron).
    """
    if division == "by-cost":
        return _by_cost(shape, num_stages)
    assert division != "balanced", "which depends on more than the shape: stage_layers"
    ends = {"even": (0, 0), "uniform-items": (1, 2), "light-ends": (1, 1)}[division] if num_stages > 1 else (0, 0)
    items = shape.layers + sum(ends)
    counts = [items // num_stages + (stage < items % num_stages) for stage in range(num_stages)]
    # Embedding and head took places in the list that was divided; they are no layers.
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return tuple(max(0, count) for count in counts), num_stages - 1


def _by_cost(shape: ModelShape, num_stages: int) -> tuple[tuple[int, ...], int]:
    layer, head = shape.layer_matrix_parameters, shape.embedding_parameters
    share = (shape.layers * layer + head) / num_stages
    counts, stage, total = [0] * num_stages, 0, 0
    for _ in range(shape.layers):
        counts[stage] += 1
        total += layer
        if total >= share * (stage + 1) and stage < num_stages - 1:
            stage += 1
    return tuple(counts), stage


LayersByRecompute = tuple[tuple[tuple[Run, int], ...], ...]


@lru_cache(maxsize=256)
def layers_by_recompute(run: Run, software: Software) -> LayersByRecompute:
    """For each stage its layers by what they recompute: the run as if all did the same, and how many do."""
    counts, _ = stage_layers(run, software)
    if run.recompute_layers is None:
        return tuple(((run, count),) for count in counts)
    alike = {kind: replace(run, recompute=kind, recompute_layers=None) for kind in set(run.recompute_layers)}
    parts = [run.recompute_layers[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
    return tuple(tuple((alike[kind], count) for kind, count in Counter(part).items()) for part in parts)


def kinds_of(stages: LayersByRecompute) -> dict[Recompute, Run]:
    """What is recomputed anywhere -> the run as if all layers did that."""
    return {alike.recompute: alike for stage in stages for alike, _ in stage}


def step_seconds(run: Run, cluster: Cluster, software: Software) -> list[float]:
    """Seconds of each piece on the fastest rank, forward and backward of a micro-batch: embedding, each layer, head."""
    recompute = run.recompute_layers or (run.recompute,) * run.shape.layers
    pieces = {kind: fastest_pieces(replace(run, recompute=kind), cluster, software) for kind in set(recompute)}
    ends = pieces[recompute[0]]
    return [sum(ends.embedding), *(sum(pieces[kind].layer) for kind in recompute), sum(ends.head)]


def with_fastest_layers(run: Run, cluster: Cluster, software: Software, slowness: Sequence[float] | None = None) -> Run:
    """The run with the layers of each stage that make its slowest rank fastest, by the seconds of its pieces.

    Args:
        run: its placement counts; what it says of layers does not.
        cluster: where.
        software: with what.
        slowness: for each pipeline rank, by what the fastest rank's seconds are multiplied; ``None`` for what its
            place on the cluster makes of them.

    Raises:
        UserError: more stages than pieces, or the cluster has not so many devices.
    """
    by_rank = rank_slowness(run, cluster, software) if slowness is None else slowness
    sizes = fastest_partition(step_seconds(run, cluster, software), placement_of(run), by_rank)
    return replace(run, layers_by_stage=layers_of_pieces(sizes))


def with_own_layers(run: Run, cluster: Cluster, software: Software) -> Run:
    """The run with the layers of each stage where its program balances them and its ranks are not equally fast.

    Raises:
        UserError: more stages than pieces, or the cluster has not so many devices.
    """
    if run.layers_by_stage is not None or software.partition != "balanced":
        return run
    slowness = rank_slowness(run, cluster, software)
    if min(slowness) == max(slowness):
        return run
    return with_fastest_layers(run, cluster, software, slowness)


def stage_costs(run: Run, cluster: Cluster, software: Software) -> StageCosts:
    """Seconds of each stage's forward and backward for one micro-batch, and of messages between stages.

    Of a backward that is split, the half for the weights has the second of each matrix product's two, which attention's
    core has not, the sum over micro-batches, and all of the embedding's.

    Args:
        run: what is trained.
        cluster: where; a stage is as fast as its rank's part of it.
        software: with what.

    Raises:
        UserError: the cluster has not so many devices.
    """
    owner, (counts, head) = placement_of(run).rank_by_stage, stage_layers(run, software)
    of_rank = rank_pieces(run, cluster, software)
    pieces = [of_rank[rank] for rank in owner]
    if run.recompute_layers is None:
        layers_s = [(count * part.layer[0], count * part.layer[1]) for count, part in zip(counts, pieces, strict=True)]
    else:
        layers_s = _uneven_layers_s(run, cluster, software, owner)
    boundary_s = _boundary_s(run, cluster, software, owner)
    around_s = (0.0, *boundary_s, 0.0)
    fixed_s = software.efficiency.microbatch_s / run.loops
    sides = []
    for direction in (0, 1):
        own_s = fixed_s * (0.4, 0.6)[direction]
        seconds = [
            both_s[direction] + own_s + piece.stage[direction] for both_s, piece in zip(layers_s, pieces, strict=True)
        ]
        seconds[0] += pieces[0].embedding[direction]
        seconds[head] += pieces[head].head[direction]
        if software.is_blocking:
            seconds = [value + sum(both_s) / 2 for value, both_s in zip(seconds, pairwise(around_s), strict=True)]
        sides.append(tuple(seconds))
    weight_s = [count * piece.weight_s for count, piece in zip(counts, pieces, strict=True)]
    share = sum(weight_s) / sum(backward_s for _, backward_s in layers_s)
    weight_s[0] += pieces[0].embedding[1]
    weight_s[head] += pieces[head].head_weight_s
    free_s = () if software.is_blocking else boundary_s
    tied_s, tied_grad_s = tied_message_s(run, cluster, software)
    return StageCosts(
        sides[0],
        sides[1],
        min(free_s, default=0.0),
        weight_share=share,
        tied_s=tied_s,
        tied_grad_s=tied_grad_s,
        boundary_s=() if len(set(free_s)) <= 1 else free_s,
        weight_s=tuple(weight_s),
    )


def _boundary_s(run: Run, cluster: Cluster, software: Software, owner: Sequence[int]) -> tuple[float, ...]:
    """For each boundary between two stages the seconds of one message over it."""
    pairs = list(pairwise(owner))
    routes = {pair: (rank_route(run, cluster, *pair), _is_inside(run, cluster, *pair)) for pair in set(pairs)}
    of_route = {
        route: _transfer_s(run, route[0], software, is_inside=route[1]) for route in dict.fromkeys(routes.values())
    }
    of_pair = {pair: of_route[route] for pair, route in routes.items()}
    return tuple(of_pair[pair] for pair in pairs)


def _is_inside(run: Run, cluster: Cluster, one: int, other: int) -> bool:
    """Whether messages between two pipeline ranks stay on their node.

    In ascending order the slowest boundary sets the pace, so that all are taken for as slow; an order of one's own is
    there to change which ones are.
    """
    if run.pipeline_order is None:
        return run.num_devices <= rank_route(run, cluster, one, other).devices_per_node
    return are_near(run, cluster, one, other)


def tied_message_s(run: Run, cluster: Cluster, software: Software) -> tuple[float, float]:
    """Seconds of sending a tied matrix from the first stage's rank to the last stage's, and its gradient back.

    Each device sends its slice. Zeros where there are no such messages; ``step_terms`` has the reduction that follows
    the pipeline of other programs.
    """
    if not (run.shape.tied and run.pp > 1 and software.lends_tied):
        return 0.0, 0.0
    owner = placement_of(run).rank_by_stage
    route = rank_route(run, cluster, owner[0], owner[-1])
    is_inside = _is_inside(run, cluster, owner[0], owner[-1])
    use, sharing = software.efficiency, route.sharing(run.tp * run.dp)
    held = run.shape.embedding_parameters / run.tp
    weights_s, gradient_s = (
        route.p2p_s(held * size, is_inside=is_inside, sharing=sharing, efficiency=use.p2p) + use.exchange_s
        for size in (run.element_bytes, software.gradient_bytes)
    )
    return weights_s, gradient_s


def _uneven_layers_s(run: Run, cluster: Cluster, software: Software, owner: Sequence[int]) -> list[tuple[float, float]]:
    """For each stage the seconds of its layers, forward and backward, where each layer says what it recomputes."""
    stages = layers_by_recompute(run, software)
    each_s = {
        kind: [pieces.layer for pieces in rank_pieces(alike, cluster, software)]
        for kind, alike in kinds_of(stages).items()
    }
    return [
        (
            sum(count * each_s[alike.recompute][rank][0] for alike, count in stage),
            sum(count * each_s[alike.recompute][rank][1] for alike, count in stage),
        )
        for stage, rank in zip(stages, owner, strict=True)
    ]


def _transfer_s(run: Run, route: Cluster, software: Software, *, is_inside: bool) -> float:
    """Seconds of one message between pipeline ranks, which are dp x tp ranks apart if they are neighbors.

    Between nodes a device sends through its own adapter (``Cluster.sharing``), though nobody else uses the others.
    """
    if run.pp == 1:
        return 0.0
    measured_s = piece_seconds(run, route, software).message_s
    # Processes that share cores carry their messages themselves: what that takes of a core was measured.
    if is_inside and measured_s:
        return measured_s
    # Each tensor-parallel rank sends its part: Megatron's scatter/gather (arXiv 2104.04473, section 4.1), and with
    # sequence parallelism each has but a part.
    is_cut = run.tp > 1 and (software.scatter_gather or run.sequence_parallel)
    message = run.tokens * run.shape.hidden * run.element_bytes / (run.tp if is_cut else 1)
    use, sharing = software.efficiency, route.sharing(run.tp * run.dp)
    seconds = route.p2p_s(message, is_inside=is_inside, sharing=sharing, efficiency=use.p2p)
    # Otherwise one after the other.
    return (seconds + use.exchange_s) * (1 if software.is_both_ways else 2)


def drain_s(run: Run, software: Software, costs: StageCosts) -> float:
    """Seconds that a pipeline was observed to fill and drain longer than its schedule explains."""
    # Beyond the sequences that it was observed with, nothing is known of it.
    if run.pp == 1 or run.seq > software.drain_seq:
        return 0.0
    slot_s = max(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))
    return software.extra_drain_slots * slot_s


@dataclass(frozen=True)
class StepTerms:
    """Seconds that a step takes outside the pipeline.

    Attributes:
        reduce_s: reduction of gradients that nothing hides, and gather of updated weights.
        tied_s: reduction of the gradients of an embedding that the first and the last stage share, where it has to
            follow the pipeline.
        optimizer_s: update of the weights.
        fixed_s: everything that does not depend on sizes.
    """

    reduce_s: float
    tied_s: float
    optimizer_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.reduce_s + self.tied_s + self.optimizer_s + self.fixed_s


def stage_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Parameters of each stage that one device holds; of this program exactly, on the device with the largest share.

    A tied embedding is with the first stage and with the last; with the first alone if there is one rank, or if the
    program lends it to the last one for a step.
    """
    return _parameters(run, software, stage_layers(run, software)[0])


def gathered_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Parameters of each stage that one device has whole while it computes the stage, where weights are sharded.

    Where collectives have a lane, schedules gather whole stages; other programs a few layers of one
    (``Software.gathered_layers``).
    """
    counts, _ = stage_layers(run, software)
    if not software.has_reduction_lane:
        counts = tuple(min(count, software.gathered_layers) for count in counts)
    return _parameters(run, software, counts)


def _parameters(run: Run, software: Software, counts: Sequence[int]) -> tuple[float, ...]:
    """Parameters of so many layers of each stage, with its embedding and its head."""
    shape, (_, head) = run.shape, stage_layers(run, software)
    if software.has_lanes:
        layer, embedding = _split_parameters(run)
        held = [
            float(count * layer + whole)
            for count, whole in zip(counts, replicated_parameters(run, software), strict=True)
        ]
    else:
        each = shape.layer_matrix_parameters / run.tp + 2 * shape.hidden
        held, embedding = [count * each for count in counts], shape.embedding_parameters / run.tp
    held[0] += embedding
    if not (shape.tied and (run.pp == 1 or software.lends_tied)):
        held[head] += embedding
    return tuple(held)


def _split_parameters(run: Run) -> tuple[int, int]:
    """The largest share that a tensor-parallel rank has of a layer's split parameters, and of the embedding."""
    shape, family = run.shape, run.shape.family
    hidden, keys, inner, rows = (
        -(-whole // run.tp) for whole in (shape.hidden, shape.kv_width, shape.ffn, shape.vocab)
    )
    matrices = shape.hidden * (2 * hidden + 2 * keys + (family.gates + 1) * inner)
    biases = hidden + 2 * keys + family.gates * inner if family.has_biases else 0
    return matrices + biases, shape.hidden * rows


def replicated_parameters(run: Run, software: Software) -> tuple[int, ...]:
    """Parameters of each stage that every tensor-parallel rank holds whole.

    Norms, the biases of a layer's two matrices whose results are summed, and the table of learned positions.
    """
    shape, (counts, head) = run.shape, stage_layers(run, software)
    family = shape.family
    each = 2 * family.norm_vectors + (2 if family.has_biases else 0)
    held = [count * each * shape.hidden for count in counts]
    held[0] += 0 if family.is_rotary else run.seq * shape.hidden
    held[head] += family.norm_vectors * shape.hidden
    return tuple(held)


def rank_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Parameters that one device of each pipeline rank holds."""
    held = [0.0] * run.pp
    owner = placement_of(run).rank_by_stage
    for rank, parameters in zip(owner, stage_parameters(run, software), strict=True):
        held[rank] += parameters
    return tuple(held)


def stage_collectives_s(run: Run, cluster: Cluster, software: Software) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage the seconds of gathering its weights, and of reducing its gradient, where its rank stands.

    Raises:
        UserError: the cluster has not so many devices.
    """
    every = rank_parts(run, cluster)
    parts = [every[rank] for rank in placement_of(run).rank_by_stage]
    held = list(zip(parts, stage_parameters(run, software), replicated_parameters(run, software), strict=True))
    gathers = tuple(gather_s(run, part, software, parameters) for part, parameters, _ in held)
    reductions = tuple(
        reduce_s(run, part, software, parameters) + sum_replicated_s(run, part, software, replicated)
        for part, parameters, replicated in held
    )
    return gathers, reductions


def step_terms(run: Run, cluster: Cluster, software: Software, backward_s: float) -> StepTerms:
    """What follows the pipeline: each part of it on the rank where it takes longest.

    Where collectives have a lane, gradients are reduced and weights are gathered beside the pipeline, not after it.

    Args:
        run: what is trained.
        cluster: where.
        software: with what.
        backward_s: seconds of a rank's backward of the last micro-batch, which can hide a reduction.
    """
    use = software.efficiency
    most: dict[Cluster, float] = {}
    for part, held in zip(rank_parts(run, cluster), rank_parameters(run, software), strict=True):
        most[part] = max(held, most.get(part, 0.0))
    exposed_s = 0.0
    if not software.has_reduction_lane:
        exposed_s = max(_exposed_s(run, part, software, held, backward_s) for part, held in most.items())
    tied_s = 0.0
    if run.shape.tied and run.pp > 1 and not software.lends_tied:
        # On looped placements embedding and head are at the two ends of the pipeline.
        route = rank_route(run, cluster, 0, run.pp - 1)
        pair = Group(2, 2 if run.num_devices <= route.devices_per_node else 1, route.devices_per_node)
        message = run.shape.embedding_parameters / run.tp * software.gradient_bytes
        tied_s = route.collective_s("all_reduce", message, pair, use.data_bus)
    crowding = cluster.crowding(run.num_devices)
    return StepTerms(exposed_s * crowding, tied_s * crowding, _update_s(run, cluster, software), use.step_s)


def _exposed_s(run: Run, part: Cluster, software: Software, parameters: float, backward_s: float) -> float:
    """Seconds of a rank's collectives after the pipeline that nothing hides."""
    whole_s = reduce_s(run, part, software, parameters)
    # A gather has nothing to hide behind: the weights change only after the last backward.
    return whole_s - min(whole_s, software.overlap * backward_s) + gather_s(run, part, software, parameters)


def _update_s(run: Run, cluster: Cluster, software: Software) -> float:
    """Seconds of updating the weights: of the rank that has most to do, or, where cores are shared, of all of them."""
    shards = run.shard_size if run.shard != "none" else 1
    each_s: list[float] = []
    for part, held in zip(rank_parts(run, cluster), rank_parameters(run, software), strict=True):
        if part.update is not None and part.update.precision == run.precision:
            each_s.append(part.update.seconds(held / shards))
        else:
            each_s.append(part.device.memory_s(software.efficiency.optimizer_bytes * (held / shards) + 8 * held))
    return max(*each_s, cluster.crowding(run.num_devices) * sum(each_s) / len(each_s))
