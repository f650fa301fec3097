"""Lower bounds of step time and memory for any schedule, in closed form.

They never exceed the simulated values (``tests/planner/test_bounds.py``), so the search may prune by them. In arrays,
ranks are rows and their stages are columns.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.exchanges import data_parallel_s, step_terms
from pipeloom.cost.memory import (
    kept_bytes,
    kept_logits,
    logits_bytes,
    message_bytes,
    pending_logits,
    stage_kept_bytes,
    stage_pending_bytes,
    working_bytes,
)
from pipeloom.cost.pieces import PieceSeconds
from pipeloom.cost.placed import OfPlaced
from pipeloom.cost.stages import num_frozen_stages, stage_layers
from pipeloom.planner.buffers import NO_ROOM, buffers_of, kept_state_bytes, recomputing_buffers_of, stages_by_rank
from pipeloom.planner.work import Floats, InFlight, StageTimes, Work, least_work_s
from pipeloom.predict.memory import Room, num_peers
from pipeloom.recipe import Knobs
from pipeloom.schedule import Kind
from pipeloom.schedule.facts import Graph
from pipeloom.schedule.kinds import KINDS
from pipeloom.workload.layout import Shard

_ROUNDING = 1e-9
"""Relative difference of sums in another order."""


@dataclass(frozen=True, eq=False)
class Bounds(OfPlaced):
    """Lower bounds of all steps with the same stages, for any schedule and any sharding.

    Attributes:
        placed: a run with its stages; its sharding is ignored.
        splits: whether schedules split backwards; then no other rank waits for weight gradients.
        headroom: fraction of the memory of every device that stays free.
    """

    splits: bool = False
    headroom: float = 0.0

    @property
    def least_step_s(self) -> float:
        """Lower bound of the step time in seconds for any sharding, without collectives."""
        level: Shard = "full" if self.run.data_ranks > 1 else "none"
        terms = step_terms(self.sharded(level).placed, max(self.placed.costs.backward_s))
        pipeline_s = max(float(work.end_s().max()) for work in self.work)
        return pipeline_s + terms.optimizer_s + terms.tied_s + terms.shared_s + terms.average_s + terms.fixed_s

    def sharded(self, shard: Shard, replicate: int = 1) -> "Sharded":
        """The bounds with a sharding level, in ``replicate`` copies."""
        key = shard, replicate
        if key not in self._sharded:
            placed = self.placed.with_sharding_of(self.run.changed(shard=shard, replicate=replicate))
            self._sharded[key] = Sharded(placed, self)
        return self._sharded[key]

    def recomputing_s(self, layers: Floats) -> Floats:
        """Lower bounds of the pipeline in seconds, without collectives.

        Args:
            layers: [schedule, rank] recomputed layers.
        """
        ends_s, each_s = self._recomputing
        # Any rank recomputes at least one.
        return np.maximum((ends_s + layers * each_s).max(axis=1), (ends_s + each_s).min())

    @cached_property
    def _recomputing(self) -> tuple[Floats, Floats]:
        """For each rank the end of its work, and the seconds of a step for each layer that it recomputes."""
        return self.work[0].end_s(), np.array(self.placed.recompute_s) * self.run.num_microbatches

    @cached_property
    def capacity_bytes(self) -> Floats:
        """For each rank the memory of one device without the headroom."""
        return np.array(self.placed.device_bytes) * (1 - self.headroom)

    def missing_bytes(self, held_bytes: Floats) -> float:
        """The most bytes that a rank's device lacks; negative if all fit."""
        return float((held_bytes - self.capacity_bytes).max())

    @cached_property
    def _sharded(self) -> "dict[tuple[Shard, int], Sharded]":
        return {}

    @cached_property
    def stages(self) -> NDArray[np.int64]:
        """[rank, number] -> stage."""
        return stages_by_rank(self.placed.placement)

    @cached_property
    def _num_frozen(self) -> int:
        """Number of stages that train nothing."""
        return num_frozen_stages(self.run, self.software)

    @property
    def has_frozen_stages(self) -> bool:
        """Whether some stages train nothing, so that they have no backward."""
        return self._num_frozen > 0

    @cached_property
    def _times(self) -> "StageTimes":
        costs, stages = self.placed.costs, range(self.placed.placement.num_stages)
        crosses = np.array([0.0, *(a != b for a, b in pairwise(self.placed.placement.rank_by_stage))])
        # No gradient passes them back; a bound may leave out the way there, too.
        crosses[1 : self._num_frozen + 1] = 0.0
        hops_s = np.cumsum(crosses) * costs.transfer_s
        if costs.boundary_s:
            hops_s = np.cumsum(crosses * [0.0, *costs.boundary_s])
        weights_s = np.array([costs.half_s(stage) if self.splits else 0.0 for stage in stages])
        return StageTimes(np.array(costs.forward_s), np.array(costs.backward_s), weights_s, hops_s)

    @cached_property
    def work(self) -> "tuple[Work, Work]":
        """The work of each rank, and of each stage as if it were alone on a rank."""
        times, count = self._times, self.run.num_microbatches
        arrival_s, return_s = (
            np.cumsum(seconds) - seconds + times.hops_s for seconds in (times.forward_s, times.inputs_s)
        )
        return_s += times.weights_s[0]
        if self.software.overlaps_steps:  # ranks fill and drain while others are in another step
            arrival_s, return_s = 0 * arrival_s, 0 * return_s
        busy_s, weights_s, first = count * times.both_s, count * times.weights_s, self.stages[:, 0]
        return (
            Work(arrival_s[first], return_s[first], *(of[self.stages].sum(axis=1) for of in (busy_s, weights_s))),
            Work(arrival_s, return_s, busy_s, weights_s),
        )

    @cached_property
    def busiest_rank(self) -> int:
        """The rank whose work ends last."""
        return int(self.work[0].end_s().argmax())

    def in_flight_bound_s(self, in_flight: Floats) -> Floats:
        """Lower bounds of the pipeline in seconds for schedules whose ranks hold at most these stage inputs.

        Before its first gradient arrives, a rank runs at most as many forwards as it holds inputs; after its last
        forward, at most as many backwards. Each time it waits for a full traversal of the other stages.

        Args:
            in_flight: [schedule, rank, number of its stage] stage inputs at the rank's peak.
        """
        # Traversals are counted from the start of the first rank; stages that train nothing hold no inputs.
        if self.software.overlaps_steps or self._num_frozen:
            return np.zeros(len(in_flight))
        held, count, (forward_s, backward_s, longest_s, around_s) = in_flight.sum(axis=2), *self._in_flight_terms
        between_s = count * (forward_s + backward_s) - held * longest_s.sum(axis=0)
        most_s = held * longest_s[0] * (1 + _ROUNDING)  # equal sums of equal stages may differ in their last digits
        has_both = count * forward_s > most_s  # otherwise the last forward may come before any gradient
        return ((around_s + np.maximum(between_s, 0.0)) * has_both).max(axis=1)

    @cached_property
    def _in_flight_terms(self) -> tuple[int, tuple[Floats, ...]]:
        """Micro-batches; for each rank seconds of forwards, backwards, the longest of each, and both traversals."""
        times, last = self._times, self.stages[:, -1]
        each = np.array([times.forward_s[self.stages], times.backward_s[self.stages]])
        around_s = times.first_gradient_s[last] + times.drain_s[last]
        return self.run.num_microbatches, (*each.sum(axis=2), each.max(axis=2), around_s)

    @cached_property
    def stage_bytes(self) -> Floats:
        """[rank, number] bytes that a micro-batch keeps on a stage for its backward, without those of the loss.

        If backwards are split, the smaller of the bytes before and between the halves.
        """
        kept = np.array(stage_kept_bytes(self.run, self.software))
        if self.splits:
            kept = np.minimum(kept, stage_pending_bytes(self.run, self.software))
        return kept[self.stages]

    @cached_property
    def input_bytes(self) -> Floats:
        """``stage_bytes`` with those of the loss."""
        run, software = self.run, self.software
        loss = kept_logits(run, software)
        if self.splits:
            loss = min(loss, pending_logits(run, software))
        return self.stage_bytes + loss * (self.stages == stage_layers(run, software)[1])

    @cached_property
    def layer_bytes(self) -> tuple[NDArray[np.int64], float, float]:
        """[rank, number of its stage] layers; the bytes that a recomputed layer saves, and those it needs once."""
        run, software = self.run, self.software
        full, layers = replace(run, recompute="full"), np.array(self.placed.layers)
        lost = 1 + software.fragmentation
        each = (kept_bytes(run, software) - kept_bytes(full, software)) * lost
        more = working_bytes(full, software) - working_bytes(run, software)
        return layers[self.stages], each, more * lost

    @cached_property
    def received_bytes(self) -> Floats:
        """For each rank the bytes of the buffers for messages of whole sequences."""
        each = Knobs.receive_buffers * message_bytes(self.run, self.software)
        return num_peers(self.placed.placement).astype(np.float64) * each

    @cached_property
    def computing_bytes(self) -> Floats:
        """For each rank the bytes of a layer and of the loss while they compute, as the allocator holds them.

        Without what the loss keeps for the backward, which ``input_bytes`` has.
        """
        run, software = self.run, self.software
        own = np.full(run.pp, working_bytes(run, software))
        head = self.placed.placement.rank_by_stage[stage_layers(run, software)[1]]
        own[head] += logits_bytes(run, software) - kept_logits(run, software)
        return own * (1 + software.fragmentation)


