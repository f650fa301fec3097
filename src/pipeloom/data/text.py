"""The training data: text, tokenized once, or tokens; read in windows in a reproducible order.

``pipeloom.data.prepared`` finds the tokens or makes them. The tokenizer is also stored in the run folder and in each
checkpoint, from which a resumed run takes it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.config import DataConfig
from pipeloom.data.checksums import CheckedFile
from pipeloom.data.entry import checked_tokens, document_ends, open_entry, open_targets
from pipeloom.data.listing import Listing
from pipeloom.data.packing import PackedWindows, pack, with_targets
from pipeloom.data.prepared import (
    Check,
    check_split,
    check_whole,
    entry_of,
    given_tokenizer,
    in_several,
    refuse_cache,
    shared_tokenizer,
    sizes_of,
    where,
    without,
)
from pipeloom.data.summary import Summary, stored_files
from pipeloom.data.tokenizer import TokenArray, Tokenizer, require_library, tokenizer_from
from pipeloom.data.windows import Mixture, TokenWindows, Windows
from pipeloom.errors import UserError
from pipeloom.terminal.words import count

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
        shares: frequency of each token in training, smoothed, [vocab_size].
        unigram_loss: cross-entropy of the validation tokens under ``shares``, nats per token. A baseline: a model that
            has learned anything has a lower loss.
        corpus_sha256: fingerprint of the text.
        description: for the start message; a line for all, and one for each of several sources.
    """

    tokenizer: Tokenizer
    train: Windows
    validation: Windows
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
    refuse_cache(config)
    tokenizer, parts = _open(config, stored, check_split)
    return _data(config, seed, tokenizer, parts)


class Whole(NamedTuple):
    """A text that is not divided.

    Attributes:
        tokenizer: of the tokens.
        windows: of all tokens, in the order in which they are stored: those held out for validation last. The first
            token of each window is the last one of the window before. What is left of the last window is filled with
            tokens that are no target.
        description: as that of ``Data``.
    """

    tokenizer: Tokenizer
    windows: Windows
    description: str


def load_whole(config: DataConfig, stored: Mapping[str, str] | None = None) -> Whole:
    """Open all tokens of a text, for evaluation; otherwise as ``load_data``."""
    tokenizer, parts = _open(config, stored, check_whole)
    found = [_windows(part, 0, len(part.tokens), None, tokenizer.end_of_text, is_cut=False) for part in parts]
    windows = _mixed(config, parts, found, [one.num_windows for one in found])
    return Whole(tokenizer, windows, _describe(config, parts, found))


def _open(config: DataConfig, stored: Mapping[str, str] | None, check: Check) -> tuple[Tokenizer, list["_Part"]]:
    # Before the text is read, which may take minutes.
    if config.tokenizer_kind != "bytes":
        require_library(config.tokenizer_kind)
    given = given_tokenizer(config, stored)
    if given is None and config.tokenizer == "bpe" and config.sources is not None:
        given = shared_tokenizer(config)
    found = [entry_of(part, given, check) for _, part in config.parts]
    tokenizer = given or tokenizer_from(stored_files(found[0].folder))
    opened = [
        _Part(
            weight,
            part,
            summary,
            *open_entry(folder, summary),
            document_ends(folder, summary),
            open_targets(folder, summary),
            listing,
            checked_tokens(folder, summary),
        )
        for (weight, part), (folder, summary, listing) in zip(config.parts, found, strict=True)
    ]
    for part in opened:
        check(part.summary, part.config)
        if part.targets is not None and config.pack == "stream":
            raise UserError(
                f"data.pack stream would cut answers from what they answer, found some in {where(part.config)}; leave "
                "it out"
            )
    return tokenizer, opened


