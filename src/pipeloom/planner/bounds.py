"""What a step takes and holds at least, whatever its schedule: closed forms that cost next to nothing.

They are never above what the simulator says (``tests/planner/test_bounds.py``), so that a search may leave out what
they rule out. Ranks and their stages are rows and columns of arrays.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.exchanges import gather_s, reduce_s, step_terms
from pipeloom.cost.memory import (
    kept_bytes,
    lent_bytes,
    logits_bytes,
    stage_kept_bytes,
    stage_pending_bytes,
    state_bytes,
    working_bytes,
)
from pipeloom.cost.placed import OfPlaced, Placed
from pipeloom.cost.stages import gathered_parameters, stage_layers
from pipeloom.schedule import Kind, Placement
from pipeloom.schedule.facts import Graph
from pipeloom.schedule.kinds import KINDS
from pipeloom.workload.layout import Shard

Floats = NDArray[np.float64]
"""An array of seconds, bytes or counts."""
_ROUNDING = 1e-9


@lru_cache(maxsize=1024)
def stages_by_rank(placement: Placement) -> NDArray[np.int64]:
    """[rank, number] -> stage; every rank has equally many."""
    return np.array([placement.stages_of(rank) for rank in range(placement.num_ranks)])


@dataclass(frozen=True, eq=False)
class Bounds(OfPlaced):
    """Bounds of all steps that cut the model into the same stages, for any schedule and any sharding.

    Attributes:
        placed: a run with its stages; its sharding is not looked at.
        splits: whether schedules run the two halves of backwards apart; gradients of weights keep nobody waiting.
    """

    splits: bool = False

    @property
    def any_step_s(self) -> float:
        """Seconds that the step takes at least, whatever is sharded; collectives are left out."""
        level: Shard = "full" if self.run.dp > 1 else "none"
        terms = step_terms(self._with(level, 1), max(self.placed.costs.backward_s))
        own_s = max(float(work.end_s().max()) for work in self.work)
        return own_s + terms.optimizer_s + terms.tied_s + terms.fixed_s

    def sharded(self, shard: Shard, replicate: int = 1) -> "Sharded":
        """The bounds of one sharding.

        Args:
            shard: what is sharded.
            replicate: copies of that.
        """
        key = shard, replicate
        if key not in self._sharded:
            self._sharded[key] = Sharded(self._with(shard, replicate), self)
        return self._sharded[key]

    def recomputing_s(self, layers: Floats) -> float:
        """Seconds of the pipeline at least, if each rank recomputes so many layers; collectives are left out."""
        each_s = np.array(self.placed.recompute_s)
        return float((self.work[0].end_s() + layers * each_s * self.run.num_microbatches).max())

    @cached_property
    def rooms(self) -> Floats:
        """For each rank the bytes that a device of it can hold."""
        return np.array(self.placed.device_bytes)

    def missing_bytes(self, held_bytes: Floats) -> float:
        """What is missing on the device of the rank with the least room left; negative if there is room on all."""
        return float((held_bytes - self.rooms).max())

    @cached_property
    def _sharded(self) -> "dict[tuple[Shard, int], Sharded]":
        return {}

    def _with(self, shard: Shard, replicate: int) -> Placed:
        return self.placed.of(replace(self.run, shard=shard, replicate=replicate))

    @cached_property
    def stages(self) -> NDArray[np.int64]:
        """[rank, number] -> stage."""
        return stages_by_rank(self.placed.placement)

    @cached_property
    def _passage(self) -> "Passage":
        costs, stages = self.placed.costs, range(self.placed.placement.num_stages)
        crosses = np.array([0.0, *(a != b for a, b in pairwise(self.placed.placement.rank_by_stage))])
        hops_s = np.cumsum(crosses) * costs.transfer_s
        if costs.boundary_s:
            hops_s = np.cumsum(crosses * [0.0, *costs.boundary_s])
        weights_s = np.array([costs.half_s(stage) if self.splits else 0.0 for stage in stages])
        return Passage(np.array(costs.forward_s), np.array(costs.backward_s), weights_s, hops_s)

    @cached_property
    def work(self) -> "tuple[Work, Work]":
        """What each rank has to do, and what each stage has, as if it were a rank alone."""
        passage, count = self._passage, self.run.num_microbatches
        there_s, back_s = (
            np.cumsum(seconds) - seconds + passage.hops_s for seconds in (passage.forward_s, passage.inputs_s)
        )
        back_s += passage.weights_s[0]
        if self.software.overlaps_steps:  # ranks fill and drain while others are in another step
            there_s, back_s = 0 * there_s, 0 * back_s
        own_s, later_s, first = count * passage.own_s, count * passage.weights_s, self.stages[:, 0]
        return (
            Work(there_s[first], back_s[first], own_s[self.stages].sum(axis=1), later_s[self.stages].sum(axis=1)),
            Work(there_s, back_s, own_s, later_s),
        )

    def turning_s(self, in_flight: Floats) -> float:
        """Seconds of the pipeline at least, for an order in which ranks hold no more stage inputs than these.

        Before the first gradient comes back to a rank it has run no more forwards than it holds inputs, and behind its
        last forward there are no more backwards to run. Both times it waits for the longest way through all stages.

        Args:
            in_flight: [rank, number of its stage] stage inputs when a rank holds the most.
        """
        if self.software.overlaps_steps:  # the way there and back is from the start of the first rank
            return 0.0
        held, count, (forward_s, backward_s, longest_s, around_s) = in_flight.sum(axis=1), *self._turns
        between_s = count * (forward_s + backward_s) - held * longest_s.sum(axis=0)
        most_s = held * longest_s[0] * (1 + _ROUNDING)  # equal sums of equal stages may differ in their last digits
        has_both = count * forward_s > most_s  # otherwise the last forward may come before any gradient
        return float(((around_s + np.maximum(between_s, 0.0)) * has_both).max())

    @cached_property
    def _turns(self) -> tuple[int, tuple[Floats, ...]]:
        """Micro-batches; for each rank its forwards, backwards, the longest of each, and to the end and back twice."""
        passage, last = self._passage, self.stages[:, -1]
        each = np.array([passage.forward_s[self.stages], passage.backward_s[self.stages]])
        around_s = passage.first_gradient_s[last] + passage.to_the_end_s[last]
        return self.run.num_microbatches, (*each.sum(axis=2), each.max(axis=2), around_s)

    @cached_property
    def input_bytes(self) -> Floats:
        """[rank, number] bytes that a micro-batch keeps on a stage from forward to backward, logits left out.

        Where backwards are split, the least that it keeps until the second half.
        """
        kept = np.array(stage_kept_bytes(self.run, self.software))
        if self.splits:
            kept = np.minimum(kept, stage_pending_bytes(self.run, self.software))
        return kept[self.stages]


@dataclass(frozen=True)
class Passage:
    """What a micro-batch takes through all stages and back.

    Attributes:
        forward_s: for each stage its forward.
        backward_s: for each stage its backward.
        weights_s: for each stage the part of that for which nobody waits.
        hops_s: for each stage the messages from the first stage to it.
    """

    forward_s: Floats
    backward_s: Floats
    weights_s: Floats
    hops_s: Floats

    @property
    def own_s(self) -> Floats:
        """For each stage forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def inputs_s(self) -> Floats:
        """For each stage the part of its backward for which the stage before it waits."""
        return self.backward_s - self.weights_s

    @property
    def first_gradient_s(self) -> Floats:
        """For each stage the seconds until the gradient of the first micro-batch can have come to it."""
        behind_s = self.inputs_s.sum() - np.cumsum(self.inputs_s)
        return self.forward_s.sum() + behind_s + 2 * self.hops_s[-1] - self.hops_s

    @property
    def to_the_end_s(self) -> Floats:
        """For each stage the seconds from its last forward until the first stage has done the last backward."""
        behind_s = self.forward_s.sum() - np.cumsum(self.forward_s)
        return behind_s + self.inputs_s.sum() + 2 * self.hops_s[-1] - self.hops_s + self.weights_s[0]


