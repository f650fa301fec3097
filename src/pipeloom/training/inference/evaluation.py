"""The loss of a model on windows of text, without gradients, through the pipeline."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import exp, isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from pipeloom.config import RunConfig
from pipeloom.data.text import Data, Whole
from pipeloom.data.windows import Windows
from pipeloom.errors import RunError
from pipeloom.execute.processes.world import World, is_first
from pipeloom.terminal.progress import Bar
from pipeloom.training.inference.trained import NOT_FINITE, check_trained, load_trained, reads_start, with_trained
from pipeloom.training.memory_check import check_memory
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import check_processes, load_text, load_whole_text, resolve, run_on_all_ranks

Counted = tuple[npt.NDArray[np.int64], int]
"""Windows of a whole step, [batch_size, seq_len + 1], and the number of the first ones whose targets count."""
_LARGEST_LOSS = 700.0
"""The exponential of a larger one exceeds float64."""


class MeanLoss(NamedTuple):
    """Mean loss over tokens.

    Attributes:
        loss: cross-entropy, nats per token.
        tokens: number of predicted tokens.
    """

    loss: float
    tokens: int


def mean_loss(pipeline: Pipeline, world: World, batches: Iterable[Counted]) -> MeanLoss:
    """Mean loss over batches. Collective.

    Args:
        pipeline: of this rank, outside a step.
        world: all ranks.
        batches: the same on every rank.
    """
    total, tokens = 0.0, 0
    for windows, num_counted in batches:
        batch = pipeline.batch(windows, num_counted)
        # The share of the mean over the batch on this rank; 0 but on ranks of the last stage.
        total += pipeline.counted_loss(pipeline.evaluate(batch)) * batch.num_valid
        tokens += batch.num_valid
    return MeanLoss(world.sum([total])[0] / max(1, tokens), tokens)


def each_once(windows: Windows, batch_size: int) -> Iterator[Counted]:
    """Batches in which each window counts once; the last one is filled with windows that do not count."""
    for first in range(0, windows.num_windows, batch_size):
        # Behind the last window the next epoch begins.
        yield windows.batch(first // batch_size, batch_size), min(batch_size, windows.num_windows - first)


@dataclass(frozen=True)
class Evaluation:
    """Loss of a trained model on a text.

    Attributes:
        loss: mean cross-entropy, nats per token.
        tokens: number of predicted tokens.
        step: of the checkpoint; ``None`` for a Hugging Face folder.
        checkpoint: path of the weights.
        text: description of the text.
    """

    loss: float
    tokens: int
    step: int | None
    checkpoint: str
    text: str

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return exp(min(self.loss, _LARGEST_LOSS))


def evaluate_run(
    config: RunConfig, run: Path, *, is_whole: bool = False, num_batches: int | None = None
) -> Evaluation | None:
    """Evaluate a trained model. Starts the processes of a run and waits for them.

    Args:
        config: without problems; layout and text may differ from those of the run.
        run: run folder for its newest undamaged checkpoint, a checkpoint, or a Hugging Face folder.
        is_whole: whether training and validation part of the text are evaluated, or only the latter.
        num_batches: evaluate the first batches only; ``None`` for every window once.

    Returns:
        The loss; under a launcher on rank 0, ``None`` elsewhere.

    Raises:
        UserError: there is no undamaged checkpoint; it is of another model; the text or the host does not fit.
        RunError: the loss is not finite; or a process failed.
    """
    check_processes(config)
    check_memory(config, trains=False)
    config = with_trained(config, run)
    load = load_whole_text if is_whole else load_text
    with reads_start(config):
        if is_first():
            # Tokenized once, before the processes start; they read the tokens from the cache.
            check_trained(resolve(config, load(config)))
        found = run_on_all_ranks(config, partial(_evaluate, num_batches), load=load)
    if found is not None and not isfinite(found.loss):
        raise RunError(f"the loss of {found.checkpoint} must be finite, found {found.loss}; {NOT_FINITE}")
    return found


def _evaluate(num_batches: int | None, config: RunConfig, world: World, data: Data | Whole) -> Evaluation | None:
    pipeline = Pipeline(config, world, trains=False)
    weights = load_trained(config, world, pipeline, data.tokenizer)
    text = data.windows if isinstance(data, Whole) else data.validation
    size = config.layout.batch_size
    total = -(-text.num_windows // size)
    total = total if num_batches is None else min(total, num_batches)
    columns = (TextColumn("batch {task.completed}/{task.total}"), BarColumn(bar_width=24), TimeRemainingColumn())
    with Bar(sys.stderr, *columns, total=total, is_shown=world.rank == 0, transient=True) as bar:
        found = mean_loss(pipeline, world, _shown(islice(each_once(text, size), total), bar))
    pipeline.close()
    if world.rank > 0:
        return None
    return Evaluation(found.loss, found.tokens, weights.step, str(weights.path), data.description)


def _shown(batches: Iterable[Counted], bar: Bar) -> Iterator[Counted]:
    for number, batch in enumerate(batches):
        bar.update(number)
        yield batch