@dataclass(frozen=True)
class _Part:
    """An opened entry: a source with its weight; counts of each token in training and in validation; where documents
    end; the files that they are from; the tokens with their checksums.
    """

    weight: float
    config: DataConfig
    summary: Summary
    tokens: TokenArray
    counts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_] | None
    listing: Listing
    checked: CheckedFile | None

    @property
    def is_packed(self) -> bool:
        """Whether documents stay whole."""
        return self.config.pack == "best-fit" or (self.config.pack is None and self.targets is not None)


def _windows(part: _Part, begin: int, end: int, seed: int | None, filler: int, *, is_cut: bool = True) -> TokenWindows:
    """The windows of some tokens of an entry; of a stream, its end is cut off or fills the last one in part.

    Windows of which nothing is cut off overlap, so that the first token of each is a target in the one before.
    """
    tokens, seq_len, by_document = part.tokens[begin:end], part.config.seq_len, part.config.by_document
    # A loss of all tokens has each as a target. Windows of training stay as they are: checkpoints count them.
    overlap, fills = (0, None) if is_cut else (1, filler)
    check = None if part.checked is None else partial(part.checked.check, begin)
    if not part.is_packed and not by_document:
        return TokenWindows(tokens, seq_len, seed, filler=fills, overlap=overlap, check=check)
    ends = part.ends[(part.ends > begin) & (part.ends < end)] - begin
    if not part.is_packed:
        return TokenWindows(tokens, seq_len, seed, begins=ends, filler=fills, overlap=overlap, check=check)
    found, counts = pack(np.append(ends, end - begin), seq_len + 1, overlap), None
    if part.targets is not None:
        counts = part.targets[begin:end]
        found = with_targets(found, counts, by_document=by_document)
        if not found.num_windows:
            raise UserError(
                f"{where(part.config)} must have answers that training and validation can learn, found none within "
                f"windows of data.seq_len {seq_len}; give more records or raise data.seq_len"
            )
    own = {"packed": found, "filler": filler, "counts": counts, "by_document": by_document, "check": check}
    return PackedWindows(tokens, seq_len, seed, **own)


def _data(config: DataConfig, seed: int, tokenizer: Tokenizer, parts: Sequence[_Part]) -> Data:
    filler = tokenizer.end_of_text
    train = [_windows(part, 0, part.summary.train_tokens, seed, filler) for part in parts]
    sides = ((part.summary.train_tokens, len(part.tokens)) for part in parts)
    validation = [_windows(part, *side, _VALIDATION_SEED, filler) for part, side in zip(parts, sides, strict=True)]
    total = sum(part.weight for part in parts)
    shares = sum((part.weight / total * token_shares(part.counts[0]) for part in parts), np.zeros(1))
    texts = [part.summary.corpus_sha256 for part in parts]
    return Data(
        tokenizer=tokenizer,
        train=_mixed(config, parts, train, [part.weight for part in parts]),
        validation=_mixed(config, parts, validation, [one.num_windows for one in validation]),
        shares=shares,
        unigram_loss=unigram_loss(shares, sum((part.counts[1] for part in parts), np.zeros(1, np.int64))),
        corpus_sha256=texts[0] if config.sources is None else hashlib.sha256("".join(texts).encode()).hexdigest(),
        description=_describe(config, parts, train),
    )


def _mixed(config: DataConfig, parts: Sequence[_Part], found: list[TokenWindows], weights: Sequence[float]) -> Windows:
    names = [(part.summary.corpus_sha256, str(part.config.path)) for part in parts]
    return found[0] if config.sources is None else Mixture(found, weights, names)


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
        lines = [f"{where(config)}: {sizes_of(parts[0].summary)} {of}"]
    else:
        total = sum(part.weight for part in parts)
        lines = [f"{count(len(parts), 'source')} {of}"]
        lines += [f"{part.weight / total:5.1%}  {where(part.config)}: {sizes_of(part.summary)}" for part in parts]
        twice = in_several([(part.config, part.listing.sources) for part in parts])
        lines += [twice] if twice else []
    left_out = [one for part in parts for one in part.listing.left_out]
    lines += [without(left_out)] if left_out else []
    return "\n           ".join(lines)
