"""Makes experts of a dense model's feed-forward blocks: sparse upcycling (arXiv 2212.05055)."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.config import CheckpointConfig, ModelConfig, OutputConfig, find_problems
from pipeloom.config.expert_problems import balance_problems
from pipeloom.errors import ConfigError, UserError
from pipeloom.model.split import first_value
from pipeloom.training.checkpoints.contents import MODEL
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.converted import read_source, write_converted
from pipeloom.training.conversions.export import Stored, load_stored, stored_parameters
from pipeloom.workload.model import model_settings

_BLOCK = ".feed_forward."


def upcycle(
    run: Path, folder: Path, *, experts: int, experts_per_token: int | None = None, expert_every: int | None = None
) -> Path:
    """Write a run folder with the weights of a dense run, each feed-forward block copied into experts.

    The model computes what it did: the experts of a token are equal, and their weights add up to 1. Routers are random,
    as those of a new model, so that experts become different in training. Optimizer state is left out.

    Args:
        run: a run folder, for its newest checkpoint.
        folder: a new folder; its run file starts from these weights.
        experts: of each layer with experts.
        experts_per_token: that a token takes; ``None``: 2.
        expert_every: every layer of this number has experts; ``None``: all.

    Returns:
        The checkpoint.

    Raises:
        UserError: the run cannot be read, is not dense, or the folder exists; ``ConfigError`` with all that is wrong
            with the sizes.
        RunError: the files cannot be written; nothing is left behind.
    """
    checkpoint, info, config, texts = read_source(run, folder)
    if info.adapter is not None:
        raise UserError(f"{checkpoint} has adapters; export it with --merge, and train from that folder first")
    if config.model.experts is not None or config.model.adapted is not None:
        what = "experts already" if config.model.experts is not None else "layers of transformers"
        raise UserError(f"the model of {run} has {what}; upcycle takes a dense model of a family of pipeloom")
    sizes = {"experts": experts, "experts_per_token": experts_per_token, "expert_every": expert_every}
    config = replace(
        config,
        model=replace(config.model, preset=None, file=None, **sizes).canonical,
        checkpoint=CheckpointConfig(init=folder.absolute()),
        output=OutputConfig(),
    )
    if list(balance_problems(config)):
        config = replace(config, model=replace(config.model, balance="microbatch"))
    problems = find_problems(replace(config, checkpoint=CheckpointConfig()), trains=False)
    if problems:
        raise ConfigError(problems, "the run with experts")
    info = replace(info, model=model_settings(config.model), cause="end", base=None)
    tensors = _with_experts(stored_parameters(CheckpointReader(checkpoint)), config.model, config.training.seed)
    return write_converted(folder, info, config, {MODEL + name: one for name, one in tensors.items()}, texts)


def _with_experts(stored: Stored, model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The parameters of the model with experts; those of equal experts are one tensor."""
    layout = model.expert_layout
    assert layout is not None
    read = {name: torch.empty(shape, dtype=stored.dtypes[name]) for name, shape in stored.shapes.items()}
    load_stored(stored, read)
    found: dict[str, Tensor] = {}
    for name, tensor in read.items():
        layer, *rest = name.split(_BLOCK)
        matrix = "".join(rest)
        if not matrix or not layout.are_in(int(layer.split(".")[-1])):
            found[name] = tensor
            continue
        found |= {f"{layer}{_BLOCK}experts.{number}.{matrix}": tensor for number in range(layout.count)}
        router = f"{layer}{_BLOCK}router.weight"
        if router not in found:
            found[router] = first_value(router, (layout.count, model.hidden_size), seed, model).to(tensor.dtype)
    return found
