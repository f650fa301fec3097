"""The training data: text, tokenized once, read in windows in a reproducible order.

Tokens are cached, in one folder for each corpus and tokenizer:

    <key>/tokens.bin       training tokens, then validation tokens; uint16, or uint32 if the vocabulary needs it
    <key>/summary.json     their numbers, and facts about the corpus
    <key>/tokenizer.json   the trained tokenizer; byte-pair encoding only

An entry is written under another name and then renamed, so an existing entry is complete. The key is a hash of the
names, sizes and modification times of the corpus's files, so a later run reads no text.

The cache may be deleted at any time. The tokenizer is also stored in the run folder and in each checkpoint, from which
a resumed run takes it.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER
from pipeloom.config import DataConfig
from pipeloom.data.corpus import (
    Document,
    Source,
    fingerprint,
    list_sources,
    read_documents,
    shuffled,
    split_documents,
)
from pipeloom.data.records import has_records
from pipeloom.data.tokenizer import BpeTokenizer, ByteTokenizer, TokenArray, Tokenizer, require_bpe, token_dtype
from pipeloom.errors import UserError
from pipeloom.terminal.words import count

_FORMAT = 4
"""Part of the cache key; increment it when the same text and settings give other tokens or other files."""
# More text takes longer and hardly changes the merges.
_BPE_SAMPLE_BYTES = 8_000_000
# bincount makes an int64 copy: 32 MiB at a time, instead of up to four times the size of the file.
_COUNT_AT_ONCE = 1 << 22
_BYTES = ByteTokenizer().to_json().encode()
_VALIDATION_SEED = 0
"""Validation windows are shuffled, so that the first few sample the whole text, and in the same order in every run."""


class TokenWindows:
    """Non-overlapping windows of ``seq_len + 1`` tokens, in an order determined by a seed.

    Every epoch visits each window once; with a seed, each epoch in another order. A batch is a pure function of its
    index, so the whole state of the reader is one integer.

    Args:
        tokens: the stream, [tokens]; may be a memory-mapped file. Tokens after the last full window are not used.
        seq_len: input tokens of a window, which has one more, the last target.
        seed: determines the order. None: the order of the text.

    Raises:
        UserError: there is no full window.
    """

    def __init__(self, tokens: TokenArray, seq_len: int, seed: int | None = None) -> None:
        size = seq_len + 1
        if len(tokens) < size:
            raise UserError(f"data.seq_len {seq_len} needs at least {size} tokens, found {len(tokens)}")
        self.tokens = tokens
        self.seq_len = seq_len
        self.num_windows = len(tokens) // size
        # Still a view of the memory-mapped file: only the rows of a batch are read.
        self._windows = tokens[: self.num_windows * size].reshape(self.num_windows, size)
        self._seed = seed

    def batch(self, index: int, batch_size: int, skipped: int = 0) -> npt.NDArray[np.int64]:
        """A batch of windows.

        Args:
            index: of the batch, from 0; after the last window the next epoch begins.
            batch_size: windows of a batch.
            skipped: windows read before batch 0, for example before a checkpoint, in batches of any size.

        Returns:
            Tokens, int64 [batch_size, seq_len + 1]: inputs are ``[:, :-1]``, targets are ``[:, 1:]``.
        """
        first = skipped + index * batch_size
        rows = [self._row(number) for number in range(first, first + batch_size)]
        return np.asarray(self._windows[rows], dtype=np.int64)

    def _row(self, number: int) -> int:
        """Index of the ``number``-th window in reading order, counted over all epochs."""
        epoch, place = divmod(number, self.num_windows)
        return place if self._seed is None else int(_order(self._seed, epoch, self.num_windows)[place])


@dataclass(frozen=True)
class Data:
    """Tokenized training and validation data.

    Attributes:
        tokenizer: of the tokens.
        train: training windows, shuffled.
        validation: validation windows, shuffled in the same order in all runs.
        unigram_loss: cross-entropy of the validation tokens under the token frequencies of the training tokens, nats
            per token. A baseline: a model that has learned anything has a lower loss.
        corpus_sha256: fingerprint of the text.
        description: one line for the start message.
        tokens: of the whole text, those of training first, [tokens].
    """

    tokenizer: Tokenizer
    train: TokenWindows
    validation: TokenWindows
    unigram_loss: float
    corpus_sha256: str
    description: str
    tokens: TokenArray


def load_data(config: DataConfig, seed: int, tokenizer_json: str | None = None) -> Data:
    """Open the data; tokenizes the text if the cache does not have it.

    Args:
        config: the text, its tokenizer and the length of sequences.
        seed: determines the order of the training windows.
        tokenizer_json: the tokenizer of the checkpoint that the run resumes from. None: the one of ``config``;
            byte-pair encoding is trained on the text.

    Raises:
        UserError: the text is missing, unreadable or too short; the cache folder cannot be written; the library of
            byte-pair encoding is missing; or ``tokenizer_json`` contradicts ``config``.
    """
    # Before the text is read, which may take minutes.
    if config.known_tokenizer == "bpe":
        require_bpe()
    given = None if tokenizer_json is None else _given_tokenizer(config, tokenizer_json)
    sources = list_sources(config.path)
    if config.field != DataConfig.field and not any(has_records(source.path) for source in sources):
        raise UserError("data.field has no effect without files of records (.jsonl, .parquet, .arrow); leave it out")
    folder, summary = _find_or_write(config, sources, given)
    tokenizer = given
    if tokenizer is None:
        is_trained = config.known_tokenizer == "bpe"
        text = (folder / TOKENIZER).read_text(encoding="utf-8") if is_trained else ""
        tokenizer = BpeTokenizer.from_json(text) if is_trained else ByteTokenizer()
    _check_length(summary, config)
    tokens = np.memmap(folder / "tokens.bin", token_dtype(summary.vocab_size), mode="r")
    train, validation = tokens[: summary.train_tokens], tokens[summary.train_tokens :]
    return Data(
        tokenizer=tokenizer,
        train=TokenWindows(train, config.seq_len, seed),
        validation=TokenWindows(validation, config.seq_len, _VALIDATION_SEED),
        unigram_loss=summary.unigram_loss,
        corpus_sha256=summary.corpus_sha256,
        description=_describe(summary, config),
        tokens=tokens,
    )


def unigram_loss(train: TokenArray, validation: TokenArray, vocab_size: int) -> float:
    """Cross-entropy of tokens under the frequencies of other tokens, with add-one (Laplace) smoothing.

    Args:
        train: tokens that give the frequencies, [tokens].
        validation: tokens that are predicted, [tokens]; not empty.
        vocab_size: number of different tokens.

    Returns:
        Nats per token.
    """
    # Smoothed: a token that occurs only in the validation text would have an infinite loss.
    log_shares = np.log((_counts(train, vocab_size) + 1) / (len(train) + vocab_size))
    return -float(_counts(validation, vocab_size) @ log_shares) / len(validation)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_windows: int) -> npt.NDArray[np.int64]:
    """An epoch's permutation of windows, the same in all versions of NumPy."""
    # NumPy guarantees the raw bits of its generators over versions, but not the results of shuffle and permutation
    # (NEP 19). SeedSequence takes no negative numbers, so the seed is taken modulo 2^64.
    bits = np.random.PCG64([seed % (1 << 64), epoch]).random_raw(num_windows)
    # Stable, so that equal numbers have the same order everywhere.
    return np.argsort(bits, kind="stable")


