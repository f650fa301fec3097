"""The summary of a tokenized corpus: its numbers, and whether its files are whole."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG
from pipeloom.data.own_folders import COUNTS, SUMMARY, TARGETS, TOKENS, holds_tokens
from pipeloom.data.tokenizer import ByteTokenizer, sha256_of, token_dtype
from pipeloom.system.files import sealed


@dataclass(frozen=True)
class Summary:
    """Content of ``summary.json``.

    Attributes:
        num_documents: those that are text.
        num_skipped: those that are not.
        num_bytes: of the text.
        vocab_size: of the tokenizer.
        train_tokens: number of the first tokens, for training.
        validation_tokens: number of those behind them.
        corpus_sha256: fingerprint of the text.
        tokenizer_sha256: of the files of the tokenizer.
        file: of the tokens, if they are not in the entry.
        train_targets: of the training tokens; ``None`` if all of them are.
        first_skipped: name of the first document that is not text; empty for none, and in entries of older versions.
    """

    num_documents: int
    num_skipped: int
    num_bytes: int
    vocab_size: int
    train_tokens: int
    validation_tokens: int
    corpus_sha256: str
    tokenizer_sha256: str
    file: str = ""
    train_targets: int | None = None
    first_skipped: str = ""


def is_entry(folder: Path) -> bool:
    """Whether a folder is an entry, perhaps a damaged one, rather than a folder of text."""
    return holds_tokens([name for name in (SUMMARY, TOKENS, COUNTS) if (folder / name).is_file()])


def read_summary(folder: Path) -> Summary | None:
    """An entry's summary; ``None`` if the entry is missing or damaged."""
    try:
        text = (folder / SUMMARY).read_text(encoding="utf-8")
        tree = json.loads(text)
        # Entries of older versions have no hash.
        if tree.pop("sha256", None) is not None and text != sealed(tree):
            return None
        summary = Summary(**tree)
        sizes = (summary.vocab_size - 1, summary.train_tokens, summary.validation_tokens)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            return None
        num_counts = (folder / COUNTS).stat().st_size
        found = sha256_of(stored_files(folder))
        num_bytes = None if summary.file else (folder / TOKENS).stat().st_size
        num_targets = (folder / TARGETS).stat().st_size if summary.train_targets is not None else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    # A truncated file counts as damaged.
    width = np.dtype(token_dtype(summary.vocab_size)).itemsize
    num_tokens = summary.train_tokens + summary.validation_tokens
    is_whole = num_bytes in (None, width * num_tokens) and num_targets in (None, num_tokens)
    is_whole = is_whole and num_counts > 2 * 8 * summary.vocab_size
    return summary if is_whole and found == summary.tokenizer_sha256 else None


def write_summary(folder: Path, summary: Summary) -> None:
    """Write the summary of an entry, with its own hash.

    Raises:
        OSError: it cannot be written.
    """
    (folder / SUMMARY).write_text(sealed(asdict(summary)), encoding="utf-8")


def stored_files(folder: Path) -> dict[str, str]:
    """The files of an entry's tokenizer. That of bytes is always the same and may have none."""
    names = [name for name in (TOKENIZER, TOKENIZER_CONFIG) if (folder / name).exists()]
    found = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    return found or ByteTokenizer().files()
