"""The tokens of a source: in a folder of its own, in the cache, or written into one of them.

The cache has one folder for each corpus and tokenizer. Its name is a hash of the names, sizes and modification times of
the corpus's files, so a later run reads no text. The cache may be deleted at any time.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG
from pipeloom.config import DataConfig
from pipeloom.config.tokenizer_files import tokenizer_files
from pipeloom.data.checksums import RENEW
from pipeloom.data.corpus import Source
from pipeloom.data.entry import Corpus, sample, write_entry, write_indexed_entry
from pipeloom.data.indexed import is_indexed
from pipeloom.data.listing import Listing, list_sources
from pipeloom.data.own_folders import TOKENS
from pipeloom.data.records import has_records
from pipeloom.data.summary import Summary, is_entry, read_summary, stored_files
from pipeloom.data.tokenizer import (
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    require_library,
    sha256_of,
    tokenizer_from,
)
from pipeloom.errors import UserError
from pipeloom.terminal.words import count, format_bytes

_FORMAT = 9
"""Part of the cache key; increment it when the same text and settings give other tokens or other files."""
_BPE_SAMPLE_BYTES = 8_000_000
_MOST_NAMED = 5
"""Folders that a message names."""
_LEAST_TOKENS = 2
"""A token, and one that it predicts."""
Check = Callable[[Summary, DataConfig], None]
"""Raises a ``UserError`` if the tokens of a text are too few."""


class Entry(NamedTuple):
    """The tokens of a source.

    Attributes:
        folder: that has them.
        summary: of the folder.
        listing: the files that they are from.
    """

    folder: Path
    summary: Summary
    listing: Listing


def _list(config: DataConfig) -> Listing:
    listing = list_sources(config.path, _cache(config))
    sources = listing.sources
    if not sources:
        rest = f" {without(listing.left_out)}" if listing.left_out else ""
        raise UserError(
            f"the corpus must have a file that is not hidden, found none in {where(config)}{rest}; set "
            "data.path to a file of text or of records, or a folder of them"
        )
    if config.field != DataConfig.field and not any(has_records(source.path) for source in sources):
        records = "files of records (.jsonl, .parquet, .arrow)"
        raise UserError(f"data.field has no effect without {records}, found none in {where(config)}; leave it out")
    return listing


def entry_of(config: DataConfig, given: Tokenizer | None, check: Check) -> Entry:
    """The tokens of a source, written if they are missing.

    Args:
        config: of one source.
        given: its tokenizer; ``None``: bytes, or byte-pair encoding that is trained on the source.
        check: of the tokens that are written.

    Raises:
        UserError: as ``load_data``.
    """
    path = config.path
    # Once: reading hashes the tokenizer.
    summary = None if path is None else read_summary(path)
    if path is not None and (is_indexed(path) or summary is not None):
        _refuse_unused(config, path)
    if path is not None and given is None:
        _refuse_training(config, path)
    # Of a stranger's folder no other file is read than its own.
    if path is not None and summary is not None and not summary.file:
        return Entry(path, _checked(path, summary, given), list_sources(path / TOKENS))
    if path is not None and is_entry(path):
        what = "damaged" if summary is None else f"elsewhere, in {summary.file}"
        raise UserError(f"data.path {path} is a folder of tokens, which are {what}; {RENEW}")
    if path is not None and is_indexed(path):
        return _indexed(config, path, given)
    listing = _list(config)
    return Entry(*_find_or_write(config, listing.sources, given, check), listing)


def _refuse_unused(config: DataConfig, path: Path) -> None:
    """Refuse settings that change how text becomes tokens, for tokens that are there."""
    names = ["field"] if is_indexed(path) else ["field", "validation_fraction"]
    for name in names:
        if getattr(config, name) != getattr(DataConfig, name):
            raise UserError(f"data.{name} has no effect on {path}, which has tokens already; leave it out")


def refuse_cache(config: DataConfig) -> None:
    """Refuse a folder for tokens that no source writes.

    Raises:
        UserError: each source is a folder of tokens.
    """
    paths = [part.path for _, part in config.parts]
    if config.cache is not None and all(path is not None and is_entry(path) for path in paths):
        raise UserError(f"data.cache has no effect on {paths[0]}, which has tokens already; leave it out")


def _refuse_training(config: DataConfig, path: Path) -> None:
    """Refuse to train byte-pair encoding on tokens."""
    if config.tokenizer == "bpe" and (is_indexed(path) or is_entry(path)):
        raise UserError(
            f"data.tokenizer bpe is trained on text, found tokens in {path}; set it to the one that made them"
        )


def _checked(path: Path, summary: Summary, given: Tokenizer | None) -> Summary:
    """Refuse a folder of tokens of another tokenizer."""
    own = tokenizer_from(stored_files(path))
    used = given or ByteTokenizer()
    facts = [(one.end_of_text, one.vocab_size, one.files()[TOKENIZER]) for one in (own, used)]
    if facts[0] != facts[1] or own.vocab_size != summary.vocab_size:
        name = "bytes" if isinstance(own, ByteTokenizer) else path
        raise UserError(f"{path} has tokens of another tokenizer than data.tokenizer; set data.tokenizer to {name}")
    return summary


def _indexed(config: DataConfig, path: Path, given: Tokenizer | None) -> Entry:
    _refuse_training(config, path)
    tokenizer = given or ByteTokenizer()
    listing = list_sources(path.with_suffix(".bin"))
    folder = _cache(config) / _key(config, listing.sources, tokenizer)
    summary = read_summary(folder)
    if summary is None:
        with _writing(config):
            summary = write_indexed_entry(folder, path, config.validation_fraction, tokenizer)
    return Entry(folder, summary, listing)


def _find_or_write(
    config: DataConfig, sources: Sequence[Source], given: Tokenizer | None, check: Check
) -> tuple[Path, Summary]:
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
        return folder, write_entry(folder, _corpus_of(config, sources, given, check))


def tokenize_text(config: DataConfig, folder: Path, num_workers: int | None, *, is_quiet: bool) -> str:
    """Tokenize a text into a folder that ``data.path`` takes; resumes where a stopped process ended.

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
    (sources, left_out), given = _list(config), given_tokenizer(config, None)
    corpus = replace(_corpus_of(config, sources, given, _check_folder), key=_key(config, sources, given))
    with _writing(config, folder):
        summary = write_entry(folder, corpus, num_workers, has_bar=not is_quiet)
    what = f"{sizes_of(summary)} ({config.known_tokenizer}, vocabulary of {summary.vocab_size:,})"
    return "\n".join([f"{where(config)}: {what}", *([without(left_out)] if left_out else [])])


