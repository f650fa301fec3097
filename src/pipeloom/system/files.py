"""Files of the user: read up to a limit, whatever they are, and written; every fault is one sentence."""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, MutableSequence
from itertools import islice
from pathlib import Path
from typing import Any

from pipeloom.errors import UserError, reason_of
from pipeloom.terminal.words import did_you_mean

MEGA = 1_000_000
MOST_BYTES = 16 * MEGA
"""Most bytes of a file of settings."""
MOST_SCHEDULE_BYTES = 64 * MEGA
"""Most bytes of a file of actions, which is some ten million of them."""
MOST_RECORD_BYTES = 1000 * MEGA
"""Most bytes of what a run has recorded: a trace, its metrics."""
PICTURES = ("png", "svg", "pdf")
"""Endings of files that pictures are drawn to."""
_MOST_NAMES = 1000
"""Files of a folder in which close names are searched; a folder of a million files takes too long."""
_MOST_LEVELS = 64
"""Levels of nesting; deeper ones exhaust the interpreter's stack."""


def read_text(file: Path, what: str = "", most_bytes: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    A pipe without a writer is empty, and a device without an end is too large.

    Args:
        file: what to read.
        what: precedes the file in messages, such as ``the schedule``.
        most_bytes: that it may have.

    Raises:
        UserError: it cannot be read, is too large, or is no UTF-8.
    """
    name = f"{what} {file}".strip()
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # or opening a pipe waits for a writer
        with os.fdopen(descriptor, "rb") as opened:
            # Blocking again: a pipe with a writer is read to its end.
            os.set_blocking(descriptor, True)
            # One more than allowed shows that there is more, without the size: a pipe or a device has none.
            found = opened.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a ValueError such as a zero byte in the name
        hint = close_file(file) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"cannot read {name}: {reason_of(error)}{f'; {hint}' if hint else ''}") from error
    if len(found) > most_bytes:
        raise UserError(f"cannot read {name}: expected at most {most_bytes:,} bytes, found more")
    try:
        # Editors on Windows begin UTF-8 with a byte order mark, which is no part of the text.
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read {name}: expected text in UTF-8, found {found[error.start]:#04x} at byte {error.start}"
        ) from error


def close_file(file: Path) -> str:
    """A question with the names of files of the same folder that are close to a name; empty if none is."""
    try:
        names = [one.name for one in islice(file.parent.iterdir(), _MOST_NAMES + 1)]
    except (OSError, ValueError):
        return ""
    folder = f"{file.parent}{os.sep}" if file.parent != Path() else ""
    return did_you_mean(file.name, names, folder) if len(names) <= _MOST_NAMES else ""


def picture_problem(path: Path) -> str | None:
    """Why no picture can be drawn to a file, by its ending; ``None`` for one of ``PICTURES``."""
    if path.suffix.lower().lstrip(".") in PICTURES:
        return None
    return f"cannot draw to {path}: expected a file ending in one of {', '.join(f'.{name}' for name in PICTURES)}"


def write_problem(path: Path, *, is_folder: bool) -> str | None:
    """Why a file, or files of a folder, could not be written; ``None`` if they can be. Writes nothing.

    Args:
        path: of the file or the folder.
        is_folder: whether it is a folder, which is made if it is missing, with those that contain it.
    """
    try:
        if path.is_dir() != is_folder and path.exists():
            return (
                f"expected a {'folder' if is_folder else 'file'}, found the {'file' if is_folder else 'folder'} {path}"
            )
        place = path if path.exists() else path.parent
        while is_folder and not place.exists():
            place = place.parent
        if not place.exists():
            return f"cannot write {path}: there is no folder {place}"
        if place != path and not place.is_dir():
            return f"cannot write {path}: {place} is not a folder"
    except (OSError, ValueError) as error:  # such as a name that is too long
        return f"cannot write {path}: {reason_of(error)}"
    return None if os.access(place, os.W_OK) else f"cannot write {path}: no permission"


def write_text(file: Path, text: str, what: str = "", advice: str = "", *, parents: bool = False) -> None:
    """Write a file for the user.

    Args:
        file: where to.
        text: of the file.
        what: precedes the file in messages, such as ``the trace``.
        advice: follows the reason.
        parents: whether folders that are missing are made.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if parents:
            file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        name = f"{what} {file}".strip()
        raise UserError(f"cannot write {name}: {reason_of(error)}{f'; {advice}' if advice else ''}") from error


def parse_toml(text: str, source: object) -> dict[str, Any]:
    """The table that a TOML text holds.

    Raises:
        UserError: it is not TOML, or nested too deeply.
    """
    try:
        return _shallow(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # a ValueError such as a number of too many digits
        raise UserError(f"{source} is not TOML: {_reason(error)}") from error


def parse_json(text: str) -> Any:
    """The value that a JSON text holds; it may contain NaN and infinities, which Python writes and JSON has not.

    Raises:
        UserError: it is not JSON, or nested too deeply.
    """
    try:
        return _shallow(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not JSON: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"it is nested deeper than {_MOST_LEVELS} levels" if isinstance(error, RecursionError) else str(error)


def _shallow(tree: Any) -> Any:
    """The tree itself; what goes over it later may follow its levels."""
    level = [tree]
    for _ in range(_MOST_LEVELS + 1):
        level = [item for node in level for item in _inside(node)]
        if not level:
            return tree
    # As the parsers raise it for deep nesting, so that callers have one case. Code that follows the tree is recursive.
    raise RecursionError


def _inside(node: Any) -> Iterable[Any]:
    """What a table or a list contains."""
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, MutableSequence) else ()
