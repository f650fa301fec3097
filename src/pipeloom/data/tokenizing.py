"""Tokenizes a corpus of any size: in units, in several processes, in bounded memory; a stopped one resumes.

A unit is some 16 MiB of text: documents of several files, or part of a file. Each becomes a few files,

    00012.bin     its tokens, in the narrowest type
    00012.npy     a row for each document, or part of one
    00012.mask    whether each token is a target; of units with answers only

in any order and by any process. When all are there, the documents are divided into training and validation and their
tokens copied into one file.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeloom.data.answers import Exchange, encode_exchange
from pipeloom.data.corpus import Piece, Source, contents, is_text, pieces_of
from pipeloom.data.tokenizer import Tokenizer, token_dtype, tokenizer_from
from pipeloom.errors import RunError, UserError

UNIT_BYTES = 16 << 20
_BATCH_BYTES = 1 << 20
"""Bytes of documents that are encoded together. The library takes up to 100 bytes of memory for one of text."""
_ROW = np.dtype(
    [
        ("source", "<i4"),
        ("number", "<i8"),
        ("num_bytes", "<i8"),
        ("num_tokens", "<i8"),
        ("is_first", "?"),
        ("is_text", "?"),
        ("digest", "V32"),
    ]
)
"""A document, or part of one: its file, its number among the records of its piece, sizes, whether it begins a document,
SHA-256 of its content."""


@dataclass(frozen=True)
class Job:
    """What is tokenized, and how.

    Attributes:
        sources: the files.
        field: name of the text in records.
        files: of the tokenizer.
        folder: for the units.
        unit_bytes: size of a unit.
    """

    sources: Sequence[Source]
    field: str
    files: dict[str, str]
    folder: Path
    unit_bytes: int = UNIT_BYTES

    def units(self) -> list[list[Piece]]:
        """Pieces of files of about ``unit_bytes`` together, in the order of the corpus."""
        units: list[list[Piece]] = []
        room = 0
        for number, source in enumerate(self.sources):
            for piece in pieces_of(number, source, self.unit_bytes):
                if piece.num_bytes > room or not units:
                    units.append([])
                    room = self.unit_bytes
                units[-1].append(piece)
                room -= piece.num_bytes
        return units

    def bin_of(self, unit: int) -> Path:
        """The tokens of a unit."""
        return self.folder / f"{unit:05}.bin"

    def rows_of(self, unit: int) -> Path:
        """The documents of a unit; written last."""
        return self.folder / f"{unit:05}.npy"

    def mask_of(self, unit: int) -> Path:
        """Which tokens of a unit are targets; if it is missing, all."""
        return self.folder / f"{unit:05}.mask"

    def to_json(self) -> str:
        """For a process of :mod:`pipeloom.data.worker`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """What :meth:`to_json` wrote."""
        tree = json.loads(text)
        sources = [replace(Source(**one), path=Path(one["path"])) for one in tree["sources"]]
        return replace(cls(**tree), sources=sources, folder=Path(tree["folder"]))


def tokenize(job: Job, num_workers: int, progress: Callable[[int], object]) -> list[list[Piece]]:
    """Tokenize the units that are not done yet; returns all units.

    Args:
        job: its folder exists, and no other process works in it.
        num_workers: processes; 1 for this one alone.
        progress: called with the bytes done, those of an earlier process included.

    Raises:
        UserError: a file is damaged or has no text under the field.
        RunError: a process was killed.
        OSError: a file cannot be read or written.
    """
    units = job.units()
    sizes = [sum(piece.num_bytes for piece in unit) for unit in units]
    left = [number for number in range(len(units)) if not job.rows_of(number).exists()]
    done = sum(sizes) - sum(sizes[number] for number in left)
    progress(done)
    work = _in_workers(job, left, num_workers) if num_workers > 1 and len(left) > 1 else _here(job, units, left)
    for number in work:
        done += sizes[number]
        progress(done)
    return units


