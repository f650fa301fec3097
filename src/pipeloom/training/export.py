"""Exports the unsharded weights of a checkpoint as safetensors files, and its tokenizer, in one process.

The files are named as Hugging Face's libraries write and read them: ``model.safetensors``, or for a larger model
``model-00001-of-00003.safetensors`` and so on, with ``model.safetensors.index.json``, which maps parameters to files.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeloom.checkpoint.checkpoint_choice import refusal
from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, damage, find_checkpoint, read_info, read_tokenizer
from pipeloom.errors import RunError, UserError
from pipeloom.runs.run_folder import WEIGHTS, WEIGHTS_INDEX, weight_files
from pipeloom.training.checkpoints.checkpoint import MODEL
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.workload.dtypes import Dtype

_DRAFTS = ".weights.part"
FILE_BYTES = 5_000_000_000
"""Maximum bytes of a file, unless a single parameter has more; the long-time default of Hugging Face's libraries."""


def export_weights(
    checkpoint: str | Path, folder: str | Path, *, dtype: Dtype | None = None, file_bytes: int = FILE_BYTES
) -> list[Path]:
    """Write the weights of a checkpoint as safetensors files, and its tokenizer. Peak memory is one file of weights.

    Examples:
        >>> from pipeloom import export_weights
        >>> export_weights("outputs/run", "weights", dtype="bfloat16")  # doctest: +SKIP
        [PosixPath('weights/model.safetensors'), PosixPath('weights/tokenizer.json')]

    Args:
        checkpoint: a complete checkpoint, or a run folder, of which the latest complete one is used.
        folder: for the files; created if missing.
        dtype: of the written weights. ``None``: as in the checkpoint.
        file_bytes: maximum bytes of weights in one file; a larger parameter gets its own file.

    Returns:
        The files: weights; the tokenizer, unless the folder has it; the index, if there are several files of weights.

    Raises:
        UserError: the checkpoint cannot be read or is damaged, or the folder has weights or another tokenizer.
        RunError: the files cannot be written; none is left behind.
    """
    checkpoint, folder = find_checkpoint(Path(checkpoint)), Path(folder)
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    if damage(checkpoint):
        raise UserError(refusal(checkpoint))
    reader = CheckpointReader(checkpoint)
    stored = {
        key.removeprefix(MODEL): found
        for key, found in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(MODEL) and isinstance(found, TensorStorageMetadata)
    }
    if not stored:
        raise UserError(f"expected a checkpoint with weights, found none in {checkpoint}")
    if weight_files(folder):
        raise UserError(f"{folder} already has weights; choose another folder, or move them")
    texts = _tokenizer(checkpoint, folder)
    sizes = {name: prod(one.size) * (torch_dtype or one.properties.dtype).itemsize for name, one in stored.items()}
    parts = _named_parts(sizes, file_bytes)
    info = read_info(checkpoint)
    about = {"format": "pt", "step": str(info.step), "model": json.dumps(info.model)}
    if len(parts) > 1:
        places = {key: name for name, part in parts.items() for key in part}
        index = {"metadata": {"total_size": sum(sizes.values()), **about}, "weight_map": places}
        texts[WEIGHTS_INDEX] = json.dumps(index, indent=2, sort_keys=True) + "\n"
    _check_room(folder, sum(sizes.values()))
    with _together(folder) as drafts:
        for name, part in parts.items():
            _write(drafts / name, _read(reader, {key: stored[key] for key in part}, torch_dtype), about)
        for name, text in texts.items():
            (drafts / name).write_text(text, encoding="utf-8")
    return [folder / name for name in [*parts, *texts]]


def _tokenizer(checkpoint: Path, folder: Path) -> dict[str, str]:
    """Text of the tokenizer by file name; empty if the checkpoint has none, or the folder has the same."""
    text, file = read_tokenizer(checkpoint), folder / TOKENIZER
    if text is None or not file.exists():
        return {} if text is None else {TOKENIZER: text}
    if file.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{file} is another tokenizer; choose another folder, or move it")
    return {}


def _check_room(folder: Path, num_bytes: int) -> None:
    # The folder may not exist yet; its nearest existing parent is on the same disk.
    disk = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(disk).free
    if free < num_bytes:
        raise RunError(f"cannot write weights to {folder}: they have {num_bytes:,} bytes, {free:,} are free there")


@contextmanager
def _together(folder: Path) -> Iterator[Path]:
    """A draft folder, whose files are moved to ``folder`` at the end: all of them, or none after a failure."""
    # A failure removes the folders created here and no others.
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    drafts, placed = folder / _DRAFTS, list[Path]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(drafts, ignore_errors=True)  # of an export that was killed
        drafts.mkdir()
        yield drafts
        # The index last: it marks the files as complete.
        for draft in sorted(drafts.iterdir(), key=lambda file: (file.name == WEIGHTS_INDEX, file.name)):
            placed.append(folder / draft.name)
            draft.replace(placed[-1])
        drafts.rmdir()
    except BaseException as error:  # an interrupt, too
        for file in placed:
            file.unlink(missing_ok=True)
        shutil.rmtree(drafts, ignore_errors=True)
        with suppress(OSError):
            for one in made:
                one.rmdir()
        if isinstance(error, OSError | SafetensorError):
            what = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
            raise RunError(f"cannot write weights to {folder}: {what}") from None
        raise


def _named_parts(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Names of parameters, in their order, by file name."""
    parts: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if parts[-1] and total + size > most:
            parts.append([])
            total = 0
        parts[-1].append(name)
        total += size
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{n:05}-of-{len(parts):05}.safetensors": part for n, part in enumerate(parts, 1)}


def _read(
    reader: CheckpointReader, stored: Mapping[str, TensorStorageMetadata], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Unsharded parameters by name."""
    tensors = {MODEL + name: torch.empty(one.size, dtype=dtype or one.properties.dtype) for name, one in stored.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose: one process
            # DCP reads into these tensors and converts to their dtype while it copies.
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise UserError(f"cannot read the checkpoint {reader.path}: {cause}; use another one") from None
    return {key.removeprefix(MODEL): tensor for key, tensor in tensors.items()}


def _write(file: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a file of weights and fsync it; equal contents give equal bytes."""
    # safetensors creates files that only their owner may read. A file created by Python shows the user's umask.
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata=about)
    file.chmod(mode)
    with file.open("r+b") as opened:
        # Format: the length of the JSON header in 8 bytes, little-endian; then the header, which may end in spaces.
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # safetensors' order is random
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "a header that became longer by sorting"
        opened.seek(8)
        opened.write(text.ljust(length))
        opened.flush()
        os.fsync(opened.fileno())
