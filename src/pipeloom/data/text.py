"""The training data: text, turned into tokens once, read in windows in a reproducible order.

Tokens are kept in the cache folder, one folder for each corpus and tokenizer:

    <key>/tokens.bin       training tokens, then validation tokens; uint16, or uint32 if the vocabulary needs it
    <key>/summary.json     how many of each, and what is known about the corpus
    <key>/tokenizer.json   the trained tokenizer; byte-pair encoding only

An entry is written under another name and then renamed, so it is there completely or not at all. The key comes from
the names, sizes and times of the corpus's files, so a later run reads no text.

The cache may be removed at any time. The tokenizer, which has to last, is in the run folder and in each checkpoint; a
run that goes on from a checkpoint takes it from there.
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
from pipeloom.data.tokenizer import BpeTokenizer, ByteTokenizer, TokenArray, Tokenizer, require_bpe, token_dtype
from pipeloom.errors import UserError
from pipeloom.terminal.words import count

_FORMAT = 3
"""Part of the cache key; raise it when the same text and settings give other tokens or other files."""
# More text takes longer and hardly changes the merges.
_BPE_SAMPLE_BYTES = 8_000_000
# bincount makes an int64 copy: 32 MiB at a time, not four times the tokens' file.
_COUNT_AT_ONCE = 1 << 22
_BYTES = ByteTokenizer().to_json().encode()
_VALIDATION_SEED = 0
"""Validation windows are shuffled, so that the first few are from all over the text, but alike in every run."""


class TokenWindows:
    """Windows of ``seq_len + 1`` tokens that do not overlap, in an order that a seed decides.

    Every epoch visits each window once; with a seed, each epoch in another order. The batches are a pure function of
    their index, so the whole state of reading is one integer.

    Args:
        tokens: the stream, [tokens]; may be a memory-mapped file. Tokens after the last full window are not used.
        seq_len: tokens that a model reads at once; a window has one more, the last target.
        seed: decides the order. None: the order of the text.

    Raises:
        UserError: there is not one full window.
    """

    def __init__(self, tokens: TokenArray, seq_len: int, seed: int | None = None) -> None:
        size = seq_len + 1
        if len(tokens) < size:
            raise UserError(f"data.seq_len {seq_len} needs at least {size} tokens, found {len(tokens)}")
        self.tokens = tokens
        self.seq_len = seq_len
        self.num_windows = len(tokens) // size
        # Still a view of the file in memory: only the rows of a batch are read.
        self._windows = tokens[: self.num_windows * size].reshape(self.num_windows, size)
        self._seed = seed

    def batch(self, index: int, batch_size: int, skipped: int = 0) -> npt.NDArray[np.int64]:
        """A batch of windows.

        Args:
            index: number of the batch, from 0; after the last window the next epoch begins.
            batch_size: windows of a batch.
            skipped: windows before the first batch, which were read in batches of another size.

        Returns:
            Tokens, int64 [batch_size, seq_len + 1]: inputs are ``[:, :-1]``, targets are ``[:, 1:]``.
        """
        # A run that was resumed with another batch size goes on behind the windows that were read.
        first = skipped + index * batch_size
        rows = [self._row(number) for number in range(first, first + batch_size)]
        return np.asarray(self._windows[rows], dtype=np.int64)

    def _row(self, number: int) -> int:
        """Which window comes as the ``number``-th, counted over all epochs."""
        epoch, place = divmod(number, self.num_windows)
        return place if self._seed is None else int(_order(self._seed, epoch, self.num_windows)[place])


@dataclass(frozen=True)
class Data:
    """Everything that training needs of its text.

    Attributes:
        tokenizer: text to tokens and back.
        train: training windows, shuffled.
        validation: validation windows, in one order for all runs, from all over the text.
        unigram_loss: loss on the validation tokens of a model of how often each token occurs in the
            training tokens; nats a token. A model that has learned anything is below it.
        corpus_sha256: fingerprint of the text.
        description: one line for people.
    """

    tokenizer: Tokenizer
    train: TokenWindows
    validation: TokenWindows
    unigram_loss: float
    corpus_sha256: str
    description: str


def load_data(config: DataConfig, seed: int, tokenizer_json: str | None = None) -> Data:
    """Open the data, after turning the text into tokens if that was not done before.

    Args:
        config: the text and how it is cut.
        seed: decides the order of the training windows.
        tokenizer_json: the tokenizer of the checkpoint that the run goes on from. None: the one of ``config``;
            byte-pair encoding is trained on the text.

    Raises:
        UserError: the text is missing, unreadable or too short; the cache folder cannot be written; byte-pair
            encoding is wanted and its library is missing; or the given tokenizer is not the one of ``config``.
    """
    # Before the text is read: a library that is missing should not cost minutes first.
    if config.known_tokenizer == "bpe":
        require_bpe()
    given = None if tokenizer_json is None else _given_tokenizer(config, tokenizer_json)
    folder, summary = _find_or_write(config, list_sources(config.path), given)
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
    )


def unigram_loss(train: TokenArray, validation: TokenArray, vocab_size: int) -> float:
    """Cross-entropy of tokens under the frequencies of other tokens, each count one higher than it is.

    Args:
        train: tokens that give the frequencies, [tokens].
        validation: tokens that are predicted, [tokens]; not empty.
        vocab_size: number of different tokens.

    Returns:
        Nats a token.
    """
    # Each count one higher (Laplace): a token that only the validation text has would have an infinite loss.
    log_shares = np.log((_counts(train, vocab_size) + 1) / (len(train) + vocab_size))
    return -float(_counts(validation, vocab_size) @ log_shares) / len(validation)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_windows: int) -> npt.NDArray[np.int64]:
    """An epoch's order of windows. Only numpy's raw bits are used: they are the same in all of its versions."""
    # NumPy keeps the bits of its generators over versions, but not what shuffle and permutation make of them (NEP 19).
    # Seeds are numbers of 64 bits, since SeedSequence takes none below 0.
    bits = np.random.PCG64([seed % (1 << 64), epoch]).random_raw(num_windows)
    # Stable: two equal numbers have one order in every version and on every machine.
    return np.argsort(bits, kind="stable")


def _counts(tokens: TokenArray, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token occurs, [vocab_size]; in parts, because the count needs a wide copy."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(tokens), _COUNT_AT_ONCE):
        counts += np.bincount(tokens[first : first + _COUNT_AT_ONCE], minlength=vocab_size)
    return counts


@dataclass(frozen=True)
class _Summary:
    """The entries in ``summary.json``."""

    num_files: int
    num_skipped: int
    num_bytes: int
    vocab_size: int
    train_tokens: int
    validation_tokens: int
    unigram_loss: float
    corpus_sha256: str
    tokenizer_sha256: str


def _find_or_write(config: DataConfig, sources: Sequence[Source], given: Tokenizer | None) -> tuple[Path, _Summary]:
    """The cache entry of a corpus and a tokenizer, written now if it is not there."""
    # The XDG base directory specification: an empty variable counts as unset.
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = config.cache or home / "pipeloom"
    folder = cache / _key(config, sources, None)
    summary = _read_summary(folder)
    # The entry without a given tokenizer serves if it was made with the same one, as in a run that resumes here.
    if given is not None and (summary is None or summary.tokenizer_sha256 != _sha256(given)):
        folder = cache / _key(config, sources, given)
        summary = _read_summary(folder)
    if summary is not None:
        return folder, summary
    documents = read_documents(sources)
    try:
        return folder, _write_entry(folder, documents, config, given, len(sources) - len(documents))
    except OSError as error:
        raise UserError(
            f"the cache folder must be writable and have room, found {error.strerror or error} at {cache}; "
            "set data.cache to another folder"
        ) from error


def _given_tokenizer(config: DataConfig, text: str) -> Tokenizer:
    """The tokenizer of a checkpoint, if it is of the kind that the configuration names."""
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
    """Name of a cache entry: changes with the corpus's files and with everything that changes the tokens."""
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "tokenizer": config.known_tokenizer,
        "vocab_size": config.bpe_vocab_size if config.known_tokenizer == "bpe" else None,
        "validation_fraction": config.validation_fraction,
        # Times and sizes, not contents: a start would otherwise read the whole corpus to find that nothing changed.
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
        # An entry of bytes has no file: its tokenizer is always the same.
        trained = (folder / TOKENIZER).read_bytes() if (folder / TOKENIZER).exists() else _BYTES
    except (OSError, ValueError, TypeError):
        return None
    if hashlib.sha256(trained).hexdigest() != summary.tokenizer_sha256:
        return None
    width = np.dtype(token_dtype(summary.vocab_size)).itemsize
    # A full disk or a kill may leave a shorter file under the right name.
    return summary if num_bytes == width * (summary.train_tokens + summary.validation_tokens) else None


