"""Makes experts of a dense model's feed-forward blocks: sparse upcycling (arXiv 2212.05055)."""

import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    METADATA,
    CheckpointInfo,
    damage,
    draft_of,
    find_checkpoint,
    measure,
    name_of,
    read_info,
    read_tokenizer,
    sync_folder,
    write_info,
    write_synced,
)
from pipeloom.config import CheckpointConfig, ModelConfig, OutputConfig, RunConfig, find_problems
from pipeloom.config.expert_problems import balance_problems
from pipeloom.config.file import format_run, read_run_file
from pipeloom.errors import ConfigError, RunError, UserError
from pipeloom.model.split import first_value
from pipeloom.runs.run_folder import CONFIG
from pipeloom.training.checkpoints.boxes import Elements
from pipeloom.training.checkpoints.contents import MODEL
from pipeloom.training.checkpoints.planner import ElementsSavePlanner
from pipeloom.training.checkpoints.storage import CheckpointReader, CheckpointWriter
from pipeloom.training.export import Stored, load_stored, stored_parameters
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
    checkpoint = find_checkpoint(run)
    if found := damage(checkpoint):
        raise UserError("\n  - ".join([f"the checkpoint {checkpoint} is damaged; use another one:", *found]))
    if folder.exists():
        raise UserError(f"{folder} exists; choose another folder")
    info, config = read_info(checkpoint), _config_of(run)
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
    return _write(folder, info, config, tensors, read_tokenizer(checkpoint) or {})


def _config_of(run: Path) -> RunConfig:
    """The settings of a run."""
    file = run / CONFIG
    if not file.exists():
        raise UserError(f"expected a run folder with {CONFIG}, found none in {run}")
    config, problems = read_run_file(file)
    if problems:
        raise ConfigError(problems, str(file))
    return config


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


def _write(
    folder: Path, info: CheckpointInfo, config: RunConfig, tensors: Mapping[str, Tensor], texts: Mapping[str, str]
) -> Path:
    """Write the folder of a run with one checkpoint, or nothing."""
    path, made = folder / FOLDER / name_of(info.step), not folder.parent.exists()
    draft = draft_of(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    held = {
        MODEL + name: Elements(tensor.flatten(), shapes[name], (0,) * tensor.ndim, shapes[name], 0)
        for name, tensor in tensors.items()
    }
    try:
        draft.mkdir(parents=True)
        assert not dist.is_initialized(), "a conversion has one process"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # on purpose: one process
            dcp.save({}, storage_writer=CheckpointWriter(draft), planner=ElementsSavePlanner(held), no_dist=True)
        for name, text in texts.items():
            write_synced(draft / name, text)
        write_info(draft, info, measure([draft / METADATA, *draft.glob("__0_*"), *(draft / name for name in texts)]))
        sync_folder(draft)
        draft.rename(path)
        write_synced(folder / CONFIG, format_run(config))
    except BaseException as error:
        shutil.rmtree(folder.parent if made else folder, ignore_errors=True)
        if isinstance(error, OSError | dcp.CheckpointException):
            raise RunError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
        raise
    return path
