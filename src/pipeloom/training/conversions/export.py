"""Exports the unsharded weights of a checkpoint as safetensors files, and its tokenizer, in one process.

The files are named as Hugging Face's libraries write and read them: ``model.safetensors``, or for a larger model
``model-00001-of-00003.safetensors`` and so on, with ``model.safetensors.index.json``, which maps tensors to files. The
tensors are pipeloom's parameters, or those of a Hugging Face architecture.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeloom.calls import checked
from pipeloom.catalog.weight_files import FileTensor
from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint, reading
from pipeloom.checkpoint.checkpoint_folder import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    among_checkpoints,
    read_tokenizer,
)
from pipeloom.config.resumed import model_in
from pipeloom.data.tokenizer import END_OF_TEXT
from pipeloom.errors import RunError, UserError
from pipeloom.model.block_sparse import Pattern, weight_patterns
from pipeloom.runs.run_folder import ADAPTER_WEIGHTS, WEIGHTS, WEIGHTS_INDEX, weight_files
from pipeloom.system.files import missing_folders, remove_empty
from pipeloom.system.folder_lock import locked
from pipeloom.training.checkpoints.contents import MODEL
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.export_content import (
    Content,
    hugging_face_content,
    own_content,
    peft_content,
    stored_adapter,
)
from pipeloom.workload.adapter import FIRST, SECOND, Adapter, without_pairs
from pipeloom.workload.dtypes import Dtype

_DRAFTS = ".weights.part"
FILE_BYTES = 5_000_000_000
"""Maximum bytes of a file, unless a single parameter has more; the long-time default of Hugging Face's libraries."""


Format = Literal["pipeloom", "hf"]


@checked
def export_weights(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    format: Format = "pipeloom",  # noqa: A002  the name of the flag
    dtype: Dtype | None = None,
    file_bytes: int | None = None,
    merge: bool = False,
) -> list[Path]:
    """Write the weights of a checkpoint as safetensors files, and its tokenizer. Peak memory is one file of weights.

    Examples:
        >>> from pipeloom import export_weights
        >>> export_weights("outputs/run", "weights", dtype="bfloat16")  # doctest: +SKIP
        [PosixPath('weights/model.safetensors'), PosixPath('weights/tokenizer.json')]

    Args:
        checkpoint: a complete checkpoint, or a run folder, of which the latest undamaged one is used.
        folder: for the files; created if missing.
        format: "pipeloom" for parameters with the names of this package, "hf" for a folder that ``from_pretrained`` of
            Hugging Face's transformers loads; of a run with adapters, unless they are merged, a folder of PEFT with the
            adapters alone.
        dtype: of the written weights. ``None``: as in the folder that the run started from with format "hf", otherwise
            as in the checkpoint.
        file_bytes: maximum bytes of weights in one file; a larger tensor gets its own file. ``None``: files as in the
            folder that the run started from with format "hf", otherwise ``FILE_BYTES``.
        merge: add the products of adapters to the matrices that they belong to, and leave the adapters out.

    Returns:
        The files: weights; the tokenizer, unless the folder has it; the index, if there are several files of weights;
        with format "hf" the description of the model.

    Raises:
        UserError: the checkpoint cannot be read or is damaged, the folder has weights or another tokenizer, or no
            architecture of Hugging Face computes the model, or PEFT cannot have its adapters.
        RunError: the files cannot be written; none is left behind.
    """
    choice = choose_checkpoint(Path(checkpoint))
    choice.print_remarks()
    with reading(choice.path):
        return export_checkpoint(
            choice.path, Path(folder), format=format, dtype=dtype, file_bytes=file_bytes, merge=merge
        )


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    format: Format,  # noqa: A002  as above
    dtype: Dtype | None,
    file_bytes: int | None,
    merge: bool,
) -> list[Path]:
    """``export_weights`` of a checkpoint whose files are known to be undamaged."""
    if (reason := among_checkpoints(folder)) is not None:
        raise UserError(reason)
    _refuse_weights(folder)
    stored, adapter = stored_parameters(CheckpointReader(checkpoint)), stored_adapter(checkpoint)
    if merge and adapter is None:
        raise UserError(f"the checkpoint {checkpoint} has no adapters to merge; leave merge out")
    merged = adapter if merge else None
    if format == "hf" and adapter is not None and not merge:
        if file_bytes is not None:
            raise UserError("adapters of PEFT are one file; leave file_bytes out, or merge them")
        content = peft_content(checkpoint, adapter, stored.dtypes)
    else:
        kept = {name: stored.dtypes[name] for name in (without_pairs(stored.dtypes) if merge else stored.dtypes)}
        is_hf = format == "hf"
        stored = stored.with_dense(weight_patterns(model_in(checkpoint))) if is_hf else stored
        content = hugging_face_content(checkpoint, kept, dtype, file_bytes) if is_hf else own_content(checkpoint, kept)
    if dtype is not None:
        content = replace(content, dtypes=dict.fromkeys(content.dtypes, getattr(torch, dtype)))
    content = replace(content, texts={**_tokenizer_texts(checkpoint, format), **content.texts})
    return _write_files(folder, stored, content, merged=merged, file_bytes=file_bytes or FILE_BYTES)


