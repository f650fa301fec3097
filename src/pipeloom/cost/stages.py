"""Layers and parameters of each stage of a run."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

from pipeloom.cost.flops import piece_flops
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.software import Division, Software
from pipeloom.schedule import PLACEMENTS, Placement
from pipeloom.workload.adapter import Adapter
from pipeloom.workload.layout import Recompute, frozen_counts, frozen_stages
from pipeloom.workload.model import ModelShape
from pipeloom.workload.model_shape import Experts
from pipeloom.workload.run import Run
from pipeloom.workload.sharing import ranks_of_owners, stages_of_owners


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
    place = run.placement, run.pp, run.loops
    sizes = _balanced(run.shape, run.seq, recompute, place, (run.frozen_pieces, run.adapter))
    return layers_of_pieces(sizes), run.num_stages - 1


# In a search, layouts with different micro-batches, sharding and families share a partition.
@lru_cache(maxsize=4096)
def _balanced(
    shape: ModelShape,
    seq: int,
    recompute: Recompute | tuple[Recompute, ...],
    placement: tuple[str, int, int],
    frozen: tuple[int, Adapter | None],
) -> tuple[int, ...]:
    by_layer = (recompute,) * shape.layers if isinstance(recompute, str) else recompute
    return fastest_partition(piece_flops(shape, seq, by_layer, *frozen), placement_named(*placement))


def frozen_layers(run: Run, software: Software) -> tuple[int, ...]:
    """For each stage the number of its layers that train nothing."""
    if not run.frozen_pieces:
        return (0,) * run.num_stages
    frozen = list(frozen_counts(pieces_of_layers(stage_layers(run, software)[0]), run.frozen_pieces))
    frozen[0] -= 1  # the embedding
    return tuple(frozen)


def num_frozen_stages(run: Run, software: Software) -> int:
    """Number of stages from the first on that train nothing, and run no backward."""
    if not run.frozen_pieces:
        return 0
    return frozen_stages(pieces_of_layers(stage_layers(run, software)[0]), run.frozen_pieces)


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


StageKinds = tuple[tuple[Run, int], ...]
"""The layers of a stage by kind: a run whose layers all recompute and see the same, and their number."""


@lru_cache(maxsize=256)
def layers_by_kind(run: Run, software: Software, *, trained: bool = False) -> tuple[StageKinds, ...]:
    """For each stage its layers by kind: all layers, or those that are trained. Equal stages are one object."""
    counts, _ = stage_layers(run, software)
    left_out = frozen_layers(run, software) if trained else (0,) * len(counts)
    if run.has_equal_layers:
        numbers = [count - out for count, out in zip(counts, left_out, strict=True)]
        of_number: dict[int, StageKinds] = {number: ((run, number),) for number in set(numbers)}
        return tuple(of_number[number] for number in numbers)
    kinds = run.layer_kinds
    alike = {kind: run.alike(kind) for kind in set(kinds)}
    places = zip(pairwise(accumulate(counts, initial=0)), left_out, strict=True)
    parts = [kinds[begin + out : end] for (begin, end), out in places]
    of_part = {part: tuple((alike[kind], count) for kind, count in Counter(part).items()) for part in set(parts)}
    return tuple(of_part[part] for part in parts)


_Value = TypeVar("_Value")


def of_each(stages: Sequence[StageKinds], function: Callable[[StageKinds], _Value]) -> list[_Value]:
    """``function`` of each stage of ``layers_by_kind``, called once for each distinct one: most stages are equal."""
    # By identity: the hash of a run takes longer than what is computed for a stage.
    found = {key: function(stage) for key, stage in {id(stage): stage for stage in stages}.items()}
    return [found[id(stage)] for stage in stages]


def tied_ranks(run: Run) -> tuple[int, int] | None:
    """The pipeline ranks of a tied embedding and head; ``None`` if they are on one rank or not tied."""
    owner = placement_of(run).rank_by_stage
    # On a V the first and the last stage are on the same rank, which has one matrix for both.
    return (owner[0], owner[-1]) if run.shape.tied and owner[0] != owner[-1] else None


def stage_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Number of parameters of each stage on one device; exact for this program, on the device with the largest share.

    A tied embedding counts for the first and the last stage; only for the first if both are on one rank, or if the
    program lends it (``Software.lends_tied``). Layers that share their weights count once, and those that share over
    stages in ``shared_parameters``.
    """
    base = _parameters(run, software, own_layers(run, software))
    if run.adapter is None:
        return base
    return tuple(held + own for held, own in zip(base, _of_adapters(run, software), strict=True))


