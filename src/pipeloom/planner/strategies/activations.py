"""Strategies that make room in a layout whose ranks are short of memory for activations: keep, balance, offload.

Beside recomputing layers of every micro-batch (``planner/settle.py``), a rank may recompute whole stages of as many
micro-batches as it has no room for (``keep``), evict what is needed last to a rank that has room (``balance``), or move
it to the memory of its host (``offload``). What a way costs is not bounded, only estimated, and its schedule takes long
to make: a search tries the few layouts that come first by the estimate.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from pipeloom.cost.exchanges import evict_seconds, offload_seconds
from pipeloom.cost.memory import stage_recomputed_bytes
from pipeloom.errors import UserError
from pipeloom.passes import Moves
from pipeloom.passes.balance import pair_ranks
from pipeloom.planner.bounds import Floats
from pipeloom.planner.settle import TRIES, Candidate, knobs_of
from pipeloom.planner.space import Leaf
from pipeloom.planner.strategies.strategy import STRATEGIES, Left, Strategy
from pipeloom.predict.memory import held_for_backwards, kept_by_stage
from pipeloom.predict.step import compute_schedule
from pipeloom.workload.layout import Way, paired_order

MOST_MOVED = 200
"""Stage inputs of a rank in a step, up to which things are moved: finding when takes longer than anybody waits."""
UNDER_WAY = 3
"""Stage inputs that a rank holds at least where it moves some: one that leaves, one that comes, and the one in use."""


def _too_large(left: Left, way: Way) -> Iterator[Leaf]:
    """Leaves that are too large and in which a way may make room, with every level of sharding by itself."""
    for leaf in left.too_large:
        if leaf.stage_inputs is not None and leaf.cut.arrangement.kept != "some" and _is_possible(leaf, way):
            for level in leaf.sharding.levels:
                yield replace(leaf, sharding=leaf.sharding._replace(levels=(level,)))


def _is_possible(leaf: Leaf, way: Way) -> bool:
    run = leaf.cut.run
    if way == "keep":
        return leaf.cut.arrangement.kept != "full"
    if run.num_microbatches * run.loops > MOST_MOVED:
        return False
    if way == "balance":
        return run.pp > 1
    return all(kind.host is not None for kind, _ in leaf.cut.cluster.kinds(run.num_devices))


def _estimate_s(leaf: Leaf) -> float:
    """Seconds of the step, about; infinite where there is no room even so.

    Each rank does for a share of its micro-batches what the way costs: the share of what it would hold that it has no
    room for. Moving is hidden unless a lane is busy for longer than the step takes, or than it takes to make what has
    to leave.
    """
    share, held = _share(leaf), leaf.stage_inputs
    if share is None or held is None:
        return float("inf")
    bounds, (shard,) = leaf.cut.time, leaf.sharding.levels
    sharded, each_s = bounds.sharded(shard, leaf.sharding.replicate), _way_s(leaf)[bounds.stages]
    more_s = leaf.cut.run.num_microbatches * (share[:, None] * each_s).sum(axis=1)
    if leaf.way == "keep":
        # Moves have lanes of their own, recomputing has not: it makes the rank's work longer instead.
        return max(sharded.step_s, float((bounds.work[0].end_s() + more_s).max()) + sharded.after_s)
    made_s = (held * np.array(leaf.cut.time.placed.costs.forward_s)[bounds.stages]).sum(axis=1)
    # What has to leave before a rank holds the most may take longer than making all of that.
    late_s = float(np.maximum(share * (held * each_s).sum(axis=1) - made_s, 0.0).max())
    return max(sharded.step_s, float(more_s.max())) + late_s


def _share(leaf: Leaf) -> Floats | None:
    """For each rank the share of what it would hold that has to go; ``None`` where that is too much."""
    held, bounds, (shard,) = leaf.stage_inputs, leaf.cut.memory, leaf.sharding.levels
    assert held is not None, "only leaves with closed forms are relieved"
    loss = 1 + leaf.cut.software.fragmentation
    whole = (held * bounds.input_bytes).sum(axis=1) * loss
    missing = bounds.sharded(shard, leaf.sharding.replicate).held_bytes(held) - bounds.rooms
    largest = bounds.input_bytes.max(axis=1) * loss
    # Moved to partners nothing leaves the pipeline: all ranks together need the room for all of it.
    if leaf.way == "balance" and missing.sum() > 0:
        return None
    if (missing > whole - largest * (1 if leaf.way == "keep" else UNDER_WAY)).any():
        return None
    # At least a byte, for ranks whose stages keep nothing.
    return np.clip(missing, 0.0, whole) / np.maximum(whole, 1.0)


def _way_s(leaf: Leaf) -> Floats:
    """For each stage what the way costs for a micro-batch."""
    cut = leaf.cut
    if leaf.way == "keep":
        return np.array(cut.time.placed.costs.forward_s)
    assert leaf.stage_inputs is not None
    sizes = kept_by_stage(cut.run, cut.software)
    if leaf.way == "offload":
        return np.array(offload_seconds(cut.placed, sizes))
    held = (leaf.stage_inputs * cut.memory.input_bytes).sum(axis=1).tolist()
    return np.array(evict_seconds(cut.placed, pair_ranks(held), sizes))


def _plain(leaf: Leaf) -> Candidate | None:
    """The leaf without room made, with what hides exchanges; ``None`` if it fits like that."""
    (shard,) = leaf.sharding.levels
    tried = knobs_of(leaf.choice, shard)
    # Two gradients whole at once, and two stages gathered, hide exchanges; where memory is short, no more.
    knobs = next((knobs for knobs in tried if knobs.gradient_buffers == 2 and knobs.residency <= 2), tried[-1])
    chosen = Candidate(leaf.placed(shard), knobs, leaf)
    return None if chosen.fits else chosen


def _keep(leaf: Leaf) -> Candidate | None:
    """With as many stage inputs kept whole on each rank as it has room for."""
    if (plain := _plain(leaf)) is None:
        return None
    run, choice, schedule = plain.run, plain.knobs.choice, compute_schedule(plain.knobs.choice)
    kept, left = kept_by_stage(run, plain.software), stage_recomputed_bytes(run, plain.software)
    most, keep = list(schedule.peak_stage_inputs), list[int]()
    for rank, room in enumerate(_activation_room(plain)):
        stages = schedule.placement.stages_of(rank)
        whole, input_only = max(kept[stage] for stage in stages), max(left[stage] for stage in stages)
        fits = (room - most[rank] * input_only) / max(1.0, whole - input_only)
        keep.append(min(most[rank], int(max(0.0, fits))))
    for _ in range(TRIES):
        if min(keep) < 1:
            return None
        chosen = replace(plain, knobs=replace(plain.knobs, choice=replace(choice, keep=tuple(keep))))
        free = chosen.free_bytes
        if min(free) >= 0:
            return chosen
        keep = [number - (bytes_ < 0) for number, bytes_ in zip(keep, free, strict=True)]
    return None


def _move(leaf: Leaf) -> Candidate | None:
    """With what has no room moved to partners or to the host; the step decides whether that is enough."""
    if (plain := _plain(leaf)) is None:
        return None
    room = int(min(_activation_room(plain)))  # whole bytes, as a run file has them
    if room <= 0:
        return None
    moves = Moves(balance=leaf.way == "balance", offload=leaf.way == "offload", budget_bytes=room)
    chosen = replace(plain, knobs=replace(plain.knobs, moves=moves))
    # Partners beside each other put pipeline neighbors apart, so neither order is always the faster one.
    candidates = [chosen, *_paired(chosen)]
    seconds = [_step_s(one) for one in candidates]
    return candidates[seconds.index(min(seconds))] if min(seconds) < float("inf") else None


def _paired(chosen: Candidate) -> Iterator[Candidate]:
    """With partners beside each other, where a node has room for both and they are on different ones."""
    run, in_node = chosen.run, chosen.cluster.devices_per_node
    # Else partners reach over nodes however pipeline ranks are ordered.
    if chosen.leaf.way == "balance" and run.num_devices > in_node >= 2 * run.dp * run.tp:
        partners = pair_ranks(held_for_backwards(run, chosen.software, compute_schedule(chosen.knobs.choice)))
        yield chosen.of(replace(run, pipeline_order=paired_order(partners)))


def _step_s(chosen: Candidate) -> float:
    """Seconds of its step; infinite if it does not fit."""
    try:
        prediction = chosen.simulate().prediction
    except UserError:  # what moves does not leave enough room
        return float("inf")
    return prediction.step_time_s if prediction.fits else float("inf")


def _activation_room(chosen: Candidate) -> list[float]:
    """For each rank the bytes that it has for what backwards need, with what the allocator loses taken off."""
    schedule, loss = compute_schedule(chosen.knobs.choice), 1 + chosen.software.fragmentation
    held = held_for_backwards(chosen.run, chosen.software, schedule)
    # ``free_bytes`` already counts what the plain schedule holds; that may be moved.
    return [free / loss + own for free, own in zip(chosen.free_bytes, held, strict=True)]


STRATEGIES.add(
    "keep",
    Strategy(
        summary="recompute the micro-batches that a rank has no room for",
        without="no micro-batch recomputed by itself",
        applies=partial(_too_large, way="keep"),
        estimate=_estimate_s,
        build=_keep,
        is_in=lambda step: step.knobs.choice.keep is not None,
    ),
)
STRATEGIES.add(
    "balance",
    Strategy(
        summary="move activations to ranks that have room",
        without="no activations moved to partners",
        applies=partial(_too_large, way="balance"),
        estimate=_estimate_s,
        build=_move,
        is_in=lambda step: step.knobs.moves.balance,
    ),
)
STRATEGIES.add(
    "offload",
    Strategy(
        summary="move activations to the memory of the host",
        without="no activations moved to the host",
        applies=partial(_too_large, way="offload"),
        estimate=_estimate_s,
        build=_move,
        is_in=lambda step: step.knobs.moves.offload and not step.knobs.moves.balance,
    ),
)
