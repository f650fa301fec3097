"""Shards of stages whose optimizer updates whole matrices: no shard cuts one, and their state has shapes of its own."""

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from pipeloom.cost.software import Software
from pipeloom.cost.stages import (
    frozen_layers,
    layer_parameters,
    layers_by_kind,
    own_layers,
    shared_layers,
    stage_layers,
    trained_parameters,
)
from pipeloom.workload.adapter import FIRST, PATHS, SECOND
from pipeloom.workload.model_shape import ModelShape
from pipeloom.workload.optimizers import Shape
from pipeloom.workload.packing import pack
from pipeloom.workload.run import Run

_BLOCK = "feed_forward."
"""Begin of the names of the matrices of a layer's feed-forward block."""


class StageShards(NamedTuple):
    """The shards of a stage on one device.

    Attributes:
        size: elements of each.
        state: elements of optimizer state, for each shard.
        flops: of the update, for each shard.
    """

    size: int
    state: tuple[float, ...]
    flops: tuple[float, ...]


@lru_cache(maxsize=256)
def stage_shards(run: Run, software: Software) -> tuple[StageShards, ...] | None:
    """The shards of each stage; ``None`` where the optimizer's update is elementwise.

    An optimizer that takes vectors as a whole, too, is taken to have vectors of the hidden size only.
    """
    rule = software.optimizer
    if rule is None or rule.matrices is None or not software.has_lanes:
        return None
    among = run.num_shards
    found: list[StageShards] = []
    for stage, parameters in enumerate(trained_parameters(run, software)):
        matrices = _matrices(run, software, stage)
        whole = [(name, shape) for name, shape in matrices if rule.takes_whole(name, shape)]
        rest = int(parameters) - sum(prod(shape) for _, shape in whole)
        if rule.takes_whole("norm.weight", (run.shape.hidden,)):
            whole += [("norm.weight", (run.shape.hidden,))] * (rest // run.shape.hidden)
            rest %= run.shape.hidden
        size, begins = pack([prod(shape) for _, shape in whole], rest, among)
        # Where a shard has no whole parameter there is something else, or padding, with state for each element.
        state, flops = [float(len(rule.state) * size)] * among, [0.0] * among
        for (name, shape), begin in zip(whole, begins, strict=True):
            own = sum(map(prod, rule.state_shapes(name, shape).values()))
            state[begin // size] += own - len(rule.state) * prod(shape)
            flops[begin // size] += rule.matrices.flops(shape)
        found.append(StageShards(size, tuple(state), tuple(flops)))
    return tuple(found)


def _matrices(run: Run, software: Software, stage: int) -> list[tuple[str, Shape]]:
    """Names and shapes of the trained matrices of a stage, without tensor parallelism."""
    shape, (_, head) = run.shape, stage_layers(run, software)
    trained = own_layers(run, software)[stage] - frozen_layers(run, software)[stage]
    own, found = run.adapter, list[tuple[str, Shape]]()
    if own is not None:
        if run.segment == "experts":
            return found
        for target, (inputs, outputs, _) in zip(own.targets, own.widths(shape), strict=True):
            matrix = f"layers.0.{PATHS[target]}"
            found += [(matrix + FIRST, (own.rank, inputs)), (matrix + SECOND, (outputs, own.rank))] * trained
        return found
    # Layers that share their weights are equal.
    kinds = ((run, trained),) if shape.sharing is not None else layers_by_kind(run, software, trained=True)[stage]
    for alike, count in kinds:
        found += _of_layer(alike) * count
    if run.segment == "experts":
        return found
    if stage == 0 and not run.frozen_pieces:
        found.append(("embedding.tokens.weight", (shape.vocab, shape.hidden)))
        if not shape.kind.is_rotary:
            found.append(("embedding.positions.weight", (run.seq, shape.hidden)))
    if stage == head and not shape.tied:
        found.append(("head.output.weight", (shape.vocab, shape.hidden)))
    return found


def _of_layer(run: Run) -> list[tuple[str, Shape]]:
    """Names and shapes of the matrices of a layer in the run's segment, without tensor parallelism."""
    shape, experts = run.shape, run.shape.experts
    found = {} if run.segment == "experts" else dict(shape.matrices)
    if experts is not None:
        found = {name: sizes for name, sizes in found.items() if not name.startswith(_BLOCK)}
        if run.segment != "experts":
            found[f"{_BLOCK}router"] = shape.hidden, experts.count
            found |= _block(shape, "shared", experts.shared * experts.ffn)
        if run.segment != "dense":
            for one in range(run.own_experts):
                found |= _block(shape, f"experts.{one}", experts.ffn)
    return [(f"layers.0.{name}.weight", (outputs, inputs)) for name, (inputs, outputs) in found.items()]


def _block(shape: ModelShape, name: str, inner: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the matrices of a feed-forward block of experts; empty without an inner width."""
    sizes = replace(shape, ffn=inner).matrices if inner else {}
    return {one.replace(_BLOCK, f"{_BLOCK}{name}."): each for one, each in sizes.items() if one.startswith(_BLOCK)}


def shared_on_rank(run: Run, software: Software, rank: int) -> tuple[float, float]:
    """Of a rank's sets of weights of layers in several stages: elements of optimizer state, and FLOPs of the update.

    Each is whole on the rank: such layers are not sharded. 0 where the update is elementwise.
    """
    rule, count = software.optimizer, shared_layers(run, software)[rank]
    if rule is None or rule.matrices is None or not count:
        return 0.0, 0.0
    whole = [(name, shape) for name, shape in _of_layer(run) if rule.takes_whole(name, shape)]
    rest = layer_parameters(run) - sum(prod(shape) for _, shape in whole)
    state = sum(prod(own) for each in whole for own in rule.state_shapes(*each).values()) + len(rule.state) * rest
    return float(count * state), count * sum(rule.matrices.flops(shape) for _, shape in whole)


def state_of_rank(run: Run, software: Software, rank: int, stages: tuple[int, ...]) -> float:
    """Bytes of the optimizer state of whole matrices, and of all else, on the fullest device of a rank.

    0 where the update is elementwise: then ``Software.optimizer_state_bytes`` has it.

    Args:
        run: model and layout.
        software: the training program.
        rank: of the pipeline.
        stages: of the rank, or some of them.
    """
    shards = stage_shards(run, software)
    if shards is None:
        return 0.0
    by_shard = zip(*(shards[stage].state for stage in stages), strict=True)
    shared = 0.0 if run.shape.sharing is None else shared_on_rank(run, software, rank)[0]
    return 4.0 * (max(sum(each) for each in by_shard) + shared)