def _corpus_of(config: DataConfig, sources: Sequence[Source], given: Tokenizer | None, check: Check) -> Corpus:
    """What an entry is made of; byte-pair encoding is trained when it is needed."""

    def make() -> Tokenizer:
        if given is not None or config.known_tokenizer == "bytes":
            return given or ByteTokenizer()
        return LibraryTokenizer.train(sample(corpus), config.bpe_vocab_size)

    corpus = Corpus(sources, config.field, config.validation_fraction, make, lambda found: check(found, config))
    return corpus


def _cache(config: DataConfig) -> Path:
    # As the XDG base directory specification states, an empty variable counts as unset.
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
            f"data.tokenizer is {config.known_tokenizer}, the checkpoint has {has}; set data.tokenizer to {wanted}, "
            "or start from the run file of that run, which has all of its settings"
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
        "files": [(path, one.num_bytes, one.mtime_ns) for path, one in zip(_resolved(sources), sources, strict=True)],
    }
    if given is not None:
        facts["given"] = _sha256(given)
    return f"{config.tokenizer_kind}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}"


def _resolved(sources: Sequence[Source]) -> Iterator[str]:
    """The path of each file without links; each folder's is looked up once, since a corpus may have many files."""
    found: dict[Path, Path] = {}
    for source in sources:
        if source.path.is_symlink():
            yield str(source.path.resolve())
            continue
        folder = source.path.parent
        if folder not in found:
            found[folder] = folder.resolve()
        yield str(found[folder] / source.path.name)


