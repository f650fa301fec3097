"""Updates of stages within the step, on any number of ranks: each when its gradient is complete."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pipeloom.config import OptimizerConfig
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.clipping import clipped_step, gradient_norms, squared_norm
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.measure.update import Update
from pipeloom.schedule.stage_swaps import defers_updates
from pipeloom.training.optimizers.expert_updates import ExpertUpdates
from pipeloom.training.optimizers.optimizer import (
    REPEATS,
    StageUpdates,
    WholeUpdates,
    make_optimizer,
    seconds_by_stage,
    set_rate,
)
from pipeloom.training.pipeline import Pipeline


class UpdatesWithin:
    """Updates a rank's stages, whose gradients have memory only until then.

    Args:
        config: rule and clipping; not by the norm of the whole gradient.
        optimizer: of the parameters of all stages, with its state.
        data_parallel: has the stages and the gradients.
    """

    def __init__(self, config: OptimizerConfig, optimizer: torch.optim.Optimizer, data_parallel: DataParallel) -> None:
        self._config, self._optimizer, self._data_parallel = config, optimizer, data_parallel
        self._norms: dict[int, list[Tensor]] = {}

    def complete(self, stage: int) -> None:
        """Do nothing: a gradient is reduced after it is complete on this rank."""

    def update(self, stage: int) -> None:
        """Clip the stage's gradient if each stage is clipped by itself, and update its weights."""
        with self._data_parallel.complete_gradient(stage) as weights:
            # Before the update, which may scale the gradient.
            self._norms[stage] = gradient_norms(self._data_parallel.counted_gradients(stage))
            norm = 0.0
            if self._config.clip == "stage":
                # Not the counted ones: each of the ranks with this gradient clips it.
                norm = squared_norm(gradient_norms([weights.gradient])) ** 0.5
            parameters = [part.parameter for part in weights.parts]
            clipped_step(self._optimizer, parameters, norm, self._config.known_clip_grad_norm)
        weights.refresh()

    def begin_step(self, lr: float) -> None:
        """Set the learning rate of the step; called before the pipeline."""
        set_rate(self._optimizer, lr)

    def squares(self) -> list[float]:
        """This rank's share of the squared gradient norm of the whole model; called after the pipeline."""
        # In the order of the stages, so that the sum does not depend on that of the updates.
        norms = [norm for stage in self._data_parallel.weights for norm in self._norms.pop(stage, [])]
        return [squared_norm(norms)]

    def end_step(self, squares: Sequence[float], lr: float) -> None:
        """Do nothing: all stages are updated."""

    def settle(self) -> None:
        """Do nothing: no update is pending between two steps."""

    def seconds(self, world: World) -> tuple[tuple[float, ...], float]:
        """Time the updates on copies, on all ranks at once. Collective.

        Returns:
            On rank 0 the seconds of each stage's update within the pipeline, of the slowest rank; and none after it.
        """
        parallel = self._data_parallel
        every = seconds_by_stage(
            world, parallel.num_stages, parallel.weights, lambda stage: self._seconds(stage, world)
        )
        return every, 0.0

    def _seconds(self, stage: int, world: World) -> float:
        weights = self._data_parallel.weights[stage]
        make = partial(make_optimizer, self._config)
        update = Update(make, self._config.known_clip_grad_norm, weights.parts, world)

        def once() -> None:
            update.step_alone()
            weights.refresh()  # weights are unchanged

        return median_seconds(once, REPEATS, world.device, update.fill_gradients)


def make_updates(
    config: OptimizerConfig, optimizer: torch.optim.Optimizer, pipeline: Pipeline
) -> WholeUpdates | StageUpdates | UpdatesWithin:
    """The weight update of a rank: of all stages at once, or of each stage within the step.

    Args:
        config: rule and clipping.
        optimizer: of the rank's parameters.
        pipeline: of the rank, whose steps then have the updates that are actions.
    """
    parallel, store = pipeline.data_parallel, pipeline.store
    if store is None and config.update == "step":
        return WholeUpdates(config, optimizer, parallel)
    updates: StageUpdates | UpdatesWithin
    if store is None:
        updates = UpdatesWithin(config, optimizer, parallel)
    elif not all(weights.is_swapped for weights in parallel.weights.values()):
        updates = ExpertUpdates(config, optimizer, parallel, store)
    else:
        is_deferred = defers_updates(pipeline.schedule.rows[0])
        updates = StageUpdates(config, optimizer, parallel.weights, store, is_deferred=is_deferred)
    pipeline.updates.does = updates
    return updates


class KeptGradients:
    """In place of updates: keeps each stage's gradient, for comparisons with a reference.

    Args:
        data_parallel: has the stages and the gradients.
    """

    def __init__(self, data_parallel: DataParallel) -> None:
        self._data_parallel = data_parallel

    def complete(self, stage: int) -> None:
        """Do nothing, as ``UpdatesWithin``."""

    def update(self, stage: int) -> None:
        """Keep the stage's gradient until the next step."""
        with self._data_parallel.complete_gradient(stage) as weights:
            kept = weights.gradient.clone()
        weights.gradient = kept
