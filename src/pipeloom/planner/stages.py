"""The stages of a run in closed form: their memory and collectives, whichever schedule runs them.

In arrays, ranks are rows and their stages are columns.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.exchanges import data_parallel_s, step_terms
from pipeloom.cost.memory import (
    kept_bytes,
    kept_logits,
    logits_bytes,
    message_bytes,
    stage_kept_bytes,
    working_bytes,
)
from pipeloom.cost.placed import OfPlaced
from pipeloom.cost.stages import num_frozen_stages, stage_layers
from pipeloom.planner.buffers import buffers_of, kept_state_bytes, stages_by_rank
from pipeloom.planner.work import Floats
from pipeloom.predict.memory import Room, num_peers
from pipeloom.recipe import Knobs
from pipeloom.workload.run import Run


@dataclass(frozen=True, eq=False)
class Stages(OfPlaced):
    """The stages of a run with any sharding.

    Attributes:
        placed: a run with its stages and one micro-batch (``Run.of_stages``); its sharding is ignored.
    """

    def sharded(self, run: Run) -> "ShardedStages":
        """The stages of a run that differs in its sharding alone."""
        if run not in self._sharded:
            self._sharded[run] = ShardedStages(self.placed.with_sharding_of(run), self)
        return self._sharded[run]

    @cached_property
    def _sharded(self) -> "dict[Run, ShardedStages]":
        return {}

    @cached_property
    def by_rank(self) -> NDArray[np.int64]:
        """[rank, number] -> stage."""
        return stages_by_rank(self.placed.placement)

    @cached_property
    def num_frozen(self) -> int:
        """Number of stages that train nothing."""
        return num_frozen_stages(self.run, self.software)

    @cached_property
    def longest_backward_s(self) -> float:
        """Seconds of the longest backward of a stage."""
        return max(self.placed.costs.backward_s)

    @cached_property
    def device_bytes(self) -> Floats:
        """For each rank the memory of one device."""
        return np.array(self.placed.device_bytes)

    @cached_property
    def kept_bytes(self) -> Floats:
        """For each stage the bytes that a micro-batch keeps for its backward, without those of the loss."""
        return np.array(stage_kept_bytes(self.run, self.software))

    @cached_property
    def layer_bytes(self) -> tuple[NDArray[np.int64], float, float]:
        """[rank, number of its stage] layers; the bytes that a recomputed layer saves, and those it needs once."""
        run, software = self.run, self.software
        full, layers = replace(run, recompute="full"), np.array(self.placed.layers)
        lost = 1 + software.fragmentation
        each = (kept_bytes(run, software) - kept_bytes(full, software)) * lost
        more = working_bytes(full, software) - working_bytes(run, software)
        return layers[self.by_rank], each, more * lost

    @cached_property
    def received_bytes(self) -> Floats:
        """For each rank the bytes of the buffers for messages of whole sequences."""
        each = Knobs.receive_buffers * message_bytes(self.run, self.software)
        return num_peers(self.placed.placement).astype(np.float64) * each

    @cached_property
    def computing_bytes(self) -> Floats:
        """For each rank the bytes of a layer and of the loss while they compute, as the allocator holds them.

        Without what the loss keeps for the backward, which belongs to the inputs of a stage.
        """
        run, software = self.run, self.software
        own = np.full(len(self.by_rank), working_bytes(run, software))
        head = self.placed.placement.rank_by_stage[stage_layers(run, software)[1]]
        own[head] += logits_bytes(run, software) - kept_logits(run, software)
        return own * (1 + software.fragmentation)


@dataclass(frozen=True, eq=False)
class ShardedStages(OfPlaced):
    """The stages of a run with one sharding.

    Attributes:
        placed: the run with its sharding.
        stages: with any sharding.
    """

    stages: Stages

    @cached_property
    def after_s(self) -> float:
        """Seconds of the step after the pipeline."""
        return step_terms(self.placed, self.stages.longest_backward_s).total_s

    @cached_property
    def has_collectives(self) -> bool:
        """Whether gathers and reductions are actions of the schedule."""
        return self.software.has_reduction_lane and self.run.data_ranks > 1

    @cached_property
    def collectives_s(self) -> tuple[Floats, Floats]:
        """For each stage the seconds of its gather and of its reduction."""
        gathers, reductions = data_parallel_s(self.placed)
        return np.array(gathers), np.array(reductions)

    @cached_property
    def lane_s(self) -> Floats:
        """For each rank the least seconds of its gathers and reductions, which run one after the other.

        All stages of a rank are gathered before its first backward, so those that are not there any more are gathered
        once more.
        """
        gathers_s, reductions_s = self.collectives_s
        once_s = (gathers_s + reductions_s)[self.stages.by_rank].sum(axis=1)
        if self.run.sharded != "full" or self.stages.num_frozen:
            return once_s
        each_s = np.sort(gathers_s[self.stages.by_rank], axis=1)
        most, _ = buffers_of("full", each_s.shape[1], updates_stages=self.run.updates_stages)[0]
        return once_s + each_s[:, : each_s.shape[1] - most].sum(axis=1)

    def always_bytes(self, room: Room) -> Floats:
        """For each rank the bytes that it holds besides stage inputs, with some buffers."""
        if room not in self._always:
            held = kept_state_bytes(self.placed.of_state, room.gathered, room.unreduced) + self.stages.computing_bytes
            self._always[room] = held + self.stages.received_bytes if room.receive_buffers else held
        return self._always[room]

    @cached_property
    def _always(self) -> dict[Room, Floats]:
        return {}