@dataclass(frozen=True)
class AnyStages(OfPlaced):
    """Lower bounds of the steps of a run, whatever its stages. All ranks are taken to be as fast as the fastest one.

    Attributes:
        placed: the run; its loops, layers of stages and sharding are ignored.
        splits: whether schedules split backwards; then no other rank waits for weight gradients.
    """

    splits: bool

    @property
    def step_s(self) -> float:
        """Lower bound of the step time in seconds."""
        # With overlapping steps ranks fill and drain while others are in another step.
        if self.run.pp == 1 or self.software.overlaps_steps:
            return self.busy_s
        return max(self.busy_s, self._mean_work_s + self._arrival_s, self._traversal_s)

    @property
    def busy_s(self) -> float:
        """Lower bound of the step time in seconds without any bubble: the work of the busiest rank."""
        run, lightest = self.run, self._lightest
        busiest_s = least_work_s(run.shape.layers, run.pp, sum(lightest.layer), sum(lightest.head)) + self._fixed_s
        return max(self._mean_work_s, run.num_microbatches * busiest_s)

    @property
    def _mean_work_s(self) -> float:
        """Mean over ranks of the seconds of their work."""
        pieces = self.placed.fastest_pieces
        whole_s = self._embedding_s + self.run.shape.layers * sum(pieces.layer) + sum(pieces.head)
        return self.run.num_microbatches * (whole_s / self.run.pp + self._fixed_s)

    @property
    def _lightest(self) -> PieceSeconds:
        """Seconds of the pieces, where layers differ of the one that takes least."""
        return self.placed.lightest_pieces

    @property
    def _arrival_s(self) -> float:
        """Mean over ranks of the seconds before the first micro-batch arrives and after its gradient has left."""
        run, lightest = self.run, self._lightest
        embedding_s, layer_s = (both[0] if self.splits else sum(both) for both in (lightest.embedding, lightest.layer))
        embedding_s = self._embedding_s if run.frozen_pieces else embedding_s
        layers = min(run.pp - 2, run.shape.layers)  # at least one layer on each rank between the first and the last
        before = layers * (run.pp - 1) - layers * (layers + 1) // 2
        return (embedding_s * (run.pp - 1) + layer_s * before) / run.pp

    @property
    def _traversal_s(self) -> float:
        """Seconds in which one micro-batch passes all stages and its gradient returns."""
        pieces = self.placed.fastest_pieces
        layer_s, head_s = sum(pieces.layer), sum(pieces.head)
        if self.splits:
            layer_s, head_s = layer_s - pieces.weight_s, head_s - pieces.head_weight_s
        return pieces.embedding[0] + self.run.shape.layers * layer_s + head_s

    @property
    def _embedding_s(self) -> float:
        """Seconds of the embedding on the fastest rank; without its backward where it is frozen."""
        both_s = self.placed.fastest_pieces.embedding
        return both_s[0] if self.run.frozen_pieces else sum(both_s)

    @property
    def _fixed_s(self) -> float:
        return self.software.efficiency.microbatch_s


