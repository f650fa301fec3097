"""The training data: text, tokenized once, or tokens; read in windows in a reproducible order.

Tokens are cached (``pipeloom.data.entry``), in one folder for each corpus and tokenizer. Its name is a hash of the
names, sizes and modification times of the corpus's files, so a later run reads no text. The cache may be deleted at
any time. The tokenizer is also stored in the run folder and in each checkpoint, from which a resumed run takes it.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG
from pipeloom.config import DataConfig
from pipeloom.config.tokenizer_files import tokenizer_files
from pipeloom.data.corpus import Source, list_sources
from pipeloom.data.entry import (
    RENEW,
    Corpus,
    Summary,
    document_ends,
    is_entry,
    open_entry,
    open_targets,
    read_summary,
    sample,
    stored_files,
    write_entry,
    write_indexed_entry,
)
from pipeloom.data.indexed import is_indexed
from pipeloom.data.packing import PackedWindows, pack, with_targets
from pipeloom.data.records import has_records
from pipeloom.data.tokenizer import (
    ByteTokenizer,
    LibraryTokenizer,
    TokenArray,
    Tokenizer,
    require_library,
    sha256_of,
    tokenizer_from,
)
from pipeloom.data.windows import Mixture, TokenWindows, Windows
from pipeloom.errors import UserError
from pipeloom.terminal.words import count

_FORMAT = 8
"""Part of the cache key; increment it when the same text and settings give other tokens or other files."""
_BPE_SAMPLE_BYTES = 8_000_000
_VALIDATION_SEED = 0
"""Validation windows are shuffled, so that the first few sample the whole text, and in the same order in every run."""


@dataclass(frozen=True)
class Data:
    """Tokenized training and validation data.

    Attributes:
        tokenizer: of the tokens.
        train: training windows, shuffled; of several sources, in the shares of their weights.
        validation: validation windows, shuffled in the same order in all runs; of several sources, in the shares of
            their sizes, so that each comes once and losses of runs with other weights are comparable.
        whole: the windows of the whole text, those of training first, in the order of the text.
        shares: frequency of each token in training, smoothed, [vocab_size].
        unigram_loss: cross-entropy of the validation tokens under ``shares``, nats per token. A baseline: a model that
            has learned anything has a lower loss.
        corpus_sha256: fingerprint of the text.
        description: for the start message; a line for all, and one for each of several sources.
    """

    tokenizer: Tokenizer
    train: Windows
    validation: Windows
    whole: Windows
    shares: npt.NDArray[np.float64]
    unigram_loss: float
    corpus_sha256: str
    description: str


def load_data(config: DataConfig, seed: int, stored: Mapping[str, str] | None = None) -> Data:
    """Open the data; tokenizes the text if the cache does not have it.

    Args:
        config: the text, its tokenizer and the length of sequences.
        seed: determines the order of the training windows.
        stored: the files of the tokenizer of the checkpoint that the run resumes from. None: the tokenizer of
            ``config``; byte-pair encoding is trained on the text.

    Raises:
        UserError: the text is missing, unreadable or too short; the cache folder cannot be written; the tokenizer or
            its library is missing; or ``stored`` contradicts ``config``.
    """
    # Before the text is read, which may take minutes.
    if config.tokenizer_kind != "bytes":
        require_library(config.tokenizer_kind)
    given = given_tokenizer(config, stored)
    if given is None and config.tokenizer == "bpe" and config.sources is not None:
        given = _shared_tokenizer(config)
    found = [_entry(part, given) for _, part in config.parts]
    tokenizer = given or tokenizer_from(stored_files(found[0][0]))
    opened = [
        _Part(
            weight,
            part,
            summary,
            *open_entry(folder, summary),
            document_ends(folder, summary),
            open_targets(folder, summary),
        )
        for (weight, part), (folder, summary) in zip(config.parts, found, strict=True)
    ]
    for part in opened:
        _check_length(part.summary, part.config)
        if part.targets is not None and config.pack == "stream":
            raise UserError(
                f"data.pack stream would cut answers from what they answer, found some in {_where(part.config)}; leave "
                "it out"
            )
    return _data(config, seed, tokenizer, opened)


@dataclass(frozen=True)
class _Part:
    """An opened entry: a source with its weight; counts of each token in training and in validation; where documents
    end.
    """

    weight: float
    config: DataConfig
    summary: Summary
    tokens: TokenArray
    counts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_] | None

    @property
    def is_packed(self) -> bool:
        """Whether documents stay whole."""
        return self.config.pack == "best-fit" or (self.config.pack is None and self.targets is not None)


def _windows(part: _Part, begin: int, end: int, seed: int | None, filler: int) -> TokenWindows:
    """The windows of some tokens of an entry."""
    tokens, seq_len, by_document = part.tokens[begin:end], part.config.seq_len, part.config.by_document
    if not part.is_packed and not by_document:
        return TokenWindows(tokens, seq_len, seed)
    ends = part.ends[(part.ends > begin) & (part.ends < end)] - begin
    if not part.is_packed:
        return TokenWindows(tokens, seq_len, seed, begins=ends)
    found, counts = pack(np.append(ends, end - begin), seq_len + 1), None
    if part.targets is not None:
        counts = part.targets[begin:end]
        found = with_targets(found, counts, by_document=by_document)
        if not found.num_windows:
            raise UserError(
                f"{_where(part.config)} must have answers that training and validation can learn, found none within "
                f"windows of data.seq_len {seq_len}; give more records or raise data.seq_len"
            )
    own = {"packed": found, "filler": filler, "counts": counts, "by_document": by_document}
    return PackedWindows(tokens, seq_len, seed, **own)


def _data(config: DataConfig, seed: int, tokenizer: Tokenizer, parts: Sequence[_Part]) -> Data:
    filler = tokenizer.end_of_text
    train = [_windows(part, 0, part.summary.train_tokens, seed, filler) for part in parts]
    sides = ((part.summary.train_tokens, len(part.tokens)) for part in parts)
    validation = [_windows(part, *side, _VALIDATION_SEED, filler) for part, side in zip(parts, sides, strict=True)]
    whole = [_windows(part, 0, len(part.tokens), None, filler) for part in parts]
    total = sum(part.weight for part in parts)
    shares = sum((part.weight / total * token_shares(part.counts[0]) for part in parts), np.zeros(1))
    texts = [part.summary.corpus_sha256 for part in parts]
    names = [(text, str(part.config.path)) for text, part in zip(texts, parts, strict=True)]

    def mixed(found: list[TokenWindows], weights: Sequence[float]) -> Windows:
        return found[0] if config.sources is None else Mixture(found, weights, names)

    return Data(
        tokenizer=tokenizer,
        train=mixed(train, [part.weight for part in parts]),
        validation=mixed(validation, [one.num_windows for one in validation]),
        whole=mixed(whole, [one.num_windows for one in whole]),
        shares=shares,
        unigram_loss=unigram_loss(shares, sum((part.counts[1] for part in parts), np.zeros(1, np.int64))),
        corpus_sha256=texts[0] if config.sources is None else hashlib.sha256("".join(texts).encode()).hexdigest(),
        description=_describe(config, parts, train),
    )


def token_shares(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Frequencies of tokens, with add-one (Laplace) smoothing.

    Args:
        counts: occurrences of each token, [vocab_size].
    """
    # Smoothed: a token that occurs only in the validation text would have an infinite loss.
    return (counts + 1) / (counts.sum() + len(counts))


