"""What a step takes and holds at least, whatever its schedule: closed forms that cost next to nothing.

They are never above what the simulator says (``tests/planner/test_bounds.py``), so that a search may leave out what
they rule out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import ceil

from pipeloom.cost.analytic import stage_costs, stage_layers, stage_parameters, step_terms
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.data_parallel import gather_s, reduce_s
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.memory import kept_bytes, lent_bytes, logits_bytes, state_bytes, working_bytes
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software
from pipeloom.layout import Shard
from pipeloom.predict.memory import input_bytes
from pipeloom.schedule import PLACEMENTS, Placement, Schedule


@lru_cache(maxsize=1024)
def placement_of(name: str, pp: int, loops: int) -> Placement:
    """A placement by name, remembered."""
    return PLACEMENTS[name](pp, loops)


@lru_cache(maxsize=1024)
def stages_by_rank(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """For each rank its stages."""
    return tuple(placement.stages_of(rank) for rank in range(placement.num_ranks))


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of all steps that cut the model into the same stages, for any schedule and any sharding.

    Attributes:
        run: with its stages; its sharding is not looked at.
        cluster: where.
        software: with what.
        placement: stage -> pipeline rank.
    """

    run: Run
    cluster: Cluster
    software: Software
    placement: Placement

    @cached_property
    def costs(self) -> StageCosts:
        """Seconds of the stages."""
        return stage_costs(self.run, self.cluster, self.software)

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        """Parameters of each stage that one device holds."""
        return stage_parameters(self.run, self.software)

    @cached_property
    def input_bytes(self) -> list[float]:
        """For each stage what a micro-batch keeps there from forward to backward, logits left out."""
        return input_bytes(self.run, self.software)

    @cached_property
    def _work(self) -> tuple["_Work", ...]:
        """For each rank, and where they have several, each stage: what it has to do and how far it is away."""
        run, costs = self.run, self.costs
        both = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
        owner = self.placement.rank_by_stage
        hops = [0.0, *(costs.transfer_s if a != b else 0.0 for a, b in pairwise(owner))]
        there = list(accumulate(hop + seconds for hop, seconds in zip(hops, (0.0, *costs.forward_s[:-1]), strict=True)))
        back = list(accumulate(hop + seconds for hop, seconds in zip(hops, (0.0, *costs.backward_s[:-1]), strict=True)))
        parts = [*stages_by_rank(self.placement)]
        if run.loops > 1:
            parts += [(stage,) for stage in range(run.num_stages)]
        return tuple(
            _Work(stages, there[stages[0]], back[stages[0]], run.num_microbatches * sum(both[s] for s in stages))
            for stages in parts
        )

    @property
    def any_step_s(self) -> float:
        """Seconds that the step takes at least, whatever is sharded; collectives are left out."""
        level: Shard = "full" if self.run.dp > 1 else "none"
        terms = step_terms(replace(self.run, shard=level), self.cluster, self.software, max(self.costs.backward_s))
        after_s = terms.optimizer_s + terms.tied_s + terms.fixed_s
        return max(work.there_s + work.own_s + work.back_s for work in self._work) + after_s

    def after_s(self, shard: Shard, replicate: int = 1) -> float:
        """Seconds of what follows the pipeline."""
        known = self._after.get((shard, replicate))
        if known is None:
            terms = step_terms(self._with(shard, replicate), self.cluster, self.software, max(self.costs.backward_s))
            known = self._after[shard, replicate] = terms.total_s
        return known

    @cached_property
    def _after(self) -> dict[tuple[Shard, int], float]:
        return {}

    def step_s(self, shard: Shard, replicate: int = 1) -> float:
        """Seconds that the step takes at least.

        Micro-batches come to a stage through all stages before it, and their gradients go back the same way. So a rank
        begins when the first micro-batch has come to its first stage, then has all its work to do, and then the last
        gradient still goes back to the first rank, while the gradients of a stage of its own are reduced. The same
        holds for each stage alone. Where weights are sharded, those of the first stage are gathered before all.
        Collectives of a rank follow each other.

        Args:
            shard: what is sharded.
            replicate: copies of that.
        """
        known = self._step.get((shard, replicate))
        if known is None:
            known = self._step[shard, replicate] = self._step_s(self._with(shard, replicate))
        return known

    @cached_property
    def _step(self) -> dict[tuple[Shard, int], float]:
        return {}

    def _step_s(self, run: Run) -> float:
        after_s = self.after_s(run.shard, run.replicate)
        if not self.software.has_reduction_lane or run.dp == 1:
            return max(work.there_s + work.own_s + work.back_s for work in self._work) + after_s
        gathers, reductions = self._collectives_s(run)
        pipeline_s = gathers[0] + max(
            work.there_s + work.own_s + max(work.back_s, min(reductions[stage] for stage in work.stages))
            for work in self._work
        )
        lane_s = max(
            sum(gathers[stage] + reductions[stage] for stage in stages) for stages in stages_by_rank(self.placement)
        )
        return max(pipeline_s, lane_s) + after_s

    def collectives_s(self, run: Run, schedule: Schedule) -> float:
        """Seconds of the step at least: all gathers and reductions of a rank, one after the other."""
        after_s = self.after_s(run.shard, run.replicate)
        if not self.software.has_reduction_lane or run.dp == 1:
            return after_s
        each_s = [
            number * gather + again * reduction
            for number, again, gather, reduction in zip(*schedule.collectives, *self._collectives_s(run), strict=True)
        ]
        return max(sum(each_s[stage] for stage in stages) for stages in stages_by_rank(self.placement)) + after_s

    def _collectives_s(self, run: Run) -> tuple[list[float], list[float]]:
        """For each stage the seconds of gathering its weights and of reducing its gradients."""
        sizes = set(self.parameters)
        gathers = {held: gather_s(run, self.cluster, self.software, held) for held in sizes}
        reductions = {held: reduce_s(run, self.cluster, self.software, held) for held in sizes}
        return [gathers[held] for held in self.parameters], [reductions[held] for held in self.parameters]

    def held_bytes(
        self, shard: Shard, replicate: int = 1, in_flight: Sequence[float] | None = None, gathered: int = 1
    ) -> list[float]:
        """For each rank the bytes that a device holds at least.

        Args:
            shard: what is sharded.
            replicate: copies of that.
            in_flight: for each rank how many stage inputs it holds at once; ``None`` for one of each of its stages.
            gathered: stages that are gathered at once, where weights are sharded at all times.
        """
        software = self.software
        always = self._always_bytes(shard, replicate, gathered)
        if in_flight is None:
            in_flight = [len(stages) for stages in stages_by_rank(self.placement)]
        kept = [
            self._least_kept(stages, count)
            for stages, count in zip(stages_by_rank(self.placement), in_flight, strict=True)
        ]
        return [held + bytes_ * (1 + software.fragmentation) for held, bytes_ in zip(always, kept, strict=True)]

    def _always_bytes(self, shard: Shard, replicate: int, gathered: int) -> list[float]:
        """For each rank what it holds beside stage inputs."""
        known = self._always.get((shard, replicate, gathered))
        if known is not None:
            return known
        run, software = self._with(shard, replicate), self.software
        alone = self._with("none", 1)
        _, head = stage_layers(run, software)
        working, logits = working_bytes(run, software), logits_bytes(run, software)
        found: list[float] = []
        for stages in stages_by_rank(self.placement):
            held = state_bytes(run, sum(self.parameters[stage] for stage in stages), software).total_bytes
            held += lent_bytes(run, software, stages).total_bytes
            if shard == "full" and run.dp > 1:
                largest = sorted((self.parameters[stage] for stage in stages), reverse=True)[:gathered]
                held += state_bytes(alone, sum(largest), software).weights_bytes
            own = working + (logits if head in stages else 0.0)
            found.append(held + own * (1 + software.fragmentation) + software.reserve_bytes)
        self._always[shard, replicate, gathered] = found
        return found

    @cached_property
    def _always(self) -> dict[tuple[Shard, int, int], list[float]]:
        return {}

    def _with(self, shard: Shard, replicate: int) -> Run:
        """The run with that sharding."""
        return replace(self.run, shard=shard, replicate=replicate)

    def _least_kept(self, stages: Sequence[int], count: float) -> float:
        """Bytes of so many stage inputs at least: one of each stage, and no stage has more than micro-batches."""
        most, left = self.run.num_microbatches - 1, count - len(stages)
        each = [self.input_bytes[stage] for stage in stages]
        kept = sum(each)
        if left >= most * len(stages):
            return kept * (1 + most)
        for size in sorted(each):
            if left <= 0:
                break
            more = min(most, left)
            kept += size * more
            left -= more
        return kept

    def layers_to_recompute(self, held_bytes: Sequence[float], in_flight: Sequence[float]) -> list[int]:
        """For each rank how many layers it has to recompute at least, so that it fits a device.

        Args:
            held_bytes: of each rank at least, while nothing is recomputed.
            in_flight: for each rank how many stage inputs it holds at once.
        """
        run, software = self.run, self.software
        full = replace(run, recompute="full")
        each = (kept_bytes(run, software) - kept_bytes(full, software)) * (1 + software.fragmentation)
        more = working_bytes(full, software) * (1 + software.fragmentation)
        room = self.cluster.device.memory_bytes
        return [
            ceil((held + more - room) / (each * min(run.num_microbatches, count)) - 1e-9) if held > room else 0
            for held, count in zip(held_bytes, in_flight, strict=True)
        ]

    def recomputing_s(self, layers: Sequence[int]) -> float:
        """Seconds of the pipeline at least, if each rank recomputes so many layers; collectives are left out."""
        forward_s = piece_seconds(self.run, self.cluster, self.software).layer[0] * self.run.num_microbatches
        return max(
            work.there_s + work.own_s + work.back_s + count * forward_s
            for work, count in zip(self._work[: self.run.pp], layers, strict=True)
        )


@dataclass(frozen=True)
class _Work:
    """What some stages of a rank have to do.

    Attributes:
        stages: ascending.
        there_s: seconds that a micro-batch takes to the first of them.
        back_s: seconds that its gradient takes from there to the first stage.
        own_s: seconds of all forwards and backwards.
    """

    stages: tuple[int, ...]
    there_s: float
    back_s: float
    own_s: float