def own_layers(run: Run, software: Software) -> tuple[int, ...]:
    """For each stage the number of sets of weights of its layers, without those that other stages have, too."""
    counts, sharing = stage_layers(run, software)[0], run.shape.sharing
    if sharing is None:
        return counts
    only = Counter(stages[0] for stages in stages_of_owners(sharing, counts).values() if len(stages) == 1)
    return tuple(only[stage] for stage in range(len(counts)))


def stage_sets(run: Run, software: Software) -> tuple[int, ...]:
    """For each stage the number of sets of weights of its layers, also of those that other stages have, too."""
    counts, sharing = stage_layers(run, software)[0], run.shape.sharing
    if sharing is None:
        return counts
    held = Counter(stage for stages in stages_of_owners(sharing, counts).values() for stage in stages)
    return tuple(held[stage] for stage in range(len(counts)))


def shared_ranks(run: Run, software: Software) -> tuple[tuple[int, ...], ...]:
    """For each set of weights of layers in several stages the pipeline ranks that have it."""
    sharing = run.shape.sharing
    if sharing is None:
        return ()
    owner = placement_of(run).rank_by_stage
    return tuple(ranks_of_owners(sharing, stage_layers(run, software)[0], owner).values())


def shared_layers(run: Run, software: Software) -> tuple[int, ...]:
    """For each pipeline rank the number of sets of weights of layers in several stages; they belong to no stage."""
    held = Counter(rank for ranks in shared_ranks(run, software) for rank in ranks)
    return tuple(held[rank] for rank in range(run.pp))


def layer_parameters(run: Run) -> int:
    """Number of parameters of a layer without experts, on the tensor-parallel rank with most of them."""
    return _in_layer(run, None)


def _of_adapters(run: Run, software: Software) -> tuple[float, ...]:
    """Number of parameters of each stage's adapters on one device."""
    own = None if run.segment == "experts" else run.adapter
    each = 0 if own is None else sum(own.layer_parameters(run.shape, run.tp))
    return tuple(float(count * each) for count in _trained_layers(run, software))


def _trained_layers(run: Run, software: Software) -> list[int]:
    """For each stage the number of its layers that train."""
    counts = stage_layers(run, software)[0]
    return [count - frozen for count, frozen in zip(counts, frozen_layers(run, software), strict=True)]


def trained_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """``stage_parameters`` of the pieces, or adapters, that are trained."""
    if not run.frozen_pieces:
        return stage_parameters(run, software)
    assert software.has_lanes, f"{software.name} freezes nothing"
    if run.adapter is not None:
        return _of_adapters(run, software)
    # The rest is frozen: layers, and the embedding on the first stage.
    frozen = _of_layers(run, software, frozen_layers(run, software), _in_layer)
    frozen[0] += 0 if run.segment == "experts" else _embedding(run) + _positions(run)
    whole = stage_parameters(run, software)
    return tuple(float(held - less) for held, less in zip(whole, frozen, strict=True))


def gathered_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """For each stage the parameters that are gathered on one device while it computes the stage, with sharded weights.

    Programs with a reduction lane gather whole stages, and so do those that gather once a step; others a few layers
    (``Software.gathered_layers``).
    """
    counts, _ = stage_layers(run, software)
    if not software.has_reduction_lane and not software.gathers_once(run.num_stages):
        counts = tuple(min(count, software.gathered_layers) for count in counts)
    return _parameters(run, software, counts)


def _parameters(run: Run, software: Software, counts: Sequence[int]) -> tuple[float, ...]:
    """Number of parameters of each stage with ``counts`` layers, including embedding and head."""
    shape, (_, head) = run.shape, stage_layers(run, software)
    if run.segment == "experts":
        return tuple(float(number) for number in _of_layers(run, software, counts, _in_layer))
    if software.has_lanes:
        embedding = _embedding(run)
        held = [float(number) for number in _of_layers(run, software, counts, _in_layer)]
        held[0] += _positions(run)
        held[head] += _head_norm(run)
    else:
        of_experts = shape.expert_parameters if run.segment == "dense" else 0.0
        each = (shape.layer_matrix_parameters - of_experts) / run.tp + shape.kind.layer_norms * shape.hidden
        held, embedding = [count * each for count in counts], shape.embedding_parameters / run.tp
    held[0] += embedding
    if not shape.tied or (tied_ranks(run) is not None and not software.lends_tied):
        held[head] += embedding
    return tuple(held)