def _refuse_weights(folder: Path) -> None:
    if weight_files(folder) or (folder / ADAPTER_WEIGHTS).exists():
        raise UserError(f"{folder} already has weights; choose another folder, or move them")


def _tokenizer_texts(checkpoint: Path, format: Format) -> dict[str, str]:  # noqa: A002  as above
    """The files of the tokenizer. transformers has an end of text only by ``tokenizer_config.json``."""
    texts = read_tokenizer(checkpoint) or {}
    has_own_end = json.dumps(END_OF_TEXT) in texts.get(TOKENIZER, "")  # another tokenizer would get a token more
    if format == "hf" and has_own_end and TOKENIZER_CONFIG not in texts:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        return {**texts, TOKENIZER_CONFIG: json.dumps(settings, indent=2) + "\n"}
    return texts


class Stored(NamedTuple):
    """The parameters of a checkpoint.

    Attributes:
        reader: reads them.
        shapes: of parameters by name, as they are read.
        dtypes: of parameters by name.
        prefix: of their keys.
        patterns: of those that are stored as the kept blocks of a matrix and read as the matrix.
    """

    reader: CheckpointReader
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    prefix: str = MODEL
    patterns: Mapping[str, Pattern] = MappingProxyType({})

    def whole(self, name: str) -> Tensor:
        """A parameter.

        Raises:
            UserError: it cannot be read.
        """
        found = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        load_stored(self, {name: found})
        return found

    def with_dense(self, patterns: Mapping[str, Pattern]) -> "Stored":
        """The same parameters; kept blocks are read as matrices."""
        return self._replace(
            shapes=self.shapes | {name: one.whole for name, one in patterns.items()}, patterns=patterns
        )


def stored_parameters(reader: CheckpointReader, prefix: str = MODEL) -> Stored:
    """The parameters of a checkpoint, or other tensors with a prefix of their keys, which are not read yet."""
    found = {
        key.removeprefix(prefix): found
        for key, found in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(found, TensorStorageMetadata)
    }
    if not found:
        raise UserError(f"expected a checkpoint with weights, found none in {reader.path}")
    shapes = {name: tuple(one.size) for name, one in found.items()}
    return Stored(reader, shapes, {name: one.properties.dtype for name, one in found.items()}, prefix)


def _write_files(
    folder: Path, stored: Stored, content: Content, *, merged: Adapter | None, file_bytes: int
) -> list[Path]:
    """Write all files or none; returns them.

    Args:
        folder: for the files.
        stored: the parameters.
        content: what to write.
        merged: adapters that are added to their matrices.
        file_bytes: maximum bytes of weights in one file, where the content does not name the files.
    """
    sizes = {one.name: prod(one.shape(stored.shapes)) * content.dtypes[one.name].itemsize for one in content.tensors}
    parts, texts = content.parts or _named_parts(sizes, file_bytes), dict(content.texts)
    if len(parts) > 1 and WEIGHTS_INDEX not in texts:
        texts[WEIGHTS_INDEX] = _index(parts, {"total_size": sum(sizes.values()), **content.about})
    _check_room(folder, sum(sizes.values()))
    by_name = {one.name: one for one in content.tensors}
    with _together(folder) as drafts:
        texts = _missing_texts(texts, folder)
        for name, part in parts.items():
            tensors = _read(stored, [by_name[key] for key in part], content.dtypes, merged)
            _write(drafts / name, tensors, content.headers.get(name, content.about))
        for name, text in texts.items():
            (drafts / name).write_text(text, encoding="utf-8")
    return [folder / name for name in [*parts, *texts]]


def _index(parts: Mapping[str, list[str]], about: Mapping[str, object]) -> str:
    """The text of ``model.safetensors.index.json``; ``parts`` has the names of tensors by file."""
    places = {key: name for name, part in parts.items() for key in part}
    return json.dumps({"metadata": dict(about), "weight_map": places}, indent=2, sort_keys=True) + "\n"