def shared_tokenizer(config: DataConfig) -> Tokenizer:
    """Byte-pair encoding trained on all sources, in the shares of their weights; from the cache if it has it."""
    for _, part in config.parts:
        if part.path is not None:
            _refuse_training(part, part.path)
    corpora = {part: _list(part).sources for _, part in config.parts}
    facts = [(weight, _key(part, corpora[part], None)) for weight, part in config.parts]
    file = _cache(config) / f"bpe-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.{TOKENIZER}"
    with suppress(OSError, UserError):
        return tokenizer_from({TOKENIZER: file.read_text(encoding="utf-8")})
    total, texts = sum(weight for weight, _ in config.parts), list[bytes]()
    for weight, part in config.parts:
        texts += sample(
            _corpus_of(part, corpora[part], None, check_split), max(1, round(weight / total * _BPE_SAMPLE_BYTES))
        )
    tokenizer = LibraryTokenizer.train(texts, config.bpe_vocab_size)
    with _writing(config):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
        draft.write_text(tokenizer.files()[TOKENIZER], encoding="utf-8")
        draft.replace(file)
    return tokenizer


def _check_folder(summary: Summary, config: DataConfig) -> None:
    """Refuse a corpus of which no run could make a window; a run with any length of sequences may read the folder."""
    if min(summary.train_tokens, summary.validation_tokens) < _LEAST_TOKENS:
        raise UserError(
            f"a text must have at least {_LEAST_TOKENS} tokens each for training and validation, found "
            f"{summary.train_tokens} and {summary.validation_tokens} in {where(config)}; give more text, or raise "
            "--validation-fraction where validation has too few"
        )


def check_whole(summary: Summary, config: DataConfig) -> None:
    """Refuse a corpus that has no token to predict."""
    total = summary.train_tokens + summary.validation_tokens
    if total < _LEAST_TOKENS:
        raise UserError(f"a text must have at least {_LEAST_TOKENS} tokens, found {total} in {where(config)}")


def check_split(summary: Summary, config: DataConfig) -> None:
    """Refuse a corpus without a full window for training and one for validation."""
    need = config.seq_len + 1
    if min(summary.train_tokens, summary.validation_tokens) < need:
        raise UserError(
            f"data.seq_len {config.seq_len} needs at least {need} tokens each for training and validation, found "
            f"{summary.train_tokens} and {summary.validation_tokens} in {where(config)}; give more text (data.path), "
            "lower data.seq_len or change data.validation_fraction"
        )


def where(config: DataConfig) -> str:
    """The text of a configuration in a message."""
    return "Python's standard library" if config.path is None else str(config.path)


def in_several(parts: Sequence[tuple[DataConfig, Sequence[Source]]]) -> str:
    """A line about files that are in several sources, by their paths without links; empty for none.

    A file of records that sources read by different fields is a different text in each.
    """
    seen, double = dict[tuple[str, str], DataConfig](), list[tuple[str, DataConfig, DataConfig]]()
    for config, sources in parts:
        for source, file in zip(sources, _resolved(sources), strict=True):
            first = seen.setdefault((file, config.field if has_records(source.path) else ""), config)
            if first is not config:
                double.append((file, first, config))
    if not double:
        return ""
    file, *others = double[0]
    such = f"such as {file} in {' and '.join(map(where, others))}"
    are = "is" if len(double) == 1 else "are"
    return f"{count(len(double), 'file')} {are} in several sources, {such}: one may train on what another holds out"


def without(left_out: Sequence[str]) -> str:
    """Folders that are no text, in a message; at least one."""
    more = len(left_out) - _MOST_NAMED
    named = ", ".join(left_out[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
    return f"without {count(len(left_out), 'folder')} that pipeloom wrote: {named}"


def sizes_of(summary: Summary) -> str:
    """Documents and tokens of an entry in a message."""
    such = f", such as {summary.first_skipped}" if summary.first_skipped else ""
    skipped = f" ({summary.num_skipped:,} skipped{such}: empty, not UTF-8, or with NUL)" if summary.num_skipped else ""
    targets = "" if summary.train_targets is None else f" ({summary.train_targets:,} of answers)"
    return (
        f"{count(summary.num_documents, 'document')}{skipped}, {format_bytes(summary.num_bytes)}, "
        f"{summary.train_tokens:,} training{targets} and {summary.validation_tokens:,} validation tokens"
    )
