"""Folders that this program wrote, which are no text, and the names of files by which they are recognized."""

from collections.abc import Collection
from pathlib import Path

from pipeloom.checkpoint.checkpoint_folder import FOLDER, INFO, METADATA, list_checkpoints
from pipeloom.runs.run_folder import ADAPTER_WEIGHTS, CONFIG, DRAFTS, METRICS, WEIGHTS, WEIGHTS_INDEX

TOKENS, TARGETS, COUNTS, SUMMARY = "tokens.bin", "targets.bin", "counts.npy", "summary.json"
"""Files of a tokenized text (``pipeloom.data.entry``)."""
PARTS, LOCK = ".parts", "lock"
"""End of the name, and a file, of the folder that a text is tokenized in."""


def holds_tokens(names: Collection[str]) -> bool:
    """Whether a folder with these names is a tokenized text, perhaps a damaged one."""
    return SUMMARY in names and (TOKENS in names or COUNTS in names)


def own_kind(folder: Path, names: Collection[str]) -> str | None:
    """What of this program a folder is, for a message; ``None`` for any other folder.

    Args:
        folder: its path.
        names: of everything in it.
    """
    # A configuration alone may be any program's.
    is_run = DRAFTS in names or (CONFIG in names and METRICS in names)
    if is_run or (FOLDER in names and list_checkpoints(folder)):  # runs that a conversion wrote have no metrics
        return "a run"
    if INFO in names and METADATA in names:
        return "a checkpoint"
    # Folders of other programs have the same names.
    if any(name in names for name in (WEIGHTS, WEIGHTS_INDEX, ADAPTER_WEIGHTS)):
        return "weights"
    is_unfinished = folder.name.endswith(PARTS) and LOCK in names
    return "tokens" if holds_tokens(names) or is_unfinished else None