def unigram_loss(shares: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> float:
    """Cross-entropy of tokens under given frequencies.

    Args:
        shares: frequency of each token, [vocab_size].
        counts: occurrences of the tokens that are predicted, [vocab_size]; not all 0.

    Returns:
        Nats per token.
    """
    return -float(counts @ np.log(shares)) / int(counts.sum())


def _list(config: DataConfig) -> list[Source]:
    sources = list_sources(config.path)
    if not sources:
        raise UserError(
            f"the corpus must have a file that is not hidden, found none in {_where(config)}; set data.path to a file "
            "of text or of records, or a folder of them"
        )
    if config.field != DataConfig.field and not any(has_records(source.path) for source in sources):
        records = "files of records (.jsonl, .parquet, .arrow)"
        raise UserError(f"data.field has no effect without {records}, found none in {_where(config)}; leave it out")
    return sources


def _entry(config: DataConfig, given: Tokenizer | None) -> tuple[Path, Summary]:
    """The folder of a source's tokens, written if it is missing."""
    path = config.path
    # Once: reading hashes the tokenizer.
    summary = None if path is None else read_summary(path)
    if path is not None and (is_indexed(path) or summary is not None):
        _refuse_unused(config, path)
    # Of a stranger's folder no other file is read than its own.
    if path is not None and summary is not None and not summary.file:
        return path, _checked(path, summary, given)
    if path is not None and is_entry(path):
        what = "damaged" if summary is None else f"elsewhere, in {summary.file}"
        raise UserError(f"data.path {path} is a folder of tokens, which are {what}; {RENEW}")
    if path is not None and is_indexed(path):
        return _indexed(config, path, given)
    return _find_or_write(config, _list(config), given)


def _refuse_unused(config: DataConfig, path: Path) -> None:
    """Refuse settings that change how text becomes tokens, for tokens that are there."""
    names = ["field"] if is_indexed(path) else ["field", "validation_fraction"]
    for name in names:
        if getattr(config, name) != getattr(DataConfig, name):
            raise UserError(f"data.{name} has no effect on {path}, which has tokens already; leave it out")


def _checked(path: Path, summary: Summary, given: Tokenizer | None) -> Summary:
    """Refuse a folder of tokens of another tokenizer."""
    own = tokenizer_from(stored_files(path))
    used = given or ByteTokenizer()
    facts = [(one.end_of_text, one.vocab_size, one.files()[TOKENIZER]) for one in (own, used)]
    if facts[0] != facts[1] or own.vocab_size != summary.vocab_size:
        name = "bytes" if isinstance(own, ByteTokenizer) else path
        raise UserError(f"{path} has tokens of another tokenizer than data.tokenizer; set data.tokenizer to {name}")
    return summary


def _indexed(config: DataConfig, path: Path, given: Tokenizer | None) -> tuple[Path, Summary]:
    if config.tokenizer == "bpe":
        raise UserError(
            f"data.tokenizer bpe is trained on text, found tokens in {path}; set it to the one that made them"
        )
    tokenizer = given or ByteTokenizer()
    folder = _cache(config) / _key(config, list_sources(path.with_suffix(".bin")), tokenizer)
    summary = read_summary(folder)
    if summary is None:
        with _writing(config):
            summary = write_indexed_entry(folder, path, config.validation_fraction, tokenizer)
    return folder, summary


def _find_or_write(config: DataConfig, sources: Sequence[Source], given: Tokenizer | None) -> tuple[Path, Summary]:
    """The cache entry of a corpus and a tokenizer, written if missing."""
    cache = _cache(config)
    folder = cache / _key(config, sources, given if config.tokenizer_kind == "file" else None)
    summary = read_summary(folder)
    # With a given tokenizer, the entry of the corpus is used if it has the same tokenizer, as in a run resumed here.
    if given is not None and (summary is None or summary.tokenizer_sha256 != _sha256(given)):
        folder = cache / _key(config, sources, given)
        summary = read_summary(folder)
    if summary is not None:
        return folder, summary
    with _writing(config):
        return folder, write_entry(folder, corpus_of(config, sources, given))


def tokenize_text(config: DataConfig, folder: Path, num_workers: int | None, *, is_quiet: bool) -> str:
    """Tokenize a text into a folder that ``data.path`` takes; goes on where a stopped process ended.

    Args:
        config: the text and its tokenizer.
        folder: made when it is complete.
        num_workers: processes. None: one for a small text, else one for each core.
        is_quiet: whether no progress is shown.

    Returns:
        What was written, in a line.

    Raises:
        UserError: as :func:`load_data`; or the folder exists.
        RunError: a process was killed.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists; choose another folder, or remove it")
    if config.tokenizer_kind != "bytes":
        require_library(config.tokenizer_kind)
    if config.path is not None and (is_indexed(config.path) or is_entry(config.path)):
        raise UserError(f"data.path {config.path} has tokens already; it needs no tokenizing")
    sources, given = _list(config), given_tokenizer(config, None)
    # A run with any length of sequences may read it.
    config = replace(config, seq_len=1)
    corpus = replace(corpus_of(config, sources, given), key=_key(config, sources, given))
    with _writing(config, folder):
        summary = write_entry(folder, corpus, num_workers, has_bar=not is_quiet)
    return f"{_where(config)}: {_sizes(summary)} ({config.known_tokenizer}, vocabulary of {summary.vocab_size:,})"


def corpus_of(config: DataConfig, sources: Sequence[Source], given: Tokenizer | None) -> Corpus:
    """What an entry is made of; byte-pair encoding is trained when it is needed."""

    def make() -> Tokenizer:
        if given is not None or config.known_tokenizer == "bytes":
            return given or ByteTokenizer()
        return LibraryTokenizer.train(sample(corpus), config.bpe_vocab_size)

    corpus = Corpus(sources, config.field, config.validation_fraction, make, lambda found: _check_length(found, config))
    return corpus


def _cache(config: DataConfig) -> Path:
    # As the XDG base directory specification says, an empty variable counts as unset.
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return config.cache or home / "pipeloom"


@contextmanager
def _writing(config: DataConfig, folder: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        other = "set data.cache to another folder" if folder is None else "choose another folder"
        raise UserError(
            f"the {'cache ' if folder is None else ''}folder must be writable and have room, found "
            f"{error.strerror or error} at {folder or _cache(config)}; {other}"
        ) from error


def given_tokenizer(config: DataConfig, stored: Mapping[str, str] | None) -> Tokenizer | None:
    """The tokenizer of a checkpoint or of a file; ``None`` for another.

    Args:
        config: of the run.
        stored: the files of the tokenizer of the checkpoint that the run starts from.

    Raises:
        UserError: both are given and differ, or one cannot be read.
    """
    kind, path = config.tokenizer_kind, config.tokenizer
    if stored is None:
        return _tokenizer_of(path) if isinstance(path, Path) else None
    found = "file" if TOKENIZER_CONFIG in stored else "bytes" if stored == ByteTokenizer().files() else "bpe"
    if found != kind:
        has, wanted = ("one from a file", "that file") if found == "file" else (found, found)
        raise UserError(
            f"data.tokenizer is {config.known_tokenizer}, the checkpoint has {has}; set data.tokenizer to {wanted}"
        )
    # The file may be gone, such as on another host; the checkpoint has it.
    if isinstance(path, Path) and path.exists() and tokenizer_files(path) != stored:
        raise UserError(
            f"data.tokenizer is {path}, the checkpoint has another one; set data.tokenizer as in the run that wrote it"
        )
    tokenizer = tokenizer_from(stored)
    if found == "bpe" and tokenizer.vocab_size > config.bpe_vocab_size:
        raise UserError(
            f"data.bpe_vocab_size is {config.bpe_vocab_size}, the checkpoint's tokenizer has {tokenizer.vocab_size} "
            f"tokens; set data.bpe_vocab_size to {tokenizer.vocab_size}"
        )
    return tokenizer


def _tokenizer_of(path: Path) -> Tokenizer:
    files = tokenizer_files(path)
    try:
        return tokenizer_from(files)
    except UserError as error:
        raise UserError(f"data.tokenizer {path}: {error}") from None


def _sha256(tokenizer: Tokenizer) -> str:
    return sha256_of(tokenizer.files())


def _key(config: DataConfig, sources: Sequence[Source], given: Tokenizer | None) -> str:
    """Name of a cache entry: a hash of the corpus's files and of all settings that change the tokens."""
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "tokenizer": config.tokenizer_kind,
        "vocab_size": config.bpe_vocab_size if config.tokenizer == "bpe" else None,
        "validation_fraction": config.validation_fraction,
        "field": config.field,
        # Times and sizes instead of contents, so that a start need not read the whole corpus.
        "files": [(str(source.path.resolve()), source.num_bytes, source.mtime_ns) for source in sources],
    }
    if given is not None:
        facts["given"] = _sha256(given)
    return f"{config.tokenizer_kind}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}"


