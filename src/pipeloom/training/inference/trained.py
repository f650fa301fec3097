"""The weights of a trained model, for work that runs forwards: from a run, a checkpoint or a Hugging Face folder."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint, reading
from pipeloom.checkpoint.checkpoint_folder import is_hugging_face
from pipeloom.config import RunConfig
from pipeloom.data.tokenizer import Tokenizer
from pipeloom.execute.processes.world import World, is_first
from pipeloom.training.checkpoints.checkpoint import Checkpoints
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.pretrained import PretrainedWeights, read_weights

NOT_FINITE = (
    "its weights are NaN, infinite, or too large for training.dtype; use an earlier checkpoint, or --training.dtype "
    "float32"
)
"""Why outputs of a model are not finite, and what to do."""


class Trained(NamedTuple):
    """Weights that were read.

    Attributes:
        path: checkpoint, or Hugging Face folder.
        step: of the checkpoint; ``None`` for a folder.
    """

    path: Path
    step: int | None


def with_trained(config: RunConfig, path: Path) -> RunConfig:
    """The configuration with the folder whose weights it reads.

    Args:
        config: of a run.
        path: Hugging Face folder, checkpoint, or run folder for its newest undamaged checkpoint.

    Raises:
        UserError: there is no undamaged checkpoint.
    """
    if is_hugging_face(path):
        found = replace(config.checkpoint, init=path.absolute(), resume=None)
    else:
        choice = choose_checkpoint(path)
        if is_first():
            choice.print_remarks()
        found = replace(config.checkpoint, resume=choice.path)
    return replace(config, checkpoint=found)


def reads_start(config: RunConfig) -> AbstractContextManager[None]:
    """Context of work that reads the weights that a configuration starts from; what its errors contain in addition."""
    start = config.checkpoint.start
    return nullcontext() if start is None else reading(start)


def check_trained(config: RunConfig) -> None:
    """Refuse a Hugging Face folder of another model, before processes start; checkpoints are compared by them.

    Raises:
        UserError: it cannot be read, or is of another model; lists all differences.
    """
    if config.checkpoint.start is not None and is_hugging_face(config.checkpoint.start):
        PretrainedWeights(config.checkpoint.start, config)


def load_trained(config: RunConfig, world: World, pipeline: Pipeline, tokenizer: Tokenizer) -> Trained:
    """Read the weights that a configuration starts from, without optimizer state. Collective.

    Args:
        config: resolved.
        world: all ranks.
        pipeline: of this rank.
        tokenizer: of the model.

    Raises:
        UserError: they cannot be read, or are of another model; raised on all ranks.
    """
    path = config.checkpoint.start
    assert path is not None
    weights = Checkpoints(config, world, pipeline, None, path, tokenizer=tokenizer)
    return Trained(path, read_weights(weights, path, config))
