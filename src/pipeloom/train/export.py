"""The weights of a checkpoint as safetensors files, whole and by name, in one process.

A model of one file is ``model.safetensors``. A larger one is several files, ``model-00001-of-00003.safetensors`` and
so on, with ``model.safetensors.index.json``, which says which parameter is in which, as Hugging Face's libraries write
and read them.
"""

import json
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeloom.checkpoint_folder import damage, read_info
from pipeloom.errors import RunError, UserError
from pipeloom.run_folder import WEIGHTS, WEIGHTS_INDEX, weight_files
from pipeloom.train.checkpoint import MODEL, refuse_damaged
from pipeloom.train.checkpoint_storage import CheckpointReader

FILE_BYTES = 5_000_000_000
"""Most bytes of one file, unless a single parameter has more; what Hugging Face's libraries took for years."""


def export(
    checkpoint: Path, folder: Path, *, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> list[Path]:
    """Write the weights of a checkpoint as safetensors files. The memory that it takes is that of one file.

    Args:
        checkpoint: a complete one.
        folder: where the files go; made if it is not there.
        dtype: of the written weights. None: as they are in the checkpoint.
        file_bytes: most bytes of weights in one file; a larger parameter has a file of its own.

    Returns:
        The files; with several of them the last one is the index.

    Raises:
        UserError: the checkpoint cannot be read, or the folder holds weights already.
        RunError: the files cannot be written.
    """
    refuse_damaged(checkpoint, damage(checkpoint))
    info, reader = read_info(checkpoint), CheckpointReader(checkpoint)
    stored = {
        key.removeprefix(MODEL): found
        for key, found in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(MODEL) and isinstance(found, TensorStorageMetadata)
    }
    if not stored:
        raise UserError(f"expected a checkpoint with weights, found none in {checkpoint}")
    sizes = {name: prod(one.size) * (dtype or one.properties.dtype).itemsize for name, one in stored.items()}
    parts = _parts(sizes, file_bytes)
    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else [WEIGHTS]
    about = {"format": "pt", "step": str(info.step), "model": json.dumps(info.model)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if weight_files(folder):
            raise UserError(f"{folder} holds weights already; choose another folder, or move them away")
        for name, part in zip(names, parts, strict=True):
            _write(folder / name, _read(reader, {key: stored[key] for key in part}, dtype), about)
        if len(parts) > 1:
            places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
            index = {"metadata": {"total_size": sum(sizes.values()), **about}, "weight_map": places}
            (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            names.append(WEIGHTS_INDEX)
    except OSError as error:
        raise RunError(f"cannot write weights to {folder}: {error.strerror or error}") from None
    return [folder / name for name in names]


def _parts(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Cut names, in their order, into parts of a limited size."""
    parts: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if parts[-1] and total + size > most:
            parts.append([])
            total = 0
        parts[-1].append(name)
        total += size
    return parts


def _read(
    reader: CheckpointReader, stored: Mapping[str, TensorStorageMetadata], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Whole parameters by name."""
    tensors = {MODEL + name: torch.empty(one.size, dtype=dtype or one.properties.dtype) for name, one in stored.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise UserError(f"cannot read the checkpoint {reader.path}: {cause}; use another one") from None
    return {key.removeprefix(MODEL): tensor for key, tensor in tensors.items()}


def _write(file: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a file at once, so that nobody ever sees a part of it under its name."""
    draft = file.with_name(f".{file.name}.part")
    draft.touch()
    mode = draft.stat().st_mode
    save_file(tensors, draft, metadata=about)
    draft.chmod(mode)  # safetensors makes files that nobody else may read
    draft.replace(file)