def _counts(tokens: TokenArray, vocab_size: int) -> npt.NDArray[np.int64]:
    """Occurrences of each token, [vocab_size]; counted in parts."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(tokens), _COUNT_AT_ONCE):
        counts += np.bincount(tokens[first : first + _COUNT_AT_ONCE], minlength=vocab_size)
    return counts


@dataclass(frozen=True)
class _Summary:
    """Content of ``summary.json``."""

    num_documents: int
    num_skipped: int
    num_bytes: int
    vocab_size: int
    train_tokens: int
    validation_tokens: int
    unigram_loss: float
    corpus_sha256: str
    tokenizer_sha256: str


def _find_or_write(config: DataConfig, sources: Sequence[Source], given: Tokenizer | None) -> tuple[Path, _Summary]:
    """The cache entry of a corpus and a tokenizer, written if missing."""
    # As the XDG base directory specification says, an empty variable counts as unset.
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = config.cache or home / "pipeloom"
    folder = cache / _key(config, sources, None)
    summary = _read_summary(folder)
    # With a given tokenizer, the entry of the corpus is used if it has the same tokenizer, as in a run resumed here.
    if given is not None and (summary is None or summary.tokenizer_sha256 != _sha256(given)):
        folder = cache / _key(config, sources, given)
        summary = _read_summary(folder)
    if summary is not None:
        return folder, summary
    documents, num_skipped = read_documents(sources, config.field)
    try:
        return folder, _write_entry(folder, documents, config, given, num_skipped)
    except OSError as error:
        raise UserError(
            f"the cache folder must be writable and have room, found {error.strerror or error} at {cache}; "
            "set data.cache to another folder"
        ) from error


def _given_tokenizer(config: DataConfig, text: str) -> Tokenizer:
    """The tokenizer of a checkpoint; refused if it contradicts the configuration."""
    of_bytes = ByteTokenizer()
    found = "bytes" if text == of_bytes.to_json() else "bpe"
    if found != config.known_tokenizer:
        raise UserError(
            f"data.tokenizer is {config.known_tokenizer}, the checkpoint has {found}; set data.tokenizer to {found}"
        )
    if found == "bytes":
        return of_bytes
    tokenizer = BpeTokenizer.from_json(text)
    if tokenizer.vocab_size > config.bpe_vocab_size:
        raise UserError(
            f"data.bpe_vocab_size is {config.bpe_vocab_size}, the checkpoint's tokenizer has {tokenizer.vocab_size} "
            f"tokens; set data.bpe_vocab_size to {tokenizer.vocab_size}"
        )
    return tokenizer


def _sha256(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def _key(config: DataConfig, sources: Sequence[Source], given: Tokenizer | None) -> str:
    """Name of a cache entry: a hash of the corpus's files and of all settings that change the tokens."""
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "tokenizer": config.known_tokenizer,
        "vocab_size": config.bpe_vocab_size if config.known_tokenizer == "bpe" else None,
        "validation_fraction": config.validation_fraction,
        "field": config.field,
        # Times and sizes instead of contents, so that a start need not read the whole corpus.
        "files": [(str(source.path.resolve()), source.num_bytes, source.mtime_ns) for source in sources],
    }
    if given is not None:
        facts["given"] = _sha256(given)
    return f"{config.known_tokenizer}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}"