def _shared_tokenizer(config: DataConfig) -> Tokenizer:
    """Byte-pair encoding trained on all sources, in the shares of their weights; from the cache if it has it."""
    corpora = {part: _list(part) for _, part in config.parts}
    facts = [(weight, _key(part, corpora[part], None)) for weight, part in config.parts]
    file = _cache(config) / f"bpe-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.{TOKENIZER}"
    with suppress(OSError, UserError):
        return tokenizer_from({TOKENIZER: file.read_text(encoding="utf-8")})
    total, texts = sum(weight for weight, _ in config.parts), list[bytes]()
    for weight, part in config.parts:
        texts += sample(corpus_of(part, corpora[part], None), max(1, round(weight / total * _BPE_SAMPLE_BYTES)))
    tokenizer = LibraryTokenizer.train(texts, config.bpe_vocab_size)
    with _writing(config):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
        draft.write_text(tokenizer.files()[TOKENIZER], encoding="utf-8")
        draft.replace(file)
    return tokenizer


def _check_length(summary: Summary, config: DataConfig) -> None:
    """Refuse a corpus without a full window for training and one for validation."""
    need = config.seq_len + 1
    if min(summary.train_tokens, summary.validation_tokens) < need:
        raise UserError(
            f"data.seq_len {config.seq_len} needs at least {need} tokens each for training and validation, found "
            f"{summary.train_tokens} and {summary.validation_tokens} in {_where(config)}; give more text (data.path), "
            "lower data.seq_len or change data.validation_fraction"
        )