def _missing_texts(texts: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The text files that the folder does not have; those that it has must be equal."""
    found = {name: folder / name for name in texts if (folder / name).exists()}
    others = [file for name, file in found.items() if file.read_text(encoding="utf-8", errors="replace") != texts[name]]
    if others:
        kind = "tokenizer" if others[0].name in (TOKENIZER, TOKENIZER_CONFIG) else "file"
        what = f"{others[0]} is another {kind}"
        raise UserError(f"{what}; choose another folder, or move it")
    return {name: text for name, text in texts.items() if name not in found}


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
    made = missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            _refuse_weights(folder)  # another process may have written them since the first look
            yield from _drafted(folder)
    except BaseException as error:  # an interrupt, too
        remove_empty(made)
        if isinstance(error, OSError | SafetensorError):
            what = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2]
            raise RunError(f"cannot write weights to {folder}: {what}") from None
        raise


def _drafted(folder: Path) -> Iterator[Path]:
    """``_together`` of a folder that is locked."""
    drafts, placed = folder / _DRAFTS, list[Path]()
    try:
        shutil.rmtree(drafts, ignore_errors=True)  # of an export that was killed
        drafts.mkdir()
        yield drafts
        # The index last: it marks the files as complete.
        for draft in sorted(drafts.iterdir(), key=lambda file: (file.name == WEIGHTS_INDEX, file.name)):
            placed.append(folder / draft.name)
            draft.replace(placed[-1])
        drafts.rmdir()
    except BaseException:
        for file in placed:
            file.unlink(missing_ok=True)
        shutil.rmtree(drafts, ignore_errors=True)
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
    stored: Stored, wanted: Sequence[FileTensor], dtypes: Mapping[str, torch.dtype], merged: Adapter | None
) -> dict[str, Tensor]:
    """Tensors of a file by name, with the parameters of the checkpoint, to which these adapters are added."""
    found: dict[str, Tensor] = {}
    views: dict[str, Tensor] = {}
    again: list[tuple[str, Tensor]] = []  # parameters of several layers are several tensors of a file
    for one in wanted:
        tensor = found[one.name] = torch.empty(one.shape(stored.shapes), dtype=dtypes[one.name])
        parts = (tensor.T if one.is_transposed else tensor).split([stored.shapes[name][0] for name in one.parameters])
        for name, part in zip(one.parameters, parts, strict=True):
            if views.setdefault(name, part) is not part:
                again.append((name, part))
    load_stored(stored, views)
    for name, part in again:
        part.copy_(views[name])
    if merged is None:
        return found
    for name, view in views.items():
        pair = [name.removesuffix(".weight") + ending for ending in (FIRST, SECOND)]
        if pair[0] in stored.shapes:
            # W + (alpha / rank) B A, in the widest type of the checkpoint; one at a time, which takes least memory.
            read = {each: torch.empty(stored.shapes[each], dtype=stored.dtypes[each]) for each in (name, *pair)}
            load_stored(stored, read)
            base, first, second = read.values()
            wide = torch.promote_types(base.dtype, first.dtype)
            view.copy_(base.to(wide) + merged.scale * (second.to(wide) @ first.to(wide)))
    return found


def load_stored(stored: Stored, parameters: Mapping[str, Tensor]) -> None:
    """Read parameters by name."""
    kept = {
        name: torch.empty(stored.patterns[name].shape, dtype=stored.dtypes[name])
        for name in parameters
        if name in stored.patterns
    }
    views = {stored.prefix + name: kept.get(name, tensor) for name, tensor in parameters.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose: one process
            # DCP reads into these tensors and converts to their dtype while it copies.
            dcp.load(views, storage_reader=stored.reader, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise UserError(f"cannot read the checkpoint {stored.reader.path}: {cause}; use another one") from None
    for name, blocks in kept.items():
        parameters[name].copy_(stored.patterns[name].dense(blocks))


def _write(file: Path, tensors: dict[str, Tensor], about: Mapping[str, str]) -> None:
    """Write a file of weights and fsync it; equal contents give equal bytes."""
    # safetensors creates files that only their owner may read. A file created by Python shows the user's umask.
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata=dict(about) or None)
    file.chmod(mode)
    with file.open("r+b") as opened:
        # Format: the length of the JSON header in 8 bytes, little-endian; then the header, which may end in spaces.
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # safetensors' order is random
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "a header that became longer by sorting"
        opened.seek(8)
        opened.write(text.ljust(length))
        opened.flush()
        os.fsync(opened.fileno())