def _read_summary(folder: Path) -> _Summary | None:
    """An entry's summary; None if the entry is missing or damaged."""
    try:
        summary = _Summary(**json.loads((folder / "summary.json").read_text(encoding="utf-8")))
        num_bytes = (folder / "tokens.bin").stat().st_size
        # The byte tokenizer is always the same and has no file.
        trained = (folder / TOKENIZER).read_bytes() if (folder / TOKENIZER).exists() else _BYTES
    except (OSError, ValueError, TypeError):
        return None
    if hashlib.sha256(trained).hexdigest() != summary.tokenizer_sha256:
        return None
    width = np.dtype(token_dtype(summary.vocab_size)).itemsize
    # A truncated file counts as damaged.
    return summary if num_bytes == width * (summary.train_tokens + summary.validation_tokens) else None


def _write_entry(
    folder: Path, documents: Sequence[Document], config: DataConfig, given: Tokenizer | None, num_skipped: int
) -> _Summary:
    """Write an entry under a temporary name, then rename it."""
    # A unique name: several processes may tokenize the same text at the same time.
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    draft.mkdir(parents=True)
    try:
        summary = _fill_entry(draft, documents, config, given, num_skipped)
        _check_length(summary, config)  # before the rename: a text that is too short leaves no entry
        if folder.exists() and _read_summary(folder) is None:
            shutil.rmtree(folder)
        try:
            # Fails if the folder has files: another process was faster, and its entry stays.
            draft.replace(folder)
        except OSError:
            existing = _read_summary(folder)
            if existing is None:
                raise
            return existing
        return summary
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # the folder has other entries
            folder.parent.rmdir()