def _where(config: DataConfig) -> str:
    return "Python's standard library" if config.path is None else str(config.path)


def _describe(config: DataConfig, parts: Sequence[_Part], train: Sequence[TokenWindows]) -> str:
    tokenizer = config.known_tokenizer
    if isinstance(tokenizer, Path) and not tokenizer.exists():
        tokenizer = f"tokenizer of the checkpoint, since {tokenizer} is gone"
    of = f"({tokenizer}, vocabulary of {parts[0].summary.vocab_size:,})"
    of += ", attention within documents" if config.by_document else ""
    used = [part.num_used for part in train if isinstance(part, PackedWindows)]
    if used:
        room = sum(one.num_windows for one in train if isinstance(one, PackedWindows)) * (config.seq_len + 1)
        of += f", {1 - sum(used) / room:.1%} of packed windows filled up"
    if config.sources is None:
        return f"{_where(config)}: {_sizes(parts[0].summary)} {of}"
    total = sum(part.weight for part in parts)
    lines = [f"{count(len(parts), 'source')} {of}"]
    lines += [f"{part.weight / total:5.1%}  {_where(part.config)}: {_sizes(part.summary)}" for part in parts]
    return "\n           ".join(lines)


def _sizes(summary: Summary) -> str:
    skipped = f" ({summary.num_skipped:,} skipped: not UTF-8 text, or empty)" if summary.num_skipped else ""
    targets = "" if summary.train_targets is None else f" ({summary.train_targets:,} of answers)"
    return (
        f"{count(summary.num_documents, 'document')}{skipped}, {summary.num_bytes / 1e6:.3g} MB, "
        f"{summary.train_tokens:,} training{targets} and {summary.validation_tokens:,} validation tokens"
    )
