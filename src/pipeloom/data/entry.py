"""A tokenized corpus on disk: an entry of the cache, or a folder of ``pipeloom tokenize``.

    tokens.bin       training tokens, then validation tokens; uint16, or int32 if the vocabulary needs it
    tokens.idx       index of their documents, in Megatron-LM's format
    targets.bin      of records with answers: whether each token is a target, a byte each
    counts.npy       occurrences of each token, of targets only, in both, int64 [2, vocab_size]
    *.crc32.npy      checksums of the blocks of each of these (``pipeloom.data.checksums``)
    summary.json     their numbers, and facts about the corpus
    tokenizer.json   the tokenizer, with tokenizer_config.json if it was given; none for bytes in the cache

An entry is written under another name and then renamed, so an existing one is complete.
"""

import fcntl
import hashlib
import shutil
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pipeloom.data.checksums import RENEW, CheckedFile, check_whole, open_checked, write_checksum
from pipeloom.data.corpus import Piece, Source, bytes_of, documents, held_out, key_of, name_of
from pipeloom.data.indexed import read_indexed, write_index
from pipeloom.data.own_folders import COUNTS, LOCK, PARTS, TARGETS, TOKENS
from pipeloom.data.summary import Summary, read_summary, write_summary
from pipeloom.data.tokenizer import (
    ByteTokenizer,
    TokenArray,
    Tokenizer,
    sha256_of,
    token_dtype,
)
from pipeloom.data.tokenizing import UNIT_BYTES, Job, tokenize
from pipeloom.errors import UserError
from pipeloom.system.cores import own_cores
from pipeloom.system.files import missing_folders, remove_empty
from pipeloom.terminal.progress import Bar

INDEX = "tokens.idx"
_BPE_SAMPLE_BYTES = 8_000_000
"""Text that byte-pair encoding is trained on; more takes longer and hardly changes the merges."""
_COUNT_AT_ONCE = 1 << 22
"""Tokens of which bincount makes an int64 copy."""
_SEVERAL_BYTES = 64 << 20
"""Size of a text that several processes tokenize; less is done before they have started."""


def open_targets(folder: Path, summary: Summary) -> npt.NDArray[np.bool_] | None:
    """For each token of an entry whether it is a target; ``None`` if all are.

    Raises:
        UserError: the file was changed.
    """
    if summary.train_targets is None:
        return None
    targets = np.memmap(folder / TARGETS, np.bool_, mode="r")
    check_whole(folder, TARGETS, folder / TARGETS, RENEW)  # at once: packing reads all of them
    return targets


def checked_tokens(folder: Path, summary: Summary) -> CheckedFile | None:
    """The tokens of an entry with their checksums; ``None`` for an entry of older versions, which has none.

    Raises:
        UserError: the checksums are damaged.
    """
    advice = _again(folder, summary)
    if not summary.file:
        return open_checked(folder, TOKENS, folder / TOKENS, token_dtype(summary.vocab_size)().itemsize, advice)
    file = Path(summary.file)
    return open_checked(folder, TOKENS, file.with_suffix(".bin"), read_indexed(file).tokens.itemsize, advice)


def document_ends(folder: Path, summary: Summary) -> npt.NDArray[np.int64]:
    """For each document of an entry the number of tokens up to its end, [documents].

    Raises:
        UserError: the file of the index was changed.
    """
    file = Path(summary.file) if summary.file else folder / TOKENS
    check_whole(folder, INDEX, file.with_suffix(".idx"), _again(folder, summary))
    return read_indexed(file).ends


def _again(folder: Path, summary: Summary) -> str:
    """What to do about a damaged file of an entry."""
    return f"copy it again, or remove {folder} if it is right as it is" if summary.file else RENEW