@dataclass(frozen=True)
class Work:
    """What ranks have to do, or stages.

    Attributes:
        there_s: seconds that a micro-batch takes to the first stage of each.
        back_s: seconds that its gradient takes from there to the first stage of all, and until that is done with it.
        own_s: seconds of all forwards and backwards of each.
        later_s: those of them that no other rank waits for: gradients of weights, where backwards are split.
    """

    there_s: Floats
    back_s: Floats
    own_s: Floats
    later_s: Floats

    def end_s(self, least_s: Floats | float = 0.0, share: float = 1.0) -> Floats:
        """For each the seconds until all that it has to do, and all that waits for it, can be done.

        A rank begins when the first micro-batch has come to it. What others wait for it may have done before the rest:
        then the last gradient goes back while it computes gradients of weights.

        Args:
            least_s: for each what follows its last action.
            share: of a micro-batch that goes from rank to rank at once.
        """
        return share * self.there_s + self.own_s + np.maximum(least_s, share * self.back_s - self.later_s)


@dataclass(frozen=True, eq=False)
class Sharded(OfPlaced):
    """Bounds with one sharding.

    Attributes:
        placed: the run with its sharding.
        bounds: of the stages.
    """

    bounds: Bounds

    @cached_property
    def after_s(self) -> float:
        """Seconds of what follows the pipeline."""
        return step_terms(self.placed, max(self.bounds.placed.costs.backward_s)).total_s

    @cached_property
    def step_s(self) -> float:
        """Seconds that the step takes at least, with whole sequences."""
        return self.sliced_s(1)

    def sliced_s(self, num_slices: int) -> float:
        """Seconds that the step takes at least, with sequences in even slices that take no longer together.

        Micro-batches come to a stage through all stages before it, and their gradients go back the same way. So a rank
        begins when the first micro-batch has come to its first stage, then has all its work to do, and then the last
        gradient still goes back to the first rank, while the gradients of a stage of its own are reduced. The same
        holds for each stage alone. Where weights are sharded, those of the first stage are gathered before all.
        Collectives of a rank follow each other.
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
        lane_s = (gathers_s + reductions_s)[stages].sum(axis=1).max()
        return float(max(pipeline_s, lane_s)) + self.after_s

    def turning_s(self, in_flight: Floats) -> float:
        """Seconds that the step takes at least, for an order in which ranks hold no more stage inputs than these.

        Args:
            in_flight: [rank, number of its stage] stage inputs when a rank holds the most.
        """
        gather_s = self._collectives_s[0][0] if self._has_collectives else 0.0
        return float(gather_s) + self.bounds.turning_s(in_flight) + self.after_s

    def unsent_s(self, graph: Graph) -> float:
        """Seconds of the step at least, if what waits for what is known but for messages.

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

    def held_bytes(self, in_flight: Floats | None = None, gathered: int = 1) -> Floats:
        """For each rank the bytes that a device holds at least.

        Args:
            in_flight: [rank, number of its stage] stage inputs that it holds at once; ``None`` for one of each.
            gathered: stages that are gathered at once, where weights are sharded at all times.
        """
        if gathered not in self._always:
            self._always[gathered] = self._always_bytes(gathered)
        each = self.bounds.input_bytes
        kept = (each if in_flight is None else in_flight * each).sum(axis=1)
        return self._always[gathered] + kept * (1 + self.software.fragmentation)

    def layers_to_recompute(self, in_flight: Floats) -> Floats:
        """For each rank how many layers it has to recompute at least, so that it fits a device.

        Args:
            in_flight: [rank, number of its stage] stage inputs that it holds at once.
        """
        run, software, stages = self.run, self.software, self.bounds.stages
        full, layers = replace(run, recompute="full"), np.array(stage_layers(run, software)[0])
        each = (kept_bytes(run, software) - kept_bytes(full, software)) * (1 + software.fragmentation)
        more = working_bytes(full, software) * (1 + software.fragmentation)
        held = self.held_bytes(in_flight)
        room = self.bounds.rooms
        missing = np.where(held > room, (held + more - room) / each, 0.0)
        # Stages with the most inputs first: a layer there saves the most, so these are the fewest layers.
        order = np.argsort(-in_flight, axis=1, kind="stable")
        inputs = np.maximum(np.take_along_axis(in_flight, order, axis=1), 1e-9)
        counts = np.take_along_axis(layers[stages], order, axis=1)
        saved_before = np.cumsum(inputs * counts, axis=1) - inputs * counts
        # A whole number must not become the next one by rounding.
        wanted = np.ceil((missing[:, None] - saved_before) / inputs - 1e-9)
        return np.clip(wanted, 0, counts).sum(axis=1)

    @property
    def _has_collectives(self) -> bool:
        return self.software.has_reduction_lane and self.run.dp > 1

    @cached_property
    def _collectives_s(self) -> tuple[Floats, Floats]:
        """For each stage the seconds of gathering its weights and of reducing its gradients."""
        bounds = self.bounds
        sizes = {held: number for number, held in enumerate(dict.fromkeys(bounds.placed.parameters))}
        number = [sizes[held] for held in bounds.placed.parameters]
        parts = self.placed.parts
        gathers, reductions = (
            {part: np.array([seconds(self.run, part, self.software, held) for held in sizes]) for part in set(parts)}
            for seconds in (gather_s, reduce_s)
        )
        if len(gathers) == 1:
            return gathers[parts[0]][number], reductions[parts[0]][number]
        owner = bounds.placed.placement.rank_by_stage
        of_stage = [(parts[rank], size) for rank, size in zip(owner, number, strict=True)]
        return (
            np.array([gathers[part][size] for part, size in of_stage]),
            np.array([reductions[part][size] for part, size in of_stage]),
        )

    @cached_property
    def _always(self) -> dict[int, Floats]:
        return {}

    def _always_bytes(self, gathered: int) -> Floats:
        """For each rank what it holds beside stage inputs."""
        run, software, stages = self.run, self.software, self.bounds.stages
        _, head = stage_layers(run, software)
        parameters = np.array(self.bounds.placed.parameters)[stages]
        held = state_bytes(run, 1.0, software).total_bytes * parameters.sum(axis=1)
        owner = self.bounds.placed.placement.rank_by_stage
        for rank in {owner[0], owner[-1]}:
            held[rank] += lent_bytes(run, software, stages[rank].tolist()).total_bytes
        if run.shard == "full" and run.dp > 1:
            alone = state_bytes(run, 1.0, software, "none")
            whole = np.sort(np.array(gathered_parameters(run, software))[stages], axis=1)[:, ::-1]
            most = gathered if software.has_reduction_lane else 1
            held += whole[:, :most].sum(axis=1) * alone.weights_bytes
        own = np.full(run.pp, working_bytes(run, software))
        own[owner[head]] += logits_bytes(run, software)
        return held + own * (1 + software.fragmentation) + software.reserve_bytes
