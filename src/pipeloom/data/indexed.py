r"""Files of tokens with an index of their documents, as Megatron-LM reads and writes them: ``NAME.bin``, ``NAME.idx``.

The index has: ``MMIDIDX\0\0``; version 1 (uint64); code of the token type (uint8); numbers of sequences and of borders
of documents (uint64); tokens of each sequence (int32); its byte offset (int64); the first sequence of each document
and, behind those, the number of sequences (int64). Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.errors import UserError, reason_of

TOKENS, INDEX = ".bin", ".idx"
_HEAD = b"MMIDIDX\x00\x00"
_VERSION = 1
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Code -> type of tokens; 6 and 7 are floats, which are no tokens."""
_MOST_TOKENS = (1 << 31) - 1
"""Of one sequence."""


@dataclass(frozen=True)
class Indexed:
    """A file of tokens.

    Attributes:
        tokens: of all documents, memory-mapped, [tokens].
        ends: for each document the number of tokens up to its end, int64 [documents].
    """

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]


def is_indexed(path: Path) -> bool:
    """Whether a path names a file of tokens or its index."""
    return path.suffix in (TOKENS, INDEX) and path.with_suffix(INDEX).is_file() and path.with_suffix(TOKENS).is_file()


def read_indexed(path: Path) -> Indexed:
    """Open a file of tokens by its own path or that of its index.

    Raises:
        UserError: the index is damaged, does not fit the tokens, or is of another kind.
    """
    file = path.with_suffix(INDEX)
    try:
        content = file.read_bytes()
        num_bytes = path.with_suffix(TOKENS).stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {error.filename or file}: {reason_of(error)}") from None
    head = len(_HEAD)
    if not content.startswith(_HEAD) or len(content) < head + 25:
        raise UserError(f"{file} must be an index of Megatron-LM (MMIDIDX), found another file; write it again")
    version, code = int.from_bytes(content[head : head + 8], "little"), content[head + 8]
    num_sequences, num_borders = (int.from_bytes(content[at : at + 8], "little") for at in (head + 9, head + 17))
    if version != _VERSION or code not in _TYPES:
        raise UserError(f"{file} must be of version 1 with whole numbers, found version {version} and type {code}")
    begin = head + 25
    if len(content) < begin + 12 * num_sequences + 8 * num_borders:
        raise UserError(f"{file} is damaged: it ends early; copy it again")
    sizes = np.frombuffer(content, "<i4", num_sequences, begin).astype(np.int64)
    offsets = np.frombuffer(content, "<i8", num_sequences, begin + 4 * num_sequences)
    borders = np.frombuffer(content, "<i8", num_borders, begin + 12 * num_sequences)
    width = np.dtype(_TYPES[code]).itemsize
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if num_sequences else 0
    if sizes.min(initial=0) < 0 or not np.array_equal(offsets, (ends - sizes) * width) or num_bytes != total * width:
        raise UserError(
            f"{file} does not fit {path.with_suffix(TOKENS).name}: expected {total * width:,} bytes of tokens "
            f"in order, found {num_bytes:,}; copy both again"
        )
    if borders.min(initial=0) < 0 or borders.max(initial=0) > num_sequences or (np.diff(borders) < 0).any():
        raise UserError(f"{file} is damaged: its documents are not in order; copy it again")
    tokens = np.memmap(path.with_suffix(TOKENS), _TYPES[code], mode="r") if total else np.empty(0, _TYPES[code])
    of_documents = np.concatenate([[0], ends])[borders[1:]]
    return Indexed(tokens, of_documents[np.diff(of_documents, prepend=0) > 0])


def write_index(file: Path, sizes: npt.NDArray[np.int64], width: int) -> None:
    """Write the index of documents that follow each other.

    Args:
        file: its path.
        sizes: tokens of each document, [documents].
        width: bytes of a token: 2 for uint16, 4 for int32.

    Raises:
        OSError: it cannot be written.
    """
    # A document of more tokens than the format's int32 has several sequences.
    pieces = np.maximum(1, -(-sizes // _MOST_TOKENS))
    borders = np.concatenate([[0], np.cumsum(pieces)])
    sequences = np.full(int(borders[-1]), _MOST_TOKENS, np.int64)
    sequences[borders[1:] - 1] = sizes - (pieces - 1) * _MOST_TOKENS
    with file.open("wb") as out:
        out.write(_HEAD + _VERSION.to_bytes(8, "little") + bytes([8 if width == 2 else 4]))
        out.write(len(sequences).to_bytes(8, "little") + len(borders).to_bytes(8, "little"))
        out.write(sequences.astype("<i4").tobytes())
        out.write(((np.cumsum(sequences) - sequences) * width).astype("<i8").tobytes())
        out.write(borders.astype("<i8").tobytes())
