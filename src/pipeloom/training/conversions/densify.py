"""Makes dense matrices of kept blocks: the second phase of training that is sparse, then dense (arXiv 2303.10464)."""

from dataclasses import replace
from pathlib import Path

import torch

from pipeloom.config import OutputConfig, find_problems
from pipeloom.errors import ConfigError, UserError
from pipeloom.model.block_sparse import weight_patterns
from pipeloom.training.checkpoints.contents import parameter_of
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.converted import read_source, write_converted
from pipeloom.training.conversions.export import load_stored, stored_parameters
from pipeloom.workload.model import model_settings


def densify(run: Path, folder: Path) -> Path:
    """Write a run folder with dense matrices in place of kept blocks, from which the run resumes.

    Outside of its blocks a matrix is zero, and so is the optimizer's state there. So the model computes what it did,
    up to the order of sums, and the next step is the first one that moves these elements.

    Args:
        run: a run folder, for its newest checkpoint, or a checkpoint of one.
        folder: a new folder; its run file resumes from this checkpoint, in the same place of the text.

    Returns:
        The checkpoint.

    Raises:
        UserError: the run cannot be read, is dense, or the folder exists; ``ConfigError`` with all that is wrong with
            the run.
        RunError: the files cannot be written; nothing is left behind.
    """
    checkpoint, info, config, texts = read_source(run, folder)
    if config.model.density is None:
        raise UserError(f"the model of {run} is dense; densify takes one with model.density")
    patterns, dense = weight_patterns(config.model), replace(config.model.dense, preset=None, file=None)
    config = replace(
        config,
        model=dense,
        checkpoint=replace(config.checkpoint, init=None, resume=folder.absolute()),
        output=OutputConfig(),
    )
    problems = find_problems(replace(config, checkpoint=replace(config.checkpoint, resume=None)), trains=False)
    if problems:
        raise ConfigError(problems, "the dense run")
    stored = stored_parameters(CheckpointReader(checkpoint), prefix="")
    by_key = {key: patterns[name] for key in stored.shapes if (name := parameter_of(key)) in patterns}
    stored = stored.with_dense(by_key)
    tensors = {key: torch.empty(shape, dtype=stored.dtypes[key]) for key, shape in stored.shapes.items()}
    load_stored(stored, tensors)
    info = replace(info, model=model_settings(dense), cause="end")
    return write_converted(folder, info, config, tensors, texts)
