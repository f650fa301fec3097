"""Replicas that step alone, and average their weights: DiLoCo (arXiv 2311.08105), with ``layout.average_every``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from pipeloom.config import RunConfig
from pipeloom.execute.communication.collectives import make_replica_group
from pipeloom.execute.communication.under_way import UnderWay, finish
from pipeloom.execute.executor import StepResult
from pipeloom.execute.processes.world import World
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.training.optimizers.optimizer import REPEATS, WholeUpdates, learning_rate
from pipeloom.training.pipeline import Pipeline


class Averaging:
    """The steps of one rank's replica between two averages, and the average. Construction is collective.

    The outer gradient is the mean way of the replicas back to where they began. The outer step is that of gradient
    descent with Nesterov momentum, in the type of the optimizer's weights. All replicas compute it, with equal bits.

    With ``optimizer.outer_delayed`` an average runs in the background of the next step (arXiv 2501.18512, section 2.3).
    At the end of that step all replicas do its outer step with the weights that they have in common. Each continues
    from there by the way of its own that is not in an average yet.

    Args:
        config: resolved.
        world: all ranks.
        pipeline: of this rank.
        updates: of its weights.
    """

    def __init__(self, config: RunConfig, world: World, pipeline: Pipeline, updates: WholeUpdates) -> None:
        layout = config.layout
        self._config, self._world, self._pipeline, self._updates = config, world, pipeline, updates
        self._replica = layout.replica_of(layout.coordinates(world.rank))
        self._group = make_replica_group(layout, world)
        pipeline.data_parallel.counts_alone = True
        self._weights = list(pipeline.data_parallel.weights.values())
        self._lane = pipeline.lane("average") if config.optimizer.outer_delayed else None
        self._under_way, self._has_common = list[UnderWay](), False
        for weights in self._weights:
            weights.prepare_alone(delays=config.optimizer.outer_delayed)

    def step(self, windows: npt.NDArray[np.int64], step: int) -> tuple[StepResult, list[float]]:
        """Do the updates of this replica in a step, without other replicas.

        Args:
            windows: of the step; a replica takes those behind the replicas before it, for one update after the other.
            step: counted from 1.

        Returns:
            The result of the last update; and this rank's shares of the loss, the mean over all updates of all
            replicas, and of the squared gradient norm, the mean over the last updates of the replicas.
        """
        config, counts, loss, share = self._config, self._config.layout.updates_by_replica, 0.0, 0.0
        parts = config.layout.windows_of_updates(self._replica)
        for weights in self._weights:
            weights.begin_alone()
            if self._lane is not None and not self._has_common:
                weights.note_common()
        self._has_common = self._lane is not None
        for update, part in enumerate(parts):
            lr = learning_rate(config.optimizer, step - 1 + update / len(parts), config.training.known_steps)
            self._updates.begin_step(lr)
            result = self._pipeline.train_step(self._pipeline.batch(windows[part], is_alone=True))
            loss += self._pipeline.counted_loss(result) / sum(counts)
            own = self._updates.squares()
            share = sum(own) / len(counts)
            # In double precision, as the sums over all ranks of a run without averages.
            every = torch.tensor(own, dtype=torch.float64, device=self._world.device)
            self._group.all_reduce(every)()
            self._updates.end_step(every.tolist(), lr)
        return result, [loss, share]

    def end_step(self, squares: Sequence[float], lr: float) -> None:  # noqa: ARG002  as those of updates
        """Average the weights of all replicas, and do the outer step; or that of the step before. Collective."""
        parallel = self._pipeline.data_parallel
        if self._lane is None:
            # A replica that is done waits for the slowest one, which may have many updates left.
            parallel.average(self._world.timeout.total_seconds())
            for weights in self._weights:
                weights.outer_step(*self._config.optimizer.known_outer)
        else:
            self._finish()
            for weights in self._weights:
                weights.leave_common()
            self._under_way = parallel.averages([weights.way for weights in self._weights], self._lane)
        parallel.refresh()

    def _finish(self) -> None:
        """Do the outer step of the average that is under way, if there is one. Collective."""
        if not self._under_way:
            return
        for pending in self._under_way:
            finish(pending, self._world.timeout.total_seconds())
        self._under_way = []
        for weights in self._weights:
            weights.delayed_step(*self._config.optimizer.known_outer)

    def settle(self) -> None:
        """Wait for a delayed average and do its outer step, so that all replicas have equal weights. Collective."""
        if not self._has_common:
            return
        self._finish()
        for weights in self._weights:
            weights.take_common()
        self._has_common = False
        self._pipeline.data_parallel.refresh()

    @contextmanager
    def common(self) -> Iterator[None]:
        """Context with the weights that all replicas have: without averages that are under way."""
        if not self._has_common:
            yield
            return
        refresh = self._pipeline.data_parallel.refresh
        for weights in self._weights:
            weights.take_common(keeps=True)
        refresh()
        try:
            yield
        finally:
            for weights in self._weights:
                weights.take_own()
            refresh()

    def seconds(self) -> float:
        """Seconds of an average, of the slowest rank, on rank 0; weights stay as they are. Collective."""
        parallel, timeout_s = self._pipeline.data_parallel, self._world.timeout.total_seconds()
        mean = partial(parallel.average, timeout_s, is_rehearsal=True)
        every = self._world.gather(median_seconds(mean, REPEATS, self._world.device, self._world.wait_for_all))
        return max(every) if every else 0.0


def make_averaging(config: RunConfig, world: World, pipeline: Pipeline, updates: object) -> Averaging | None:
    """The averages of a run; ``None`` without ``layout.average_every``."""
    if config.layout.average_every is None:
        return None
    assert isinstance(updates, WholeUpdates), "the configuration refuses updates within the step"
    return Averaging(config, world, pipeline, updates)
