"""The corpus: reads files of text and of records, and divides them into training and validation."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from pipeloom.data.answers import Exchange
from pipeloom.data.records import has_records, is_divisible, read_records
from pipeloom.errors import UserError

_CONTEXT_BYTES = 1 << 13


@dataclass(frozen=True)
class Source:
    """A file of the corpus, not read yet.

    Attributes:
        name: path relative to the corpus's root, with forward slashes.
        path: of the file.
        num_bytes: its size.
        mtime_ns: modification time, nanoseconds since 1970.
    """

    name: str
    path: Path
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """Bytes of a file that are read at once: of all of it, of some of its records, or of a part of one long text.

    Attributes:
        source: number of the file.
        begin: first byte.
        end: byte behind the last one.
        is_first: whether its documents begin in it.
        is_last: whether its documents end in it.
    """

    source: int
    begin: int
    end: int
    is_first: bool = True
    is_last: bool = True

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.end - self.begin

    def around(self, path: Path) -> tuple[bytes, bytes]:
        """Some of the text before and behind it."""
        with path.open("rb") as file:
            first = max(0, self.begin - _CONTEXT_BYTES)
            file.seek(first)
            before = file.read(self.begin - first)
            file.seek(self.end)
            return before, file.read(_CONTEXT_BYTES)


def pieces_of(number: int, source: Source, num_bytes: int) -> list[Piece]:
    """A file in pieces of about ``num_bytes``, cut at line breaks, if it is larger and can be divided.

    Raises:
        UserError: the file cannot be read.
    """
    is_text, cuts = not has_records(source.path), [0]
    if is_text or is_divisible(source.path):
        try:
            with source.path.open("rb") as file:
                while source.num_bytes - cuts[-1] > 2 * num_bytes:
                    cuts.append(_cut(file, cuts[-1] + num_bytes, source.num_bytes, is_anywhere=is_text))
        except OSError as error:
            refuse_unreadable(source.path, error)
    ends = [*cuts[1:], source.num_bytes]
    return [
        Piece(number, begin, end, not is_text or begin == 0, not is_text or end == source.num_bytes)
        for begin, end in zip(cuts, ends, strict=True)
        if begin < end or source.num_bytes == 0
    ]


def _cut(file: BinaryIO, place: int, end: int, *, is_anywhere: bool) -> int:
    """The first place behind a line break from a place on; in a text without line breaks, between two characters."""
    file.seek(place)
    at = place
    while block := file.read(_CONTEXT_BYTES):
        if b"\n" in block:
            return at + block.index(b"\n") + 1
        if is_anywhere:
            # The bytes of a character behind its first one are 10xxxxxx.
            return place + next((step for step, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)
        at += len(block)
    return end


def contents(source: Source, field: str, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and contents of the documents of a piece; the content of one that is part of a document.

    Raises:
        UserError: the file is damaged, or a record has no such field.
        OSError: the file cannot be read.
    """
    if not has_records(source.path):
        with source.path.open("rb") as file:
            file.seek(piece.begin)
            yield 1, file.read(piece.num_bytes)
        return
    end = piece.end if is_divisible(source.path) else None  # bytes of a compressed file are others than those read
    yield from enumerate(read_records(source.path, field, piece.begin, end), start=1)


def documents(sources: Sequence[Source], field: str, num_bytes: int) -> Iterator[tuple[str, bytes, int]]:
    """Name, content and bytes of all documents that are text; of a text of several pieces the first one's content.

    Args:
        sources: the files.
        field: name of the text in records.
        num_bytes: of a piece.

    Raises:
        UserError: a file is damaged or cannot be read, or a record has no such field.
    """
    for source in sources:
        try:
            pieces = pieces_of(0, source, num_bytes)
            if has_records(source.path):
                every = (content for piece in pieces for _, content in contents(source, field, piece))
                found = (one.text if isinstance(one, Exchange) else one for one in every)
                named = ((name_of(source, number), one, len(one)) for number, one in enumerate(found, start=1))
                yield from (one for one in named if is_text(one[1]))
            elif all(is_text(content) for piece in pieces for _, content in contents(source, field, piece)):
                yield source.name, next(contents(source, field, pieces[0]))[1], source.num_bytes
        except OSError as error:
            refuse_unreadable(source.path, error)


def name_of(source: Source, number: int) -> str:
    """Name of a document: that of its file, or of its record, such as ``part.jsonl/12``."""
    return f"{source.name}/{number}" if has_records(source.path) else source.name


def bytes_of(name: str) -> bytes:
    """A document's name for a hash; that of a file need not be UTF-8."""
    return name.encode(errors="surrogatepass")


def key_of(name: str) -> int:
    """A number that gives documents a pseudo-random order, which depends on their names only."""
    # Sorted by a hash instead of shuffled: adding a document keeps the order of the others.
    return int.from_bytes(hashlib.sha256(bytes_of(name)).digest()[:8], "big")


def held_out(
    keys: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], validation_fraction: float
) -> npt.NDArray[np.bool_]:
    """Hold out whole documents for validation, up to a fraction of the bytes.

    Documents are taken in the order of their keys, each if it still fits into the fraction.

    Args:
        keys: of each document (:func:`key_of`), [documents].
        sizes: bytes of each, [documents].
        validation_fraction: 0..1.

    Returns:
        For each document whether it is held out. None is if those that fit have less than half of the fraction: there
        are too few, or one is most of the text.
    """
    left = budget = validation_fraction * int(sizes.sum())
    chosen = np.zeros(len(sizes), np.bool_)
    waiting = np.argsort(keys, kind="stable")
    # Whole documents: with the beginning of a document in the training text, validation would be too easy.
    while len(waiting := waiting[sizes[waiting] <= left]):
        fitting = int(np.searchsorted(np.cumsum(sizes[waiting]), left, side="right"))
        chosen[waiting[:fitting]] = True
        left -= int(sizes[waiting[:fitting]].sum())
        waiting = waiting[fitting:]
    # The caller then splits the tokens instead. Half of the fraction is enough for validation, a few bytes are not.
    return chosen if left <= budget / 2 else np.zeros(len(sizes), np.bool_)


def is_text(content: bytes) -> bool:
    """Whether a content is UTF-8 without NUL, and not empty."""
    if not content or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    """Refuse a corpus with a file or folder that cannot be read."""
    raise UserError(
        f"the corpus must be a file or a folder of files that can be read, found {error.strerror or error} at {path}; "
        "change data.path or the file's permissions"
    ) from error
