"""Checksums of the blocks of a file: written beside it once, compared where a block is first read.

A window of tokens touches one or two blocks, so that reading in random order stays cheap, and no start reads a whole
file. Against damage of disks and copies, not against people: a checksum is a CRC-32.
"""

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeloom.data.windows import without_marks
from pipeloom.errors import UserError

BLOCK_BYTES = 1 << 14
"""A window is read with the blocks that it touches, in random order; smaller ones take more memory, 4 bytes each."""
RENEW = "copy the folder again, or remove it and tokenize the text again"


def write_checksum(folder: Path, name: str, file: Path) -> None:
    """Write the checksums of a file into a folder that has it, or reads it elsewhere, under a name.

    Raises:
        OSError: the file cannot be read, or the checksums cannot be written.
    """
    with file.open("rb") as opened:
        found = [zlib.crc32(block) for block in iter(lambda: opened.read(BLOCK_BYTES), b"")]
    np.save(_checksums_of(folder, name), np.array(found, np.uint32))


def _checksums_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.crc32.npy"


def check_tokens(windows: npt.NDArray[np.int64], vocab_size: int | None) -> None:
    """Refuse tokens outside the vocabulary.

    Raises:
        UserError: there is one.
    """
    # A damaged file of tokens may have the right size; on a GPU, such an index would end the process.
    tokens = windows if windows.min() >= 0 else without_marks(windows)
    largest = int(tokens.max())
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(f"the text has the token {largest}, the model's vocabulary 0..{vocab_size - 1}; {RENEW}")


class CheckedFile:
    """A file whose blocks are compared with their checksums, each once.

    Args:
        file: its path; not empty.
        checksums: of its blocks, uint32 [blocks].
        item_bytes: size of an item.
        advice: what to do about a damaged file.
    """

    def __init__(self, file: Path, checksums: npt.NDArray[np.uint32], item_bytes: int, advice: str) -> None:
        self._file, self._checksums, self._item_bytes, self._advice = file, checksums, item_bytes, advice
        self._content = np.memmap(file, np.uint8, mode="r")
        self._is_equal = np.zeros(len(checksums), np.bool_)

    def check(self, begin: int, first: int, behind: int) -> None:
        """Compare the blocks of some items that were not compared before.

        Args:
            begin: the item that others are counted from.
            first: the first item.
            behind: the one behind the last.

        Raises:
            UserError: one was changed.
        """
        one = (begin + first) * self._item_bytes // BLOCK_BYTES
        end = -(-(begin + behind) * self._item_bytes // BLOCK_BYTES)
        for block in (one + np.flatnonzero(~self._is_equal[one:end])).tolist():
            at = block * BLOCK_BYTES
            if zlib.crc32(self._content[at : at + BLOCK_BYTES].data) != self._checksums[block]:
                last = min(at + BLOCK_BYTES, len(self._content)) - 1
                raise UserError(f"{self._file} was changed: its bytes {at:,} to {last:,} are damaged; {self._advice}")
            self._is_equal[block] = True


def open_checked(folder: Path, name: str, file: Path, item_bytes: int, advice: str) -> CheckedFile | None:
    """A file with the checksums that a folder has of it; ``None`` for a folder without, such as of older versions.

    Args:
        folder: of ``write_checksum``.
        name: of the file there.
        file: its path.
        item_bytes: size of an item.
        advice: what to do if the file is damaged.

    Raises:
        UserError: the checksums are damaged.
    """
    stored = _checksums_of(folder, name)
    if not stored.exists():
        return None
    try:
        checksums = np.load(stored, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        checksums = np.zeros(0, np.uint32)
    if len(checksums) != -(-file.stat().st_size // BLOCK_BYTES):
        raise UserError(f"{stored} is damaged; {advice}")
    return CheckedFile(file, checksums, item_bytes, advice)


def check_whole(folder: Path, name: str, file: Path, advice: str) -> None:
    """Compare a whole file with the checksums that a folder has of it, if it has some; the arguments of
    ``open_checked``.

    Raises:
        UserError: the file or its checksums are damaged.
    """
    checked = open_checked(folder, name, file, 1, advice)
    if checked is not None:
        checked.check(0, 0, file.stat().st_size)