def open_entry(folder: Path, summary: Summary) -> tuple[TokenArray, npt.NDArray[np.int64]]:
    """Tokens and counts of an entry.

    Raises:
        UserError: the file of the counts was changed.
    """
    check_whole(folder, COUNTS, folder / COUNTS, RENEW)
    if summary.file:
        tokens = read_indexed(Path(summary.file)).tokens
    else:
        tokens = np.memmap(folder / TOKENS, token_dtype(summary.vocab_size), mode="r")
    try:
        counts = np.load(folder / COUNTS, allow_pickle=False)
    except ValueError:
        counts = np.zeros(0, np.int64)
    if counts.shape != (2, summary.vocab_size):
        raise UserError(f"{folder / COUNTS} is damaged; {RENEW}")
    return tokens, counts


@dataclass(frozen=True)
class Corpus:
    """What an entry is made of.

    Attributes:
        sources: the files.
        field: name of the text in records.
        validation_fraction: of the bytes, 0..1.
        make_tokenizer: returns the tokenizer.
        check: raises a ``UserError`` if the entry would be of no use, such as one that is too short.
        key: of these, for the name of the folder with the units.
        unit_bytes: of the text that is read at once.
    """

    sources: Sequence[Source]
    field: str
    validation_fraction: float
    make_tokenizer: Callable[[], Tokenizer]
    check: Callable[[Summary], None]
    key: str = ""
    unit_bytes: int = UNIT_BYTES


