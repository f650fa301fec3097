"""The weights of a checkpoint as safetensors files, whole and by name, and its tokenizer, in one process.

A model of one file is ``model.safetensors``. A larger one is several files, ``model-00001-of-00003.safetensors`` and
so on, with ``model.safetensors.index.json``, which maps parameters to files, as Hugging Face's libraries write
and read them.
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
"""Most bytes of one file, unless a single parameter has more; what Hugging Face's libraries took for years."""


def export_weights(
    checkpoint: str | Path, folder: str | Path, *, dtype: Dtype | None = None, file_bytes: int = FILE_BYTES
) -> list[Path]:
    """Write the weights of a checkpoint as safetensors files, and its tokenizer. It takes the memory of one file.

    Examples:
        >>> from pipeloom import export_weights
        >>> export_weights("outputs/run", "weights", dtype="bfloat16")  # doctest: +SKIP
        [PosixPath('weights/model.safetensors'), PosixPath('weights/tokenizer.json')]

    Args:
        checkpoint: a complete one, or a run folder, which means its latest one.
        folder: where the files go; made if it is not there.
        dtype: of the written weights. ``None``: as they are in the checkpoint.
        file_bytes: most bytes of weights in one file; a larger parameter has a file of its own.

    Returns:
        The files: weights; the tokenizer, unless the folder has it; the index, if there are several files of weights.

    Raises:
        UserError: the checkpoint cannot be read or is damaged, or the folder holds weights or another tokenizer.
        RunError: the files cannot be written; none is left.
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
        raise UserError(f"{folder} holds weights already; choose another folder, or move them away")
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
    """The file of the tokenizer by name; empty if the checkpoint has none, or the folder has the same."""
    text, file = read_tokenizer(checkpoint), folder / TOKENIZER
    if text is None or not file.exists():
        return {} if text is None else {TOKENIZER: text}
    if file.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{file} is another tokenizer; choose another folder, or move it away")
    return {}


def _check_room(folder: Path, num_bytes: int) -> None:
    """Refuse what cannot fit before hours of writing."""
    # The folder itself may not exist yet; the nearest one above it is on the same disk.
    disk = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(disk).free
    if free < num_bytes:
        raise RunError(f"cannot write weights to {folder}: they have {num_bytes:,} bytes, {free:,} are free there")


@contextmanager
def _together(folder: Path) -> Iterator[Path]:
    """A folder to write files into. They go to ``folder`` at the end: all of them, or none and nothing is left."""
    # So that a failure removes what was made here and nothing that was there before.
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    drafts, placed = folder / _DRAFTS, list[Path]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(drafts, ignore_errors=True)  # of an export that was killed
        drafts.mkdir()
        yield drafts
        # the index last: several files of weights are a model only with it
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
    """Names of parameters, in their order, by the file that they are in."""
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
    """Whole parameters by name."""
    tensors = {MODEL + name: torch.empty(one.size, dtype=dtype or one.properties.dtype) for name, one in stored.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            # torch allocates nothing itself: the tensors are already of the
            # written type, and DCP converts while it copies.
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise UserError(f"cannot read the checkpoint {reader.path}: {cause}; use another one") from None
    return {key.removeprefix(MODEL): tensor for key, tensor in tensors.items()}


def _write(file: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a file of weights, on disk when the call returns; equal contents give equal bytes."""
    # A file that Python makes has the permissions of the user's umask;
    # those of safetensors' file are set to them below.
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata=about)
    file.chmod(mode)  # safetensors makes files that nobody else may read
    with file.open("r+b") as opened:
        # The format: 8 bytes, little-endian, are the length of a JSON header, which may end in spaces.
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # safetensors writes them in random order
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "a header that became longer by sorting"
        opened.seek(8)
        opened.write(text.ljust(length))
        opened.flush()
        os.fsync(opened.fileno())
