"""The validation loss of a run, between its steps and at its end."""

from collections.abc import Callable, Iterator

import numpy as np

from pipeloom.config import RunConfig
from pipeloom.data.text import Data, unigram_loss
from pipeloom.execute.processes.world import World
from pipeloom.training.inference.evaluation import Counted, mean_loss
from pipeloom.training.pipeline import Pipeline


class Validation:
    """The loss over ``training.validation_batches`` batches of a run.

    Args:
        config: resolved.
        world: all ranks.
        data: of the run.
        pipeline: of this rank.
    """

    def __init__(self, config: RunConfig, world: World, data: Data, pipeline: Pipeline) -> None:
        self._training, self._batch_size = config.training, config.layout.batch_size
        self._world, self._data, self._pipeline = world, data, pipeline

    def is_due(self, step: int) -> bool:
        """Whether a step that is not the last one is followed by a validation."""
        every = self._training.validate_every
        # The last step is followed by the validation of the summary.
        return every is not None and step % every == 0 and step < self._training.known_steps

    def loss(self, gives_up: Callable[[], bool] | None = None) -> float | None:
        """The loss, nats per token; ``None`` for no batches, or if it was given up. Collective.

        Args:
            gives_up: called before each batch, the same on every rank: whether to end without a loss.
        """
        is_given_up = False

        def batches() -> Iterator[Counted]:
            nonlocal is_given_up
            # From the first window in every run, so that losses are comparable.
            for index in range(self._training.validation_batches):
                if is_given_up := gives_up is not None and gives_up():
                    return
                yield self._data.validation.batch(index, self._batch_size), self._batch_size

        if self._training.validation_batches == 0:
            return None
        found = mean_loss(self._pipeline, self._world, batches()).loss
        return None if is_given_up else found

    def unigram_loss(self) -> float:
        """The loss of a model of token frequencies on the same windows; on rank 0."""
        data, num_batches = self._data, self._training.validation_batches
        if num_batches == 0 or self._world.rank > 0:
            return data.unigram_loss
        targets = data.validation.batch(0, self._batch_size * num_batches)[:, 1:]
        return unigram_loss(data.shares, np.bincount(targets[targets >= 0], minlength=len(data.shares)))
