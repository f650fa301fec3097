"""Gives each of the layers that share their weights its own copy: the second phase of M6-10T (arXiv 2110.03888)."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.config import OutputConfig, find_problems
from pipeloom.errors import ConfigError, UserError
from pipeloom.training.checkpoints.contents import MODEL, STATE
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.converted import read_source, write_converted
from pipeloom.training.conversions.export import load_stored, stored_parameters
from pipeloom.workload.model import model_settings
from pipeloom.workload.optimizers import Optimizer
from pipeloom.workload.sharing import Sharing, is_of_layer, layer_names


def delink(run: Path, folder: Path) -> Path:
    """Write a run folder with the weights and the optimizer's state of a run, each layer with its own copy.

    The model computes what it did, bit for bit. The gradient of shared weights was the sum over the n layers that share
    them; that of a copy is one of the terms, about an n-th. So means of gradients are divided by n, and means of their
    squares by n^2: moments that are copied as they are would make the steps of copies n times too small.

    Args:
        run: a run folder, for its newest checkpoint.
        folder: a new folder; its run file resumes from this checkpoint.

    Returns:
        The checkpoint.

    Raises:
        UserError: the run cannot be read, shares no layers, has an optimizer without powers of its state, or the
            folder exists; ``ConfigError`` if its settings need sharing.
        RunError: the files cannot be written; nothing is left behind.
    """
    checkpoint, info, config, texts = read_source(run, folder)
    sharing, rule = config.model.sharing, config.optimizer.rule
    if sharing is None:
        raise UserError(f"the layers of {run} share no weights (model.share_layers); delink has nothing to do")
    tensors = _copies(CheckpointReader(checkpoint), sharing, rule, config.optimizer.name)
    config = replace(
        config,
        model=replace(config.model, share_layers=None),
        checkpoint=replace(config.checkpoint, init=None, resume=folder.absolute()),
        output=OutputConfig(),
    )
    problems = find_problems(replace(config, checkpoint=replace(config.checkpoint, resume=None)), trains=False)
    if problems:
        raise ConfigError(problems, "the run with a copy for each layer")
    info = replace(info, model=model_settings(config.model), cause="end")
    return write_converted(folder, info, config, tensors, texts)


def _copies(reader: CheckpointReader, sharing: Sharing, rule: Optimizer, name: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint by key, those of shared layers once for each layer."""
    every = stored_parameters(reader, prefix="")
    read = {key: torch.empty(shape, dtype=every.dtypes[key]) for key, shape in every.shapes.items()}
    load_stored(every, read)
    found: dict[str, Tensor] = {}
    for key, tensor in read.items():
        prefix, parameter = _split(key)
        value = tensor
        if prefix != MODEL and is_of_layer(parameter):
            state = prefix.split(".")[1]
            if state not in rule.powers:
                raise UserError(
                    f"optimizer.name {name} does not state which power of the gradient its state {state} is of "
                    "(Optimizer.powers), so it cannot be divided among layers; start from the weights alone"
                )
            value = tensor / float(sharing.size ** rule.powers[state])
        # One tensor for all: they are written, not changed.
        found |= {prefix + one: value for one in layer_names(parameter, sharing)}
    return found


def _split(key: str) -> tuple[str, str]:
    """The prefix of a key of a checkpoint, and the name of its parameter."""
    if key.startswith(MODEL):
        return MODEL, key.removeprefix(MODEL)
    _, state, parameter = key.split(".", 2)
    return f"{STATE}{state}.", parameter
