"""Reads a run for a conversion of its model, and writes the folder of the run that resumes from it."""

import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from pipeloom.catalog.model_files import read_model
from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint
from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    METADATA,
    TOKENIZER,
    CheckpointInfo,
    among_checkpoints,
    is_hugging_face,
    measure,
    name_of,
    read_info,
    read_tokenizer,
    run_of,
    sync_folder,
    write_info,
    write_synced,
)
from pipeloom.config import AdapterConfig, CheckpointConfig, RunConfig, with_pretrained
from pipeloom.config.file import format_run, read_run_file
from pipeloom.config.tokenizer_files import tokenizer_files
from pipeloom.errors import ConfigError, RunError, UserError
from pipeloom.predict.describe import pretrained_run
from pipeloom.runs.run_folder import CONFIG
from pipeloom.system.files import missing_folders, remove_empty
from pipeloom.training.checkpoints.boxes import Elements
from pipeloom.training.checkpoints.contents import checkpoint_info
from pipeloom.training.checkpoints.planner import ElementsSavePlanner
from pipeloom.training.checkpoints.storage import CheckpointReader, CheckpointWriter
from pipeloom.training.conversions.export import Stored, stored_parameters
from pipeloom.training.pretrained import PretrainedWeights


class Source(NamedTuple):
    """What is converted.

    Attributes:
        checkpoint: its folder; or a Hugging Face folder.
        info: its description.
        config: the settings of its run.
        texts: files of its tokenizer.
    """

    checkpoint: Path
    info: CheckpointInfo
    config: RunConfig
    texts: dict[str, str]


def read_source(run: Path, folder: Path) -> Source:
    """What ``read_run`` returns, for a folder that will be written.

    Raises:
        UserError: as ``read_run``, or the folder exists.
    """
    found = read_run(run)
    for problem in existing(folder):
        raise UserError(problem)
    return found


def existing(folder: Path) -> list[str]:
    """The problem of a folder that should be a new one; empty if it is."""
    reason = f"{folder} exists; choose another folder" if folder.exists() else among_checkpoints(folder)
    return [] if reason is None else [reason]


def read_run(run: Path) -> Source:
    """The newest undamaged checkpoint of a run, or a given one.

    Args:
        run: a run folder, or a checkpoint of one.

    Raises:
        UserError: the run cannot be read; ``ConfigError`` if its settings are wrong.
    """
    choice = choose_checkpoint(run)
    choice.print_remarks()
    checkpoint = choice.path
    file = (run_of(checkpoint) or run) / CONFIG
    if not file.exists():
        raise UserError(f"expected a run folder with {CONFIG}, found none in {file.parent}")
    config, problems = read_run_file(file)
    if problems:
        raise ConfigError(problems, str(file))
    return Source(checkpoint, read_info(checkpoint), config, read_tokenizer(checkpoint) or {})


def read_folder(folder: Path, config: RunConfig | None) -> Source:
    """A Hugging Face folder, whose weights stay on the disk.

    Args:
        folder: its path.
        config: of a run whose settings apply, except those of the model; ``None`` for the defaults of its weights.

    Raises:
        UserError: it cannot be read, is of a model that is not supported, or lacks weights; lists everything.
    """
    folder = folder.absolute()
    config = with_pretrained(pretrained_run(folder, RunConfig())) if config is None else config
    known = read_model(str(folder), config.data.seq_len, adapts=True)
    model = known.over(replace(config.model, preset=None, file=folder))
    config = replace(config, model=model, adapter=AdapterConfig(), checkpoint=CheckpointConfig(init=folder))
    texts = dict(tokenizer_files(folder)) if (folder / TOKENIZER).is_file() else {}
    found = Source(folder, checkpoint_info(config, None, 0, 0, 0), config, texts)
    parameters_of(found)
    return found


def parameters_of(source: Source) -> Stored | PretrainedWeights:
    """The parameters of what is converted, which are not read yet.

    Raises:
        UserError: there are none, or they are of another model.
    """
    if is_hugging_face(source.checkpoint):
        return PretrainedWeights(source.checkpoint, source.config)
    return stored_parameters(CheckpointReader(source.checkpoint))


def write_converted(
    folder: Path, info: CheckpointInfo, config: RunConfig, tensors: Mapping[str, Tensor], texts: Mapping[str, str]
) -> Path:
    """Write the folder of a run with one checkpoint, or nothing; returns the checkpoint.

    Args:
        folder: a new one.
        info: of the checkpoint.
        config: of the run.
        tensors: by the keys of a checkpoint.
        texts: further files of the checkpoint.

    Raises:
        RunError: the files cannot be written; nothing is left behind.
    """
    path = folder / FOLDER / name_of(info.step)
    made = missing_folders(folder.parent)
    draft = folder.with_name(f".{secrets.token_hex(8)}.part")
    inside = draft / path.relative_to(folder)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    held = {
        key: Elements(tensor.flatten(), shapes[key], (0,) * tensor.ndim, shapes[key], 0)
        for key, tensor in tensors.items()
    }
    try:
        inside.mkdir(parents=True)
        assert not dist.is_initialized(), "a conversion has one process"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # on purpose: one process
            dcp.save({}, storage_writer=CheckpointWriter(inside), planner=ElementsSavePlanner(held), no_dist=True)
        for name, text in texts.items():
            write_synced(inside / name, text)
        stored = [inside / METADATA, *inside.glob("__0_*"), *(inside / name for name in texts)]
        write_info(inside, info, measure(stored))
        sync_folder(inside)
        write_synced(draft / CONFIG, format_run(config))
        draft.rename(folder)
    except BaseException as error:
        # Another process may have made the folder meanwhile, or written to a folder that was made here.
        shutil.rmtree(draft, ignore_errors=True)
        remove_empty(made)
        if isinstance(error, OSError) and folder.exists():
            raise RunError(f"{folder} was made by another process meanwhile; choose another folder") from None
        if isinstance(error, OSError | dcp.CheckpointException):
            raise RunError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
        raise
    return path