def write_entry(folder: Path, corpus: Corpus, num_workers: int | None = None, *, has_bar: bool = True) -> Summary:
    """Tokenize a corpus into an entry. What a stopped process has done is used.

    Args:
        folder: the entry; made when it is complete.
        corpus: the text.
        num_workers: processes. None: one for a small corpus, else one for each core.
        has_bar: whether a terminal shows how far it is.

    Raises:
        UserError: a file is damaged, a record has no text, or nothing is text.
        RunError: a process was killed.
        OSError: the entry cannot be written.
    """
    parts = folder.with_name(f"{folder.name}{corpus.key and '.'}{corpus.key}{PARTS}")
    with _alone(parts):
        # Another process may have written the entry meanwhile.
        if (found := read_summary(folder)) is not None:
            return found
        is_damaged = folder.exists()
        tokenizer = corpus.make_tokenizer()
        job = Job(corpus.sources, corpus.field, tokenizer.files(), parts, corpus.unit_bytes)
        total = sum(source.num_bytes for source in corpus.sources)
        workers = num_workers or (len(own_cores()) if total >= _SEVERAL_BYTES else 1)
        columns = (TextColumn("tokenizing"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn())
        with Bar(sys.stderr, *columns, TimeRemainingColumn(), total=total, is_shown=has_bar, transient=True) as bar:
            try:
                units = tokenize(job, workers, bar.update)
            except KeyboardInterrupt as error:
                done, every = len(list(parts.glob("*.npy"))), len(job.units())
                error.add_note(
                    f"{done} of {every} parts are done, in {parts}; the same command resumes with the others"
                )
                raise
        draft = parts / "entry"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            summary = _assemble(draft, job, units, corpus.validation_fraction, tokenizer)
            corpus.check(summary)
        except UserError:
            shutil.rmtree(parts)  # another attempt would find the same
            raise
        if is_damaged:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            draft.replace(folder)
        except OSError as error:
            if not folder.exists():
                raise
            raise UserError(f"{folder} was made by another process meanwhile; choose another folder") from error
        shutil.rmtree(parts, ignore_errors=True)
        return summary


@contextmanager
def _alone(parts: Path) -> Iterator[None]:
    """The folder of an entry's units, for one process at a time; removed on a failure if it has none."""
    made = missing_folders(parts)
    try:
        with _lock_file(parts) as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            # The process before may have removed it with the lock.
            parts.mkdir(parents=True, exist_ok=True)
            yield
    finally:
        if parts.exists() and not any(parts.glob("*.npy")):
            shutil.rmtree(parts, ignore_errors=True)
        remove_empty(made[1:])


def _lock_file(parts: Path, attempts: int = 10) -> TextIO:
    """The open lock of a folder, which is made; the process before may remove it between the two."""
    for _ in range(attempts - 1):
        with suppress(FileNotFoundError):
            parts.mkdir(parents=True, exist_ok=True)
            return (parts / LOCK).open("a")
    parts.mkdir(parents=True, exist_ok=True)
    return (parts / LOCK).open("a")


def write_indexed_entry(folder: Path, file: Path, validation_fraction: float, tokenizer: Tokenizer) -> Summary:
    """Count the tokens of a file with an index, and divide its documents: the last ones are held out.

    Raises:
        UserError: the file is damaged, or has tokens that the tokenizer does not have.
        OSError: the entry cannot be written.
    """
    found = read_indexed(file)
    total = len(found.tokens)
    # As in Megatron-LM, whose splits are ranges of documents: the tokens are read where they are.
    wanted = round((1 - validation_fraction) * total)
    before = found.ends[found.ends <= wanted]
    border = int(before[-1]) if len(before) and total - before[-1] < 2 * (total - wanted) + 1 else wanted
    border = min(max(border, 1), max(total - 1, 0))
    least, most = (int(reduce(found.tokens)) if total else 0 for reduce in (np.min, np.max))
    if not 0 <= least <= most < tokenizer.vocab_size:
        raise UserError(
            f"{file} must have tokens of data.tokenizer, 0..{tokenizer.vocab_size - 1}, found {least}..{most}; set "
            "data.tokenizer to the one that made them"
        )
    status = file.with_suffix(".bin").stat()
    summary = Summary(
        num_documents=len(found.ends),
        num_skipped=0,
        num_bytes=status.st_size,
        vocab_size=tokenizer.vocab_size,
        train_tokens=border,
        validation_tokens=total - border,
        corpus_sha256=hashlib.sha256(bytes_of(f"{status.st_size} {status.st_mtime_ns} {file.name}")).hexdigest(),
        tokenizer_sha256=sha256_of(tokenizer.files()),
        file=str(file.absolute()),
    )
    parts = folder.with_name(f"{folder.name}{PARTS}")
    with _alone(parts):
        if (other := read_summary(folder)) is not None:
            return other
        draft = parts / "entry"
        draft.mkdir()
        sides = found.tokens[:border], found.tokens[border:]
        counts = np.stack([_counts(side, tokenizer.vocab_size) for side in sides])
        _finish(draft, summary, counts, tokenizer, {TOKENS: file.with_suffix(".bin"), INDEX: file.with_suffix(".idx")})
        shutil.rmtree(folder, ignore_errors=True)
        draft.replace(folder)
        shutil.rmtree(parts, ignore_errors=True)
    return summary


def sample(corpus: Corpus, num_bytes: int = _BPE_SAMPLE_BYTES) -> list[bytes]:
    """Some of the training documents, from all over the text, for training byte-pair encoding."""
    # Arrays: lists of millions of numbers would take five times the memory.
    every_key, every_size = array("Q"), array("q")
    for name, _, size in documents(corpus.sources, corpus.field, corpus.unit_bytes):
        every_key.append(key_of(name))
        every_size.append(size)
    keys, sizes = np.frombuffer(every_key, np.uint64), np.frombuffer(every_size, np.int64)
    is_training = ~held_out(keys, sizes, corpus.validation_fraction)
    # In a shuffled order: sorted, the sample would contain only the first folders of the corpus.
    order = np.argsort(keys, kind="stable")
    order = order[is_training[order]]
    before = np.cumsum(sizes[order]) - sizes[order]
    wanted = {int(number): place for place, number in enumerate(order[before < num_bytes])}
    every = enumerate(documents(corpus.sources, corpus.field, corpus.unit_bytes))
    found = {wanted[number]: content for number, (_, content, _) in every if number in wanted}
    return [found[place][: num_bytes - int(before[place])] for place in sorted(found)]


@dataclass(frozen=True)
class _Documents:
    """All documents of the units, in the order of the corpus.

    Attributes:
        num_tokens: of each, [documents].
        is_held_out: whether it is for validation, [documents].
        first_by_unit: number of the first document that begins in a unit.
        num_bytes: of all.
        num_skipped: those that are not text.
        sha256: fingerprint.
        first_skipped: name of the first that is not text; empty for none.
    """

    num_tokens: npt.NDArray[np.int64]
    is_held_out: npt.NDArray[np.bool_]
    first_by_unit: list[int]
    num_bytes: int
    num_skipped: int
    sha256: str
    first_skipped: str


def _documents(job: Job, num_units: int, validation_fraction: float) -> _Documents:
    # Arrays: lists of millions of numbers would take five times the memory.
    keys, sizes, tokens, is_text = array("Q"), array("q"), array("q"), array("b")
    total, numbers, firsts, first_skipped = hashlib.sha256(), dict[int, int](), list[int](), ""
    for unit in range(num_units):
        rows = np.load(job.rows_of(unit), allow_pickle=False)
        firsts.append(len(sizes))
        seen: dict[int, int] = {}
        for source, number, num_bytes, num_tokens, is_first, row_is_text, digest in rows.tolist():
            if is_first:
                # Numbers in a unit begin at 1; those of the records before it are counted here.
                name = name_of(job.sources[source], numbers.get(source, 0) + number)
                keys.append(key_of(name))
                sizes.append(0)
                tokens.append(0)
                is_text.append(True)
                if row_is_text:
                    # Lines in the form of sha256sum, so that the hash changes if a boundary between two files moves.
                    total.update(b"%s  %s\n" % (digest.hex().encode(), bytes_of(name)))
            else:
                total.update(f"{digest.hex()}\n".encode())
            if not row_is_text and not first_skipped:
                first_skipped = name_of(job.sources[source], numbers.get(source, 0) + number)
            sizes[-1] += num_bytes
            tokens[-1] += num_tokens
            is_text[-1] &= row_is_text
            seen[source] = seen.get(source, 0) + 1
        for source, count in seen.items():
            numbers[source] = numbers.get(source, 0) + count
    # The arrays' own memory, and copies only where a document is not text.
    are_text, all_sizes = np.frombuffer(is_text, np.bool_), np.frombuffer(sizes, np.int64)
    chosen = slice(None) if are_text.all() else are_text
    held = np.zeros(len(sizes), np.bool_)
    held[chosen] = held_out(np.frombuffer(keys, np.uint64)[chosen], all_sizes[chosen], validation_fraction)
    num_tokens = np.frombuffer(tokens, np.int64) * are_text
    num_skipped = int((~are_text).sum())
    num_bytes = int(all_sizes[are_text].sum())
    return _Documents(num_tokens, held, firsts, num_bytes, num_skipped, total.hexdigest(), first_skipped)


def _names(sources: Sequence[Source]) -> str:
    """The files of a corpus in a message."""
    first = str(sources[0].path)
    return first if len(sources) == 1 else f"{len(sources)} files such as {first}"


def _assemble(
    draft: Path, job: Job, units: Sequence[Sequence[Piece]], validation_fraction: float, tokenizer: Tokenizer
) -> Summary:
    """Copy the tokens of the units into the files of an entry: those for training, then those for validation."""
    found = _documents(job, len(units), validation_fraction)
    is_text = found.num_tokens > 0
    if not is_text.any():
        raise UserError(
            f"the corpus must have at least one UTF-8 text that is not empty, found none in {_names(job.sources)}; "
            "set data.path to a file of text or of records, or a folder of them"
        )
    dtype = token_dtype(tokenizer.vocab_size)
    has_answers = any(job.mask_of(unit).exists() for unit in range(len(units)))
    with (draft / TOKENS).open("wb") as out, (draft / TARGETS).open("wb") as out_targets:
        for is_held_out in (False, True):
            is_wanted = is_text & (found.is_held_out == is_held_out)
            for unit, first in enumerate(found.first_by_unit):
                rows = np.load(job.rows_of(unit), allow_pickle=False)
                # A unit may begin inside a document of the one before.
                of_rows = is_wanted[first - 1 + np.cumsum(rows["is_first"])] if len(rows) else np.zeros(0, np.bool_)
                chosen = np.repeat(of_rows, rows["num_tokens"])
                out.write(np.fromfile(job.bin_of(unit), dtype)[chosen].tobytes())
                if has_answers:
                    mask = job.mask_of(unit)
                    targets = np.fromfile(mask, np.bool_) if mask.exists() else np.ones(len(chosen), np.bool_)
                    out_targets.write(targets[chosen].tobytes())
    sizes = np.concatenate([found.num_tokens[is_text & (found.is_held_out == side)] for side in (False, True)])
    write_index(draft / INDEX, sizes, np.dtype(dtype).itemsize)
    train_tokens, validation_tokens = (int(found.num_tokens[found.is_held_out == side].sum()) for side in (False, True))
    # Too few documents to hold out whole ones: the end of the text is held out instead.
    if not validation_tokens:
        # At least one token each: the unigram loss is a mean over the validation tokens.
        validation_tokens = min(max(round(validation_fraction * train_tokens), 1), train_tokens - 1)
        train_tokens -= validation_tokens
    if not has_answers:
        (draft / TARGETS).unlink()
    borders = (0, train_tokens), (train_tokens, train_tokens + validation_tokens)
    counts = [_counts_in(draft, tokenizer.vocab_size, *border, has_targets=has_answers) for border in borders]
    summary = Summary(
        num_documents=int(is_text.sum()),
        num_skipped=found.num_skipped,
        num_bytes=found.num_bytes,
        vocab_size=tokenizer.vocab_size,
        train_tokens=train_tokens,
        validation_tokens=validation_tokens,
        corpus_sha256=found.sha256,
        tokenizer_sha256=sha256_of(tokenizer.files()),
        train_targets=int(counts[0].sum()) if has_answers else None,
        first_skipped=found.first_skipped,
    )
    files = {name: draft / name for name in (TOKENS, TARGETS, INDEX) if (draft / name).exists()}
    _finish(draft, summary, np.stack(counts), tokenizer, files)
    return summary


def _finish(
    draft: Path, summary: Summary, counts: npt.NDArray[np.int64], tokenizer: Tokenizer, files: Mapping[str, Path]
) -> None:
    """Write the files beside those with the paths ``files`` by name, and the checksums of all."""
    np.save(draft / COUNTS, counts)
    for name, file in {**files, COUNTS: draft / COUNTS}.items():
        write_checksum(draft, name, file)
    if not isinstance(tokenizer, ByteTokenizer):
        for name, text in tokenizer.files().items():
            (draft / name).write_text(text, encoding="utf-8")
    write_summary(draft, summary)


def _counts_in(draft: Path, vocab_size: int, begin: int, end: int, *, has_targets: bool) -> npt.NDArray[np.int64]:
    """Occurrences of each token in part of a file, of targets if it has some, [vocab_size]."""
    counts, dtype = np.zeros(vocab_size, np.int64), np.dtype(token_dtype(vocab_size))
    for first in range(begin, end, _COUNT_AT_ONCE):
        size = min(_COUNT_AT_ONCE, end - first)
        # Read and not mapped: mapped pages count as memory of the process.
        found = np.fromfile(draft / TOKENS, dtype, size, offset=first * dtype.itemsize)
        if has_targets:
            found = found[np.fromfile(draft / TARGETS, np.bool_, size, offset=first)]
        counts += np.bincount(found, minlength=vocab_size)
    return counts


def _counts(tokens: npt.NDArray[np.generic], vocab_size: int) -> npt.NDArray[np.int64]:
    """Occurrences of each token, [vocab_size]; counted in parts."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(tokens), _COUNT_AT_ONCE):
        counts += np.bincount(tokens[first : first + _COUNT_AT_ONCE], minlength=vocab_size)
    return counts