def _embedding(run: Run) -> int:
    """The largest number of the embedding's parameters on a tensor-parallel rank."""
    return run.shape.hidden * -(-run.shape.vocab // run.tp)


def _of_layers(
    run: Run, software: Software, counts: Sequence[int], number: Callable[[Run, Experts | None], int]
) -> list[int]:
    """For each stage the sum of ``number`` over its first ``counts`` layers, of a layer with experts or without."""
    shape = run.shape
    if shape.has_equal_layers:
        each = number(run, shape.experts)
        return [count * each for count in counts]
    kinds = number(run, None), number(run, shape.experts)
    sums = list(accumulate((kinds[has_experts] for has_experts in shape.with_experts), initial=0))
    begins = accumulate(stage_layers(run, software)[0], initial=0)
    return [sums[begin + count] - sums[begin] for begin, count in zip(begins, counts, strict=False)]


def _in_layer(run: Run, experts: Experts | None) -> int:
    """The largest number of a layer's parameters on a tensor-parallel rank."""
    if run.segment == "experts":
        return _of_experts(run, experts)
    return _split_in_layer(run, experts) + _replicated_in_layer(run, experts)


def _of_experts(run: Run, experts: Experts | None) -> int:
    """The largest number of the parameters of a layer's experts on a tensor-parallel rank, without shared ones."""
    if experts is None:
        return 0
    return run.own_experts * run.shape.hidden * (run.shape.kind.gates + 1) * -(-experts.ffn // run.tp)


def _split_in_layer(run: Run, experts: Experts | None) -> int:
    """The largest number of a layer's split parameters on a tensor-parallel rank; of one with experts, or without."""
    shape, family = run.shape, run.shape.kind
    queries, keys = (-(-whole // run.tp) for whole in (shape.query_width, shape.kv_width))
    inner = -(-shape.ffn // run.tp)
    if experts is not None:
        inner = -(-experts.shared * experts.ffn // run.tp)
    matrices = shape.kept(shape.hidden * (2 * queries + 2 * keys + (family.gates + 1) * inner))
    matrices += 0 if run.segment == "dense" else _of_experts(run, experts)
    vectors = (queries + 2 * keys) * family.qkv_biases + family.gates * inner * family.mlp_biases
    return matrices + vectors + (queries + keys) * (family.qk_norm == "width")


def replicated_parameters(run: Run, software: Software) -> tuple[int, ...]:
    """Number of parameters of each stage that are replicated over tensor-parallel ranks.

    Without those of adapters: norms, also those of heads; biases of row-parallel matrices, and learned positions.
    """
    counts, (_, head) = own_layers(run, software), stage_layers(run, software)
    held = _of_layers(run, software, counts, _replicated_in_layer)
    held[0] += _positions(run)
    held[head] += _head_norm(run)
    return tuple(held)


def trained_replicated(run: Run, software: Software) -> tuple[int, ...]:
    """``replicated_parameters`` of the pieces, or adapters, that are trained."""
    if run.adapter is not None:
        _, replicated = run.adapter.layer_parameters(run.shape, run.tp)
        return tuple(count * replicated for count in _trained_layers(run, software))
    held, frozen = list(replicated_parameters(run, software)), frozen_layers(run, software)
    held[0] -= _positions(run) if run.frozen_pieces else 0
    still = _of_layers(run, software, frozen, _replicated_in_layer)
    return tuple(one - less for one, less in zip(held, still, strict=True))


def _replicated_in_layer(run: Run, experts: Experts | None) -> int:
    """Number of a layer's parameters that every tensor-parallel rank holds; with experts those of the router, too."""
    shape, family = run.shape, run.shape.kind
    vectors = family.layer_norms * family.norm_vectors + family.output_bias + family.mlp_biases
    return shape.hidden * (vectors + (0 if experts is None else experts.count)) + shape.qk_norm_parameters


def _head_norm(run: Run) -> int:
    """Number of parameters of the norm before the head."""
    return run.shape.kind.norm_vectors * run.shape.hidden


def _positions(run: Run) -> int:
    """Number of parameters of learned positions."""
    return 0 if run.shape.kind.is_rotary else run.seq * run.shape.hidden


def rank_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Number of parameters on one device of each pipeline rank."""
    return with_shared(run, software, parameters_by_rank(run, stage_parameters(run, software)))


def trained_rank_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """``rank_parameters`` of the pieces that are trained."""
    return with_shared(run, software, parameters_by_rank(run, trained_parameters(run, software)))


def with_shared(run: Run, software: Software, by_rank: tuple[float, ...]) -> tuple[float, ...]:
    """Number of parameters of each pipeline rank, with those that its layers share over stages."""
    if run.shape.sharing is None:
        return by_rank
    more = (count * layer_parameters(run) for count in shared_layers(run, software))
    return tuple(held + shared for held, shared in zip(by_rank, more, strict=True))


def parameters_by_rank(run: Run, by_stage: Sequence[float]) -> tuple[float, ...]:
    """Number of parameters of each pipeline rank, from those of each stage."""
    held = [0.0] * run.pp
    for rank, parameters in zip(placement_of(run).rank_by_stage, by_stage, strict=True):
        held[rank] += parameters
    return tuple(held)
