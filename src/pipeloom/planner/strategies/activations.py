"""Strategies for layouts whose activations do not fit: keep, balance, offload.

Besides recomputing layers of every micro-batch (``planner/candidate.py``), a rank may recompute whole stages for the
micro-batches that do not fit (``keep``), evict the activations that are used last to a rank with free memory
(``balance``), or offload them to host memory (``offload``). Their costs are estimates, not bounds, and their schedules
take long to make, so the search tries the few layouts with the lowest estimates.
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
from pipeloom.planner.candidate import TRIES, Candidate, knobs_of
from pipeloom.planner.space import Leaf
from pipeloom.planner.strategies.strategy import STRATEGIES, SearchState, Strategy, one_rank_limit
from pipeloom.predict.memory import held_for_backwards, kept_by_stage
from pipeloom.predict.step import compute_schedule
from pipeloom.workload.layout import StrategyName, paired_order

MOST_MOVED = 200
"""Most stage inputs of a rank in a step for which activations are moved; placing the moves of more takes too long."""
UNDER_WAY = 3
"""Least stage inputs on a rank that moves some: one that leaves, one that arrives, and the one in use."""


def _infeasible(state: SearchState, strategy: StrategyName) -> Iterator[Leaf]:
    """Leaves that do not fit and that a strategy may make fit, one for each sharding level.

    Without those that are too slow as they are: no strategy of this module makes a step faster.
    """
    for leaf in state.infeasible:
        if leaf.stage_inputs is not None and leaf.cut.arrangement.recomputed != "some" and _may_help(leaf, strategy):
            for level in leaf.sharding.levels:
                if leaf.cut.time.sharded(level, leaf.sharding.replicate).step_s <= state.fastest_s:
                    yield replace(leaf, sharding=leaf.sharding._replace(levels=(level,)))


def _may_help(leaf: Leaf, strategy: StrategyName) -> bool:
    run = leaf.cut.run
    if strategy == "keep":
        return leaf.cut.arrangement.recomputed != "full"
    # What experts that ranks share keep depends on the tokens that arrive, so it has no budget.
    if run.num_microbatches * run.loops > MOST_MOVED or len(run.segments) > 1:
        return False
    if strategy == "balance":
        return run.pp > 1
    return all(kind.host is not None for kind, _ in leaf.cut.cluster.kinds(run.num_devices))


def _estimate_s(leaf: Leaf) -> float:
    """Estimated seconds of a step; infinite if it does not fit with the strategy either.

    Each rank pays the cost of the strategy for the share of its activations that does not fit. Moves are hidden unless
    their link is busy for longer than the step, or than the forwards that produce these activations.
    """
    share, held = _share(leaf), leaf.stage_inputs
    if share is None or held is None:
        return float("inf")
    bounds, (shard,) = leaf.cut.time, leaf.sharding.levels
    sharded, each_s = bounds.sharded(shard, leaf.sharding.replicate), _cost_s(leaf)[bounds.stages.by_rank]
    more_s = leaf.cut.run.num_microbatches * (share[:, None] * each_s).sum(axis=1)
    if leaf.strategy == "keep":
        # Moves overlap with compute; recomputation does not.
        return max(sharded.step_s, float((bounds.work[0].end_s() + more_s).max()) + sharded.after_s)
    made_s = (held * np.array(leaf.cut.time.stages.placed.costs.forward_s)[bounds.stages.by_rank]).sum(axis=1)
    # The moves before a rank's peak may take longer than the forwards up to the peak.
    late_s = float(np.maximum(share * (held * each_s).sum(axis=1) - made_s, 0.0).max())
    return max(sharded.step_s, float(more_s.max())) + late_s


def _least_s(leaf: Leaf) -> float:
    """Lower bound of the estimate: the step without the strategy, whose bound decided whether it applies."""
    return leaf.twig.bound_s


def _share(leaf: Leaf) -> Floats | None:
    """For each rank the share of its activations that does not fit; ``None`` if it is too large for the strategy."""
    held, bounds, (shard,) = leaf.stage_inputs, leaf.cut.memory, leaf.sharding.levels
    assert held is not None, "only leaves with closed forms are relieved"
    loss = 1 + leaf.cut.software.fragmentation
    # What the loss keeps stays where it is.
    whole = (held * bounds.stage_bytes).sum(axis=1) * loss
    missing = bounds.sharded(shard, leaf.sharding.replicate).held_bytes(held) - bounds.capacity_bytes
    largest = bounds.stage_bytes.max(axis=1) * loss
    # Activations on partners stay in the pipeline, so the memory of all ranks together must be enough.
    if leaf.strategy == "balance" and missing.sum() > 0:
        return None
    if (missing > whole - largest * (1 if leaf.strategy == "keep" else UNDER_WAY)).any():
        return None
    # At least a byte, for ranks whose stages keep nothing.
    return np.clip(missing, 0.0, whole) / np.maximum(whole, 1.0)


def _cost_s(leaf: Leaf) -> Floats:
    """For each stage the seconds that the strategy takes for a micro-batch."""
    cut = leaf.cut
    if leaf.strategy == "keep":
        return np.array(cut.time.stages.placed.costs.forward_s)
    assert leaf.stage_inputs is not None
    sizes = kept_by_stage(cut.run, cut.software)
    if leaf.strategy == "offload":
        return np.array(offload_seconds(cut.placed, sizes))
    held = (leaf.stage_inputs * cut.memory.stage_bytes).sum(axis=1).tolist()
    return np.array(evict_seconds(cut.placed, pair_ranks(held), sizes))


def _plain(leaf: Leaf) -> Candidate | None:
    """The leaf without the strategy, with knobs that hide collectives; ``None`` if it fits already."""
    (shard,) = leaf.sharding.levels
    placed = leaf.placed(shard)
    tried = knobs_of(leaf.choice, placed.run)
    # Two gradient buffers and two gathered stages hide collectives; more would only take memory.
    knobs = next((knobs for knobs in tried if knobs.gradient_buffers == 2 and knobs.residency <= 2), tried[-1])
    chosen = Candidate(placed, knobs, leaf)
    return None if chosen.fits else chosen


def _keep(leaf: Leaf) -> Candidate | None:
    """The leaf with as many micro-batches on each rank as fit kept with all their activations."""
    if (plain := _plain(leaf)) is None:
        return None
    run, choice, schedule = plain.run, plain.knobs.choice, compute_schedule(plain.knobs.choice)
    kept, left = kept_by_stage(run, plain.software), stage_recomputed_bytes(run, plain.software)
    most, keep = list(schedule.peak_stage_inputs), list[int]()
    for rank, room in enumerate(plain.activation_room):
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
    """The leaf with activations moved to partners or to the host; ``None`` if it does not fit."""
    if (plain := _plain(leaf)) is None:
        return None
    room = int(min(plain.activation_room))  # whole bytes, as a run file has them
    if room <= 0:
        return None
    moves = Moves(balance=leaf.strategy == "balance", offload=leaf.strategy == "offload", budget_bytes=room)
    chosen = replace(plain, knobs=replace(plain.knobs, moves=moves))
    # If partners are neighbors, consecutive pipeline ranks are not, so either order may be faster.
    candidates = [chosen, *_paired(chosen)]
    seconds = [_step_s(one) for one in candidates]
    return candidates[seconds.index(min(seconds))] if min(seconds) < float("inf") else None


def _paired(chosen: Candidate) -> Iterator[Candidate]:
    """The candidate with partners on the same node, if both fit on one."""
    run, in_node = chosen.run, chosen.cluster.devices_per_node
    # Otherwise partners are on different nodes in any order of pipeline ranks.
    if chosen.leaf.strategy == "balance" and run.num_devices > in_node >= 2 * run.stage_devices:
        partners = pair_ranks(held_for_backwards(run, chosen.software, compute_schedule(chosen.knobs.choice)))
        yield chosen.of(replace(run, pipeline_order=paired_order(partners)))


def _step_s(chosen: Candidate) -> float:
    """Step time; infinite if it does not fit."""
    try:
        prediction = chosen.simulate().prediction
    except UserError:  # the moves do not free enough memory
        return float("inf")
    return prediction.step_time_s if chosen.has_room_for(prediction) else float("inf")


STRATEGIES.add(
    "keep",
    Strategy(
        summary="recompute the micro-batches that do not fit a rank",
        without="no micro-batch recomputed by itself",
        applies=partial(_infeasible, strategy="keep"),
        estimate=_estimate_s,
        least=_least_s,
        build=_keep,
        is_in=lambda step: step.knobs.choice.keep is not None,
    ),
)
STRATEGIES.add(
    "balance",
    Strategy(
        summary="move activations to ranks with free memory",
        without="no activations moved to partners",
        applies=partial(_infeasible, strategy="balance"),
        estimate=_estimate_s,
        least=_least_s,
        build=_move,
        is_in=lambda step: step.knobs.moves.balance,
        limit=one_rank_limit,
        takes_frozen=False,
    ),
)
STRATEGIES.add(
    "offload",
    Strategy(
        summary="move activations to the memory of the host",
        without="no activations moved to the host",
        applies=partial(_infeasible, strategy="offload"),
        estimate=_estimate_s,
        least=_least_s,
        build=_move,
        is_in=lambda step: step.knobs.moves.offload and not step.knobs.moves.balance,
        takes_frozen=False,
    ),
)