def encode_unit(job: Job, pieces: Sequence[Piece], unit: int, tokenizer: Tokenizer) -> None:
    """Write the tokens and the rows of a unit.

    Raises:
        UserError, OSError: as :func:`tokenize`.
    """
    # Another name until it is complete: a process may be killed while it writes.
    files = job.bin_of(unit), job.mask_of(unit), job.rows_of(unit)
    drafts = [file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp") for file in files]
    try:
        with drafts[0].open("wb") as out:
            found = _Unit(job, tokenizer, out)
            for piece in pieces:
                for number, content in contents(job.sources[piece.source], job.field, piece):
                    found.add(piece, number, content)
            found.flush()
        if any(one is not None for _, one in found.targets):
            parts = [np.ones(size, np.bool_) if one is None else one for size, one in found.targets]
            drafts[1].write_bytes(np.concatenate(parts).tobytes())
        with drafts[2].open("wb") as out:
            np.save(out, np.array(found.rows, _ROW))
        for draft, file in zip(drafts, files, strict=True):
            if draft.exists():
                draft.replace(file)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


class _Unit:
    """The tokens of a unit while they are written: ``rows``, and for each of them which tokens are targets."""

    def __init__(self, job: Job, tokenizer: Tokenizer, out: BinaryIO) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.targets: list[tuple[int, npt.NDArray[np.bool_] | None]] = []
        self._job, self._tokenizer, self._out = job, tokenizer, out
        self._batch: list[tuple[Piece, int, bytes]] = []
        self._held = 0
        self._dtype = token_dtype(tokenizer.vocab_size)

    def add(self, piece: Piece, number: int, content: bytes) -> None:
        """Encode a document, or part of one; perhaps later, together with others."""
        if not is_text(content):
            # It has no tokens, so its place among the others does not matter.
            self.rows.append((piece.source, number, len(content), 0, piece.is_first, False, bytes(32)))
            return
        path = self._job.sources[piece.source].path
        if isinstance(content, Exchange):
            self.flush()
            ids, counts = encode_exchange(self._tokenizer, content, path)
            self._put(piece, number, content, ids, counts)
        elif not (piece.is_first and piece.is_last):
            self.flush()
            self._put_text(piece, number, content, self._tokenizer.encode_within(content, *piece.around(path)))
        else:
            self._batch.append((piece, number, content))
            self._held += len(content)
            if self._held >= _BATCH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Encode the documents that are held."""
        for one, ids in zip(self._batch, self._tokenizer.encode_all([held[2] for held in self._batch]), strict=True):
            self._put_text(*one, ids)
        self._batch.clear()
        self._held = 0

    def _put_text(self, piece: Piece, number: int, content: bytes, ids: npt.NDArray[Any]) -> None:
        # Windows span several documents without a mask; the end-of-text token marks the boundary.
        begin = self._tokenizer.begin_of_text if piece.is_first else ()
        end = [self._tokenizer.end_of_text] if piece.is_last else []
        self._put(
            piece, number, content, np.concatenate([np.array(begin, np.int64), ids, np.array(end, np.int64)]), None
        )

    def _put(
        self, piece: Piece, number: int, content: bytes, ids: npt.NDArray[Any], counts: npt.NDArray[np.bool_] | None
    ) -> None:
        self._out.write(ids.astype(self._dtype).tobytes())
        self.targets.append((len(ids), counts))
        digest = hashlib.sha256(content).digest()
        self.rows.append((piece.source, number, len(content), len(ids), piece.is_first, True, digest))


def _here(job: Job, units: Sequence[Sequence[Piece]], left: Sequence[int]) -> Iterator[int]:
    tokenizer = tokenizer_from(job.files)
    for number in left:
        encode_unit(job, units[number], number, tokenizer)
        yield number


def _in_workers(job: Job, left: Sequence[int], num_workers: int) -> Iterator[int]:
    """Processes of their own: they import no PyTorch, and a thread pool would wait for Python's lock."""
    waiting, done = SimpleQueue[int](), SimpleQueue[int | BaseException]()
    for number in left:
        waiting.put(number)
    # Each encodes on one core.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "pipeloom.data.worker"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(min(num_workers, len(left)))
    ]
    try:
        with ThreadPoolExecutor(len(workers)) as pool:
            for worker in workers:
                pool.submit(_feed, worker, job, waiting, done)
            try:
                for _ in left:
                    found = done.get()
                    if isinstance(found, BaseException):
                        raise found
                    yield found
            finally:
                for worker in workers:
                    worker.kill()
    finally:
        for worker in workers:
            worker.communicate()


def _feed(worker: "subprocess.Popen[str]", job: Job, waiting: "SimpleQueue[int]", done: "SimpleQueue[Any]") -> None:
    """Give a process one unit after the other."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        line = job.to_json()
        while True:
            number = waiting.get_nowait()
            worker.stdin.write(f"{line}\n{number}\n" if line else f"{number}\n")
            worker.stdin.flush()
            line = ""
            answer = worker.stdout.readline()
            done.put(number if answer == "done\n" else _failure(worker, answer))
    except Empty:
        pass
    except OSError:  # of a process that has ended
        done.put(_failure(worker, ""))


def _failure(worker: "subprocess.Popen[str]", answer: str) -> BaseException:
    if answer:
        kind, text = json.loads(answer)
        return UserError(text) if kind == "user" else OSError(text)
    with suppress(subprocess.TimeoutExpired):
        worker.wait(5)
    code = worker.returncode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
    return RunError(
        f"a process that tokenizes ended ({how}), perhaps because memory was short; "
        "the same command resumes where it stopped"
    )