def _write_entry(
    folder: Path, documents: Sequence[Document], config: DataConfig, given: Tokenizer | None, num_skipped: int
) -> _Summary:
    """Write a complete entry beside its place, then move it there."""
    # A name of its own: several processes may tokenize the same text at the same time.
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    draft.mkdir(parents=True)
    try:
        summary = _fill_entry(draft, documents, config, given, num_skipped)
        _check_length(summary, config)  # text that is refused leaves nothing
        if folder.exists() and _read_summary(folder) is None:
            shutil.rmtree(folder)
        try:
            # Fails on a folder that has files: then another process has put its entry there first, which stays.
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
    # Too few documents to keep a whole one: the end of the text is kept instead.
    if not validation:
        # At least one token on each side: the unigram loss is a mean over those of validation.
        validation_tokens = min(max(round(config.validation_fraction * train_tokens), 1), train_tokens - 1)
        train_tokens -= validation_tokens
    tokens = np.memmap(folder / "tokens.bin", token_dtype(tokenizer.vocab_size), mode="r")
    summary = _Summary(
        num_files=len(documents),
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
    # The sorted order would sample the first folders of the corpus alone.
    for document in shuffled(documents):
        sample.append(document.content[:left])
        left -= len(sample[-1])
        if not left:
            break
    return BpeTokenizer.train(sample, config.bpe_vocab_size)


def _write_tokens(file: BinaryIO, documents: Sequence[Document], tokenizer: Tokenizer) -> int:
    """Append documents, each with the end-of-text token after it; returns the number of tokens."""
    dtype, num_tokens = token_dtype(tokenizer.vocab_size), 0
    end = np.array([tokenizer.end_of_text], dtype)
    for document in documents:
        # After each document: attention runs over the border, and the token is how the model learns that there is one.
        ids = np.concatenate([tokenizer.encode(document.content).astype(dtype, copy=False), end])
        file.write(ids.tobytes())
        num_tokens += len(ids)
    return num_tokens


def _check_length(summary: _Summary, config: DataConfig) -> None:
    """Refuse a corpus that has not one window on each side."""
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
        f"{where}: {count(summary.num_files, 'file')}{skipped}, {summary.num_bytes / 1e6:.3g} MB, "
        f"{summary.train_tokens:,} training and {summary.validation_tokens:,} validation tokens "
        f"({config.known_tokenizer}, vocabulary of {summary.vocab_size:,})"
    )
