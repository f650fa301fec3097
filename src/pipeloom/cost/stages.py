"""Layers and parameters of each stage of a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from pipeloom.cost.flops import piece_flops
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.software import Division, Software
from pipeloom.schedule import PLACEMENTS, Placement
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run


@lru_cache(maxsize=512)
def placement_named(name: str, pp: int, loops: int) -> Placement:
    """A placement by its name in ``PLACEMENTS``, cached."""
    return PLACEMENTS[name](pp, loops)


def placement_of(run: Run) -> Placement:
    """The placement of a run."""
    return placement_named(run.placement, run.pp, run.loops)


def stage_layers(run: Run, software: Software) -> tuple[tuple[int, ...], int]:
    """Number of layers of each stage of a run, and the stage of the head.

    ``run.layers_by_stage`` if given, else by ``software.partition``. ``balanced`` cuts [embedding, layers, head] so
    that the FLOPs of the slowest rank in a step are minimal (``fastest_partition``).
    """
    if run.layers_by_stage is not None:
        return run.layers_by_stage, run.num_stages - 1
    if software.partition != "balanced":
        return layers_of_stages(run.shape, run.num_stages, software.partition)
    recompute = run.recompute if run.recompute_layers is None else run.recompute_layers
    sizes = _balanced(run.shape, run.seq, recompute, run.placement, (run.pp, run.loops))
    return layers_of_pieces(sizes), run.num_stages - 1


# In a search, layouts with different micro-batches, sharding and families share a partition.
@lru_cache(maxsize=4096)
def _balanced(
    shape: ModelShape, seq: int, recompute: Recompute | tuple[Recompute, ...], placement: str, axes: tuple[int, int]
) -> tuple[int, ...]:
    by_layer = (recompute,) * shape.layers if isinstance(recompute, str) else recompute
    return fastest_partition(piece_flops(shape, seq, by_layer), placement_named(placement, *axes))


def layers_of_pieces(partition: tuple[int, ...]) -> tuple[int, ...]:
    """Number of layers of each stage from its number of pieces; the first piece is the embedding, the last the head."""
    layers = list(partition)
    layers[0] -= 1
    layers[-1] -= 1
    return tuple(layers)


def pieces_of_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """Number of pieces of each stage, as in ``layout.partition``; the inverse of ``layers_of_pieces``."""
    pieces = list(layers)
    pieces[0] += 1
    pieces[-1] += 1
    return tuple(pieces)


def layers_of_stages(shape: ModelShape, num_stages: int, division: Division) -> tuple[tuple[int, ...], int]:
    """Number of layers of each stage, and the stage of the head.

    ``even``: the first stages get the remainder. ``uniform-items``: the list [embedding, layers, norm, head] is
    cut into parts of equal length, the first parts get the remainder (the default of Aleph-Alpha/scaling).
    ``light-ends``: the first and the last stage have one layer less (arXiv 2401.10241, section 5.1). ``by-cost``:
    a stage ends once the layers so far reach its share of the parameters of layers and head (nanotron).
    """
    if division == "by-cost":
        return _by_cost(shape, num_stages)
    assert division != "balanced", "stage_layers: balanced partitions depend on more than the shape"
    ends = {"even": (0, 0), "uniform-items": (1, 2), "light-ends": (1, 1)}[division] if num_stages > 1 else (0, 0)
    items = shape.layers + sum(ends)
    counts = [items // num_stages + (stage < items % num_stages) for stage in range(num_stages)]
    # Embedding and head are items of the divided list, but not layers.
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


@lru_cache(maxsize=256)
def layers_by_recompute(run: Run, software: Software) -> tuple[tuple[tuple[Run, int], ...], ...]:
    """For each stage its layers by recomputation: a run whose layers all recompute the same, and their number."""
    counts, _ = stage_layers(run, software)
    if run.recompute_layers is None:
        return tuple(((run, count),) for count in counts)
    alike = {kind: replace(run, recompute=kind, recompute_layers=None) for kind in set(run.recompute_layers)}
    parts = [run.recompute_layers[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
    return tuple(tuple((alike[kind], count) for kind, count in Counter(part).items()) for part in parts)


def tied_ranks(run: Run) -> tuple[int, int] | None:
    """The pipeline ranks of a tied embedding and head; ``None`` if they are on one rank or not tied."""
    owner = placement_of(run).rank_by_stage
    # On a V the first and the last stage are on the same rank, which has one matrix for both.
    return (owner[0], owner[-1]) if run.shape.tied and owner[0] != owner[-1] else None


def stage_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Number of parameters of each stage on one device; exact for this program, on the device with the largest share.

    A tied embedding counts for the first and the last stage; only for the first if both are on one rank, or if the
    program lends it (``Software.lends_tied``).
    """
    return _parameters(run, software, stage_layers(run, software)[0])


def gathered_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """For each stage the parameters that are gathered on one device while it computes the stage, with sharded weights.

    Programs with a reduction lane gather whole stages, others a few layers (``Software.gathered_layers``).
    """
    counts, _ = stage_layers(run, software)
    if not software.has_reduction_lane:
        counts = tuple(min(count, software.gathered_layers) for count in counts)
    return _parameters(run, software, counts)


def _parameters(run: Run, software: Software, counts: Sequence[int]) -> tuple[float, ...]:
    """Number of parameters of each stage with ``counts`` layers, including embedding and head."""
    shape, (_, head) = run.shape, stage_layers(run, software)
    if software.has_lanes:
        layer, embedding = _split_parameters(run)
        whole = replicated_parameters(run, software)
        held = [float(count * layer + more) for count, more in zip(counts, whole, strict=True)]
    else:
        each = shape.layer_matrix_parameters / run.tp + 2 * shape.hidden
        held, embedding = [count * each for count in counts], shape.embedding_parameters / run.tp
    held[0] += embedding
    if not shape.tied or (tied_ranks(run) is not None and not software.lends_tied):
        held[head] += embedding
    return tuple(held)


def _split_parameters(run: Run) -> tuple[int, int]:
    """The largest number of a layer's split parameters, and of the embedding's, on a tensor-parallel rank."""
    shape, family = run.shape, run.shape.kind
    wholes = (shape.query_width, shape.kv_width, shape.ffn, shape.vocab)
    queries, keys, inner, rows = (-(-whole // run.tp) for whole in wholes)
    matrices = shape.hidden * (2 * queries + 2 * keys + (family.gates + 1) * inner)
    vectors = (queries + 2 * keys) * family.qkv_biases + family.gates * inner * family.mlp_biases
    vectors += (queries + keys) * (family.qk_norm == "width")
    return matrices + vectors, shape.hidden * rows


def replicated_parameters(run: Run, software: Software) -> tuple[int, ...]:
    """Number of parameters of each stage that are replicated over tensor-parallel ranks.

    Norms, also those of heads; biases of row-parallel matrices, and learned positions.
    """
    shape, (counts, head) = run.shape, stage_layers(run, software)
    family = shape.kind
    each = shape.hidden * (2 * family.norm_vectors + family.output_bias + family.mlp_biases) + shape.qk_norm_parameters
    held = [count * each for count in counts]
    held[0] += 0 if family.is_rotary else run.seq * shape.hidden
    held[head] += family.norm_vectors * shape.hidden
    return tuple(held)


def rank_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Number of parameters on one device of each pipeline rank."""
    held = [0.0] * run.pp
    owner = placement_of(run).rank_by_stage
    for rank, parameters in zip(owner, stage_parameters(run, software), strict=True):
        held[rank] += parameters
    return tuple(held)