def _fill_entry(
    folder: Path, documents: Sequence[Document], config: DataConfig, given: Tokenizer | None, num_skipped: int
) -> _Summary:
    """Tokenize a corpus into the files of an entry."""
    training, validation = split_documents(documents, config.validation_fraction)
    tokenizer = given or _new_tokenizer(training, config)
    if config.known_tokenizer == "bpe":
        (folder / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
    with (folder / "tokens.bin").open("wb") as file:
        train_tokens = _write_tokens(file, training, tokenizer)
        validation_tokens = _write_tokens(file, validation, tokenizer)
    # Too few documents to hold out whole ones: the end of the text is held out instead.
    if not validation:
        # At least one token each: the unigram loss is a mean over the validation tokens.
        validation_tokens = min(max(round(config.validation_fraction * train_tokens), 1), train_tokens - 1)
        train_tokens -= validation_tokens
    tokens = np.memmap(folder / "tokens.bin", token_dtype(tokenizer.vocab_size), mode="r")
    summary = _Summary(
        num_documents=len(documents),
        num_skipped=num_skipped,
        num_bytes=sum(len(document.content) for document in documents),
        vocab_size=tokenizer.vocab_size,
        train_tokens=train_tokens,
        validation_tokens=validation_tokens,
        unigram_loss=unigram_loss(tokens[:train_tokens], tokens[train_tokens:], tokenizer.vocab_size),
        corpus_sha256=fingerprint(documents),
        tokenizer_sha256=_sha256(tokenizer),
    )
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    return summary


def _new_tokenizer(documents: Sequence[Document], config: DataConfig) -> Tokenizer:
    """The configured tokenizer; byte-pair encoding is trained on a sample of the documents."""
    if config.known_tokenizer == "bytes":
        return ByteTokenizer()
    sample: list[bytes] = []
    left = _BPE_SAMPLE_BYTES
    # Shuffled: in sorted order the sample would contain only the first folders of the corpus.
    for document in shuffled(documents):
        sample.append(document.content[:left])
        left -= len(sample[-1])
        if not left:
            break
    return BpeTokenizer.train(sample, config.bpe_vocab_size)


def _write_tokens(file: BinaryIO, documents: Sequence[Document], tokenizer: Tokenizer) -> int:
    """Append documents, each followed by the end-of-text token; returns the number of tokens."""
    dtype, num_tokens = token_dtype(tokenizer.vocab_size), 0
    end = np.array([tokenizer.end_of_text], dtype)
    for document in documents:
        # Windows span several documents without a mask; this token marks the boundary.
        ids = np.concatenate([tokenizer.encode(document.content).astype(dtype, copy=False), end])
        file.write(ids.tobytes())
        num_tokens += len(ids)
    return num_tokens


def _check_length(summary: _Summary, config: DataConfig) -> None:
    """Refuse a corpus without a full window for training and one for validation."""
    need = config.seq_len + 1
    if min(summary.train_tokens, summary.validation_tokens) < need:
        raise UserError(
            f"data.seq_len {config.seq_len} needs at least {need} tokens each for training and validation, found "
            f"{summary.train_tokens} and {summary.validation_tokens}; give more text (data.path), "
            "lower data.seq_len or change data.validation_fraction"
        )


def _describe(summary: _Summary, config: DataConfig) -> str:
    where = "Python's standard library" if config.path is None else str(config.path)
    skipped = f" ({summary.num_skipped:,} skipped: not UTF-8 text, or empty)" if summary.num_skipped else ""
    return (
        f"{where}: {count(summary.num_documents, 'document')}{skipped}, {summary.num_bytes / 1e6:.3g} MB, "
        f"{summary.train_tokens:,} training and {summary.validation_tokens:,} validation tokens "
        f"({config.known_tokenizer}, vocabulary of {summary.vocab_size:,})"
    )