@dataclass(frozen=True, eq=False)
class Sharded(OfPlaced):
    """Lower bounds with one sharding.

    Attributes:
        placed: the run with its sharding.
        bounds: for any sharding.
    """

    bounds: Bounds

    @cached_property
    def after_s(self) -> float:
        """Seconds of the step after the pipeline."""
        return step_terms(self.placed, max(self.bounds.placed.costs.backward_s)).total_s

    @property
    def step_s(self) -> float:
        """Lower bound of the step time in seconds, with whole sequences."""
        return self.sliced_s(1)

    def sliced_s(self, num_slices: int) -> float:
        """Lower bound of the step time in seconds, if even slices of a sequence take as long together as the whole."""
        if num_slices not in self._sliced:
            self._sliced[num_slices] = self._sliced_s(num_slices)
        return self._sliced[num_slices]

    @cached_property
    def _sliced(self) -> dict[int, float]:
        return {}

    def _sliced_s(self, num_slices: int) -> float:
        """Lower bound of the step time in seconds, if even slices of a sequence take as long together as the whole.

        A rank starts when the first micro-batch has passed all stages before it and does all its work; then the last
        gradient returns through these stages, while the gradients of one of its own stages are reduced. The same holds
        for each stage alone. If weights are sharded, the first stage is gathered before all else. Collectives of a rank
        run one after the other. All stages of a rank are gathered before its first backward, so those that are not
        there any more are gathered once more.
        """
        ranks, alone = self.bounds.work
        if not self._has_collectives:
            return float(ranks.end_s(share=1 / num_slices).max()) + self.after_s
        gathers_s, reductions_s = self._collectives_s
        stages = self.bounds.stages
        pipeline_s = gathers_s[0] + max(
            work.end_s(least_s, 1 / num_slices).max()
            for work, least_s in ((ranks, reductions_s[stages].min(axis=1)), (alone, reductions_s))
        )
        lane_s = ((gathers_s + reductions_s)[stages].sum(axis=1) + self._again_s).max()
        return float(max(pipeline_s, lane_s)) + self.after_s

    def exchanging_s(self, gathers: Floats, reductions: Floats) -> float:
        """Lower bound of the step time in seconds from the collectives of the first rank, which run one by one.

        Args:
            gathers: how often each of its stages is gathered.
            reductions: how often the gradient of each is reduced.
        """
        if not self._has_collectives:
            return self.step_s
        gathers_s, reductions_s = (seconds[self.bounds.stages[0]] for seconds in self._collectives_s)
        return max(self.step_s, float(gathers @ gathers_s + reductions @ reductions_s) + self.after_s)

    @property
    def _again_s(self) -> Floats | float:
        """For each rank the least seconds of gathers of stages that it has gathered before."""
        if self.run.sharded != "full" or self.bounds.has_frozen_stages:
            return 0.0
        each_s = np.sort(self._collectives_s[0][self.bounds.stages], axis=1)
        most, _ = buffers_of("full", each_s.shape[1], updates_stages=self.run.updates_stages)[0]
        return each_s[:, : each_s.shape[1] - most].sum(axis=1)

    def in_flight_bound_s(self, in_flight: Floats) -> Floats:
        """Lower bounds of the step time in seconds for schedules whose ranks hold at most these stage inputs.

        Args:
            in_flight: [schedule, rank, number of its stage] stage inputs when a rank holds the most.
        """
        gather_s = self._collectives_s[0][0] if self._has_collectives else 0.0
        return gather_s + self.bounds.in_flight_bound_s(in_flight) + self.after_s

    def row_alone_s(self, graph: Graph, rank: int) -> float:
        """Lower bound of the step time in seconds from the waits of one rank for itself.

        It computes from the arrival of the first micro-batch on, and its last gradient then returns to the first stage.

        Args:
            graph: compute actions, gathers and reductions of the rank.
            rank: whose row has them.
        """
        row, work = graph.facts.row, self.bounds.work[0]
        seconds = self._seconds[row.kind, row.stage]
        gather_s = self._seconds[Kind.UNSHARD.code]
        first = int(row.is_kind(Kind.FORWARD).argmax())
        if not self.software.overlaps_steps:
            # Its own gather runs meanwhile, so only the rest of the way to the rank comes before the first forward.
            own_s = gather_s[row.stage[first]] if row.kind[0] == Kind.UNSHARD.code else 0.0
            seconds[first] += max(0.0, gather_s[0] + work.arrival_s[rank] - own_s)
        _, ends_s = graph.times(seconds)
        returns_s = ends_s[row.is_kind(Kind.BACKWARD, Kind.BACKWARD_INPUT)].max(initial=0.0) + work.return_s[rank]
        return float(max(ends_s.max(), returns_s)) + self.after_s

    def without_messages_s(self, graph: Graph) -> float:
        """Lower bound of the step time in seconds from the waits of a schedule without its messages.

        Args:
            graph: compute actions, gathers and reductions.
        """
        row = graph.facts.row
        starts_s, ends_s = graph.times(self._seconds[row.kind, row.stage])
        if self.software.overlaps_steps:
            first = graph.facts.columns.first[:-1]
            own_s = np.maximum.reduceat(ends_s, first) - np.minimum.reduceat(starts_s, first)
            return float(own_s.max()) + self.after_s
        return float(ends_s.max()) + self.after_s

    @cached_property
    def _seconds(self) -> Floats:
        """[kind, stage] seconds of compute actions, gathers and reductions."""
        costs, stages = self.bounds.placed.costs, range(self.bounds.placed.placement.num_stages)
        forward_s, backward_s = np.array(costs.forward_s), np.array(costs.backward_s)
        weights_s = np.array([costs.half_s(stage) for stage in stages])
        found = {
            Kind.FORWARD: forward_s,
            Kind.BACKWARD: backward_s,
            Kind.BACKWARD_INPUT: backward_s - weights_s,
            Kind.BACKWARD_WEIGHT: weights_s,
        }
        if self._has_collectives:
            found |= dict(zip((Kind.UNSHARD, Kind.REDUCE_GRAD), self._collectives_s, strict=True))
        return np.array([found.get(kind, 0 * forward_s) for kind in KINDS])

    def held_bytes(self, in_flight: Floats | None = None, room: Room = NO_ROOM) -> Floats:
        """For each rank a lower bound of the bytes that a device holds, of one schedule or of several.

        Args:
            in_flight: [..., rank, number of its stage] stage inputs that it holds at once; ``None`` for one of each.
            room: least buffers.
        """
        if room not in self._always:
            self._always[room] = self._always_bytes(room)
        each = self.bounds.input_bytes
        kept = (each if in_flight is None else in_flight * each).sum(axis=-1)
        return self._always[room] + kept * (1 + self.software.fragmentation)

    @property
    def least_bytes(self) -> Floats:
        """For each rank a lower bound of the bytes that a device holds, with one input of its largest stage alone."""
        each = self.bounds.input_bytes
        # Messages of token slices are shorter.
        held = self.held_bytes(0 * each, NO_ROOM._replace(unreduced=1))
        return held + each.max(axis=1) * (1 + self.software.fragmentation)

    @property
    def least_room(self) -> Room:
        """Buffers that every plain layout has."""
        return self.room_of(1, 1)

    def room_of(self, gathered: int, unreduced: int | None) -> Room:
        """So many buffers, and those of messages."""
        return Room(0 if self.software.is_blocking else Knobs.receive_buffers, gathered, unreduced)

    @property
    def recomputing_room(self) -> Room:
        """Buffers of a plain layout that recomputes some layers."""
        run, stages = self.run, self.bounds.stages.shape[1]
        return self.room_of(*recomputing_buffers_of(run.shard, stages, updates_stages=run.updates_stages))

    def layers_to_recompute(self, in_flight: InFlight) -> Floats:
        """[schedule, rank] lower bounds of the layers that must be recomputed to fit a device."""
        layers, each, more = self.bounds.layer_bytes
        held = self.held_bytes(in_flight.inputs, self.recomputing_room)
        room = self.bounds.capacity_bytes
        missing = np.where(held > room, (held + more - room) / each, 0.0)
        if not missing.any():
            return missing
        # Stages with the most inputs first: a layer there saves the most, so these are the fewest layers.
        inputs, order = in_flight.descending, in_flight.order
        counts = np.take_along_axis(np.broadcast_to(layers, order.shape), order, axis=2)
        saved_before = np.cumsum(inputs * counts, axis=2) - inputs * counts
        # A whole number must not become the next one by rounding.
        wanted = np.ceil((missing[..., None] - saved_before) / inputs - 1e-9)
        return np.clip(wanted, 0, counts).sum(axis=2)

    @property
    def _has_collectives(self) -> bool:
        return self.software.has_reduction_lane and self.run.data_ranks > 1

    @cached_property
    def _collectives_s(self) -> tuple[Floats, Floats]:
        """For each stage the seconds of its gather and of its reduction."""
        gathers, reductions = data_parallel_s(self.placed)
        return np.array(gathers), np.array(reductions)

    @cached_property
    def _always(self) -> dict[Room, Floats]:
        return {}

    def _always_bytes(self, room: Room) -> Floats:
        """For each rank the bytes that it holds besides stage inputs."""
        held = kept_state_bytes(self.placed.of_state, room.gathered, room.unreduced) + self.bounds.computing_bytes
        return held + self.bounds.received_bytes if room.receive_buffers else held
