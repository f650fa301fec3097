"""Reads a run for a conversion of its model, and writes the folder of the run that goes on."""

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint
from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    METADATA,
    CheckpointInfo,
    draft_of,
    measure,
    name_of,
    read_info,
    read_tokenizer,
    run_of,
    sync_folder,
    write_info,
    write_synced,
)
from pipeloom.config import RunConfig
from pipeloom.config.file import format_run, read_run_file
from pipeloom.errors import ConfigError, RunError, UserError
from pipeloom.runs.run_folder import CONFIG
from pipeloom.training.checkpoints.boxes import Elements
from pipeloom.training.checkpoints.planner import ElementsSavePlanner
from pipeloom.training.checkpoints.storage import CheckpointWriter


class Source(NamedTuple):
    """What is converted.

    Attributes:
        checkpoint: its folder.
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
    if folder.exists():
        raise UserError(f"{folder} exists; choose another folder")
    return found


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
    path, made = folder / FOLDER / name_of(info.step), not folder.parent.exists()
    draft = draft_of(path)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    held = {
        key: Elements(tensor.flatten(), shapes[key], (0,) * tensor.ndim, shapes[key], 0)
        for key, tensor in tensors.items()
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
