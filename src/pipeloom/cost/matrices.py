"""Shards of stages whose optimizer updates whole matrices: no shard cuts one, and their state has shapes of its own."""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from pipeloom.cost.software import Software
from pipeloom.cost.stages import frozen_layers, stage_layers, trained_parameters
from pipeloom.workload.adapter import FIRST, PATHS, SECOND, Adapter, known_targets
from pipeloom.workload.optimizers import Shape
from pipeloom.workload.packing import pack
from pipeloom.workload.run import Run


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
    shape, (counts, head) = run.shape, stage_layers(run, software)
    trained = counts[stage] - frozen_layers(run, software)[stage]
    own = run.adapter or Adapter(rank=1, alpha=1.0, targets=known_targets(shape.kind))
    found: list[tuple[str, Shape]] = []
    for layer in range(trained):
        for target, (inputs, outputs, _) in zip(own.targets, own.widths(shape), strict=True):
            matrix = f"layers.{layer}.{PATHS[target]}"
            if run.adapter is None:
                found.append((f"{matrix}.weight", (outputs, inputs)))
            else:
                found += [(matrix + FIRST, (own.rank, inputs)), (matrix + SECOND, (outputs, own.rank))]
    if run.adapter is not None:
        return found
    if stage == 0 and not run.frozen_pieces:
        found.append(("embedding.tokens.weight", (shape.vocab, shape.hidden)))
        if not shape.kind.is_rotary:
            found.append(("embedding.positions.weight", (run.seq, shape.hidden)))
    if stage == head and not shape.tied:
        found.append(("head.output.weight", (shape.vocab, shape.hidden)))
    return found


def state_of_rank(run: Run, software: Software, stages: tuple[int, ...]) -> float:
    """Bytes of the optimizer state of whole matrices, and of all else, on the fullest device of these stages.

    0 where the update is elementwise: then ``Software.optimizer_state_bytes`` has it.
    """
    shards = stage_shards(run, software)
    if shards is None:
        return 0.0
    by_shard = zip(*(shards[stage].state for stage in stages), strict=True)
    return 4.0 * max(sum(each) for each in by_shard)
