"""Strategies that make room in a layout whose ranks are short of memory for activations: keep, balance, offload.

Beside recomputing layers of every micro-batch (``planner/settle.py``), a rank may recompute whole stages of as many
micro-batches as it has no room for (``keep``), evict what is needed last to a rank that has room (``balance``), or move
it to the memory of its host (``offload``). What a way costs is not bounded, only estimated, and its schedule takes long
to make: a search tries the few layouts that come first by the estimate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from pipeloom.cost.exchanges import evict_seconds, offload_seconds
from pipeloom.cost.memory import stage_recomputed_bytes
from pipeloom.errors import UserError
from pipeloom.families import Choice
from pipeloom.passes import Moves
from pipeloom.passes.balance import pair_ranks
from pipeloom.planner.bounds import Floats
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.settle import TRIES, free_bytes, orders_of
from pipeloom.planner.space import Leaf
from pipeloom.planner.strategies.strategy import STRATEGIES, Left, Strategy
from pipeloom.predict.memory import held_for_backwards, kept_by_stage
from pipeloom.predict.step import Order, compute_schedule
from pipeloom.workload.layout import Way, paired_order

MOST_MOVED = 200
"""Stage inputs of a rank in a step, up to which things are moved: finding when takes longer than anybody waits."""
UNDER_WAY = 3
"""Stage inputs that a rank holds at least where it moves some: one that leaves, one that comes, and the one in use."""


@dataclass(frozen=True, eq=False)
class Relief:
    """A leaf that is too large, with one way to make room.

    Attributes:
        leaf: with one level of sharding and a closed form for what its ranks hold.
        way: in which room is made.
    """

    leaf: Leaf
    way: Way

    @cached_property
    def estimate_s(self) -> float:
        """Seconds of the step, about; infinite where there is no room even so.

        Each rank does for a share of its micro-batches what the way costs: the share of what it would hold that it has
        no room for. Moving is hidden unless a lane is busy for longer than the step takes, or than it takes to
        make what has to leave.
        """
        share, leaf = self._share, self.leaf
        if share is None:
            return float("inf")
        bounds, (shard,) = leaf.cut.time, leaf.sharding.levels
        sharded = bounds.sharded(shard, leaf.sharding.replicate)
        count, each_s = leaf.cut.run.num_microbatches, self._each_s[bounds.stages]
        more_s = count * (share[:, None] * each_s).sum(axis=1)
        if self.way != "keep":
            # Moves have lanes of their own, recomputing has not: it makes the rank's work longer instead.
            return max(sharded.step_s, float(more_s.max())) + self._late_s(share)
        work = bounds.work[0]
        return max(sharded.step_s, float((work.end_s() + more_s).max()) + sharded.after_s)

    def _late_s(self, share: Floats) -> float:
        """Seconds by which what has to leave before a rank holds the most takes longer than making all of that."""
        stages, held = self.leaf.cut.time.stages, self.leaf.stage_inputs
        assert held is not None, "only leaves with closed forms are relieved"
        made_s = (held * np.array(self.leaf.cut.time.costs.forward_s)[stages]).sum(axis=1)
        leaves_s = share * (held * self._each_s[stages]).sum(axis=1)
        return float(np.maximum(leaves_s - made_s, 0.0).max())

    @cached_property
    def _share(self) -> Floats | None:
        """For each rank the share of what it would hold that has to go; ``None`` where that is too much."""
        leaf, held = self.leaf, self.leaf.stage_inputs
        (shard,) = leaf.sharding.levels
        assert held is not None, "only leaves with closed forms are relieved"
        memory = leaf.cut.memory.sharded(shard, leaf.sharding.replicate)
        loss = 1 + leaf.cut.memory.software.fragmentation
        whole = (held * leaf.cut.memory.input_bytes).sum(axis=1) * loss
        missing = memory.held_bytes(held) - leaf.cut.memory.rooms
        largest = leaf.cut.memory.input_bytes.max(axis=1) * loss
        # Moved to partners nothing leaves the pipeline: all ranks together need the room for all of it.
        if self.way == "balance" and missing.sum() > 0:
            return None
        if (missing > whole - largest * (1 if self.way == "keep" else UNDER_WAY)).any():
            return None
        # At least a byte, for ranks whose stages keep nothing.
        return np.clip(missing, 0.0, whole) / np.maximum(whole, 1.0)

    @cached_property
    def _each_s(self) -> Floats:
        """For each stage what the way costs for a micro-batch."""
        cut = self.leaf.cut
        placed = cut.arrangement.placed.of(cut.run)
        if self.way == "keep":
            return np.array(cut.time.costs.forward_s)
        sizes = kept_by_stage(cut.run, placed.software)
        if self.way == "offload":
            return np.array(offload_seconds(placed, sizes))
        assert self.leaf.stage_inputs is not None
        held = (self.leaf.stage_inputs * cut.memory.input_bytes).sum(axis=1).tolist()
        return np.array(evict_seconds(placed, pair_ranks(held), sizes))

    def build(self) -> Candidate | None:
        """The leaf with everything decided; ``None`` if it does not fit in this way, or fits without it."""
        (shard,) = self.leaf.sharding.levels
        order = _leanest(orders_of(self.leaf.choice, shard))
        plain = Candidate(self.leaf.placed(shard), order)
        if min(free_bytes(plain, self.leaf)) >= 0:
            return None
        return self._keeping(plain) if self.way == "keep" else self._moving(plain)

    def _keeping(self, plain: Candidate) -> Candidate | None:
        """With as many stage inputs kept whole on each rank as it has room for."""
        run, schedule = plain.run, compute_schedule(plain.order.choice)
        kept, left = kept_by_stage(run, plain.software), stage_recomputed_bytes(run, plain.software)
        most, keep = list(schedule.peak_stage_inputs), list[int]()
        for rank, room in enumerate(_activation_room(plain, self.leaf)):
            stages = schedule.placement.stages_of(rank)
            whole, input_only = max(kept[stage] for stage in stages), max(left[stage] for stage in stages)
            fits = (room - most[rank] * input_only) / max(1.0, whole - input_only)
            keep.append(min(most[rank], int(max(0.0, fits))))
        for _ in range(TRIES):
            if min(keep) < 1:
                return None
            chosen = replace(plain, order=replace(plain.order, choice=_kept(plain.order.choice, keep)))
            free = free_bytes(chosen, self.leaf)
            if min(free) >= 0:
                return chosen
            keep = [number - (bytes_ < 0) for number, bytes_ in zip(keep, free, strict=True)]
        return None

    def _moving(self, plain: Candidate) -> Candidate | None:
        """With what has no room moved to partners or to the host; the step decides whether that is enough."""
        room = int(min(_activation_room(plain, self.leaf)))  # whole bytes, as a run file has them
        if room <= 0:
            return None
        moving = Moves(balance=self.way == "balance", offload=self.way == "offload", budget_bytes=room)
        chosen = replace(plain, order=replace(plain.order, moving=moving))
        # Partners beside each other put pipeline neighbors apart, so neither order is always the faster one.
        candidates = [chosen, *self._paired(chosen)]
        seconds = [self._step_s(one) for one in candidates]
        return candidates[seconds.index(min(seconds))] if min(seconds) < float("inf") else None

    def _paired(self, chosen: Candidate) -> Iterator[Candidate]:
        """With partners beside each other, where a node has room for both and they are on different ones."""
        run, cluster = chosen.run, self.leaf.cut.arrangement.cluster
        if self.way != "balance" or run.num_devices <= cluster.devices_per_node:
            return
        partners = pair_ranks(held_for_backwards(run, chosen.software, compute_schedule(chosen.order.choice)))
        # Else partners reach over nodes however pipeline ranks are ordered.
        if 2 * run.dp * run.tp <= cluster.devices_per_node:
            yield chosen.of(replace(run, pipeline_order=paired_order(partners)))

    def _step_s(self, chosen: Candidate) -> float:
        """Seconds of its step; infinite if it does not fit."""
        try:
            prediction = chosen.simulate().prediction
        except UserError:  # what moves does not leave enough room
            return float("inf")
        return prediction.step_time_s if prediction.fits else float("inf")


def _reliefs(left: Left, way: Way) -> Iterator[Relief]:
    """Leaves that are too large with room made in a way, with every level of sharding by itself."""
    for leaf in left.too_large:
        if leaf.stage_inputs is not None and leaf.cut.arrangement.kept != "some" and _is_possible(leaf, way):
            for level in leaf.sharding.levels:
                yield Relief(replace(leaf, sharding=leaf.sharding._replace(levels=(level,)), way=way), way)


def _is_possible(leaf: Leaf, way: Way) -> bool:
    if way == "keep":
        return leaf.cut.arrangement.kept != "full"
    if leaf.cut.run.num_microbatches * leaf.cut.run.loops > MOST_MOVED:
        return False
    if way == "balance":
        return leaf.cut.run.pp > 1
    cluster = leaf.cut.arrangement.cluster
    return all(kind.host is not None for kind, _ in cluster.kinds(leaf.cut.run.num_devices))


def _leanest(orders: list[Order]) -> Order:
    """Two gradients whole at once, and two stages gathered, hide exchanges; where memory is short, no more."""
    return next((order for order in orders if order.gradient_buffers == 2 and order.residency <= 2), orders[-1])


def _activation_room(chosen: Candidate, leaf: Leaf) -> list[float]:
    """For each rank the bytes that it has for what backwards need, with what the allocator loses taken off."""
    schedule, loss = compute_schedule(chosen.order.choice), 1 + chosen.software.fragmentation
    held = held_for_backwards(chosen.run, chosen.software, schedule)
    # ``free`` already counts what the plain schedule holds; that may be moved.
    return [free / loss + own for free, own in zip(free_bytes(chosen, leaf), held, strict=True)]


def _kept(choice: Choice, keep: list[int]) -> Choice:
    return replace(choice, keep=tuple(keep))


STRATEGIES.add(
    "keep",
    Strategy(
        summary="recompute the micro-batches that a rank has no room for",
        without="no micro-batch recomputed by itself",
        attempts=partial(_reliefs, way="keep"),
        is_in=lambda step: step.order.choice.keep is not None,
    ),
)
STRATEGIES.add(
    "balance",
    Strategy(
        summary="move activations to ranks that have room",
        without="no activations moved to partners",
        attempts=partial(_reliefs, way="balance"),
        is_in=lambda step: step.order.moving.balance,
    ),
)
STRATEGIES.add(
    "offload",
    Strategy(
        summary="move activations to the memory of the host",
        without="no activations moved to the host",
        attempts=partial(_reliefs, way="offload"),
        is_in=lambda step: step.order.moving.offload and not step.order.moving.balance,
    ),
)
