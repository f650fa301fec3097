"""Reading and writing of users' files: limited in size, and every failure is a ``UserError`` of one sentence."""

import errno
import hashlib
import json
import math
import os
import secrets
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pipeloom.errors import UserError, reason_of
from pipeloom.terminal.words import did_you_mean

MEGA = 1_000_000
MOST_BYTES = 16 * MEGA
"""Largest file of settings, in bytes."""
MOST_SCHEDULE_BYTES = 64 * MEGA
"""Largest schedule file, in bytes: about ten million actions."""
MOST_RECORD_BYTES = 1000 * MEGA
"""Largest file that a run records, such as a trace or its metrics, in bytes."""
PICTURES = ("png", "svg", "pdf")
"""Endings of picture files."""
_MOST_NAMES = 1000
"""Largest folder in which similar names are searched, in files: a million files would take too long."""
_MOST_LEVELS = 64
"""Levels of nesting; deeper ones exhaust the interpreter's stack."""


def exists(path: Path) -> bool:
    """Whether there is something at a path; there is nothing at a name that is too long, for which ``Path`` raises."""
    return os.path.exists(path)  # noqa: PTH110


def read_text(file: Path, what: str = "", most_bytes: int = MOST_BYTES) -> str:
    """Read a UTF-8 file; a byte order mark is removed.

    Any file ends: a pipe without a writer is empty, and an endless device such as /dev/zero is too large.

    Args:
        file: its path.
        what: precedes the path in messages, such as ``the schedule``.
        most_bytes: limit of its size.

    Raises:
        UserError: it cannot be read, is too large, or is not UTF-8.
    """
    name = f"{what} {file}".strip()
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as opened:
            # Blocking again: a pipe with a writer is read to its end.
            os.set_blocking(descriptor, True)
            # One byte more than allowed shows that the file is too large; pipes and devices have no size.
            found = opened.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a ValueError such as a zero byte in the name
        hint = _similar_files(file) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"cannot read {name}: {reason_of(error)}{f'; {hint}' if hint else ''}") from error
    if len(found) > most_bytes:
        raise UserError(f"cannot read {name}: expected at most {most_bytes:,} bytes, found more")
    try:
        # Editors on Windows begin UTF-8 with a byte order mark, which is not part of the text.
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read {name}: expected text in UTF-8, found {found[error.start]:#04x} at byte {error.start}"
        ) from error


def _similar_files(file: Path) -> str:
    """``did you mean ...?`` with similar file names of the same folder; empty if there are none."""
    try:
        names = [one.name for one in islice(file.parent.iterdir(), _MOST_NAMES + 1)]
    except (OSError, ValueError):
        return ""
    folder = f"{file.parent}{os.sep}" if file.parent != Path() else ""
    return did_you_mean(file.name, names, folder) if len(names) <= _MOST_NAMES else ""


def picture_problem(path: Path) -> str | None:
    """The message about a picture file whose ending is not one of ``PICTURES``; ``None`` if it is."""
    if path.suffix.lower().lstrip(".") in PICTURES:
        return None
    return f"cannot draw to {path}: expected a file ending in one of {', '.join(f'.{name}' for name in PICTURES)}"


def write_problem(path: Path, *, is_folder: bool) -> str | None:
    """The message about a file, or a folder for files, that cannot be written; ``None`` if it can.

    A temporary file is made and removed beside it, since permissions are not enough: root has them in /proc as well.

    Args:
        path: of the file or the folder.
        is_folder: whether it is a folder. Missing folders are no problem then, since they will be made.
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
        if not os.access(place, os.W_OK):
            return f"cannot write {path}: no permission"
        if place.is_dir():
            with TemporaryFile(dir=place):
                pass
    except (OSError, ValueError) as error:  # such as a name that is too long
        return f"cannot write {path}: {reason_of(error)}"
    return None


@contextmanager
def replaced(*files: Path) -> Iterator[list[Path]]:
    """Drafts of files, which take their places together when the block ends.

    If the block or a place fails, no draft is left; the files are as before the block, on a full disk too. What is no
    regular file, such as a pipe, and a file in a folder where nothing can be made have no draft: they are written
    themselves.

    Args:
        files: their paths; a link leads to the file that is replaced.

    Raises:
        OSError: a draft cannot take its place.
    """
    places = [Path(os.path.realpath(file)) for file in files]
    drafts = [_draft_of(place) for place in places]
    try:
        yield drafts
        for draft, place in zip(drafts, places, strict=True):
            if draft != place:
                if place.exists():
                    draft.chmod(stat.S_IMODE(place.stat().st_mode))
                draft.replace(place)
    finally:
        for draft, place in zip(drafts, places, strict=True):
            if draft != place:
                draft.unlink(missing_ok=True)


def _draft_of(place: Path) -> Path:
    """A name in the same folder, with the same ending; ``place`` itself where there cannot be one."""
    if exists(place) and not (place.is_file() and os.access(place.parent, os.W_OK)):
        return place
    if exists(place) and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # which a rename would ignore
    return place.with_name(f".{secrets.token_hex(8)}.part{place.suffix}")


def write_text(file: Path, text: str, what: str = "", advice: str = "", *, parents: bool = False) -> None:
    """Write a file in UTF-8; if it cannot be written, an earlier one stays as it is.

    Args:
        file: its path.
        text: its content.
        what: precedes the path in messages, such as ``the trace``.
        advice: ends the message, such as what to do instead.
        parents: whether missing folders are made.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if parents:
            file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as (draft,):
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        name = f"{what} {file}".strip()
        raise UserError(f"cannot write {name}: {reason_of(error)}{f'; {advice}' if advice else ''}") from error


def missing_folders(path: Path) -> list[Path]:
    """A path and the folders above it that do not exist, innermost first: those that would be made for it."""
    return [one for one in (path, *path.parents) if not one.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that were made, innermost first, those that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def sealed(tree: dict[str, Any]) -> str:
    """A tree as JSON that contains its own hash. The text is unique, so that every changed byte is detected."""
    digest = hashlib.sha256(json.dumps(tree, indent=2).encode()).hexdigest()
    return json.dumps({**tree, "sha256": digest}, indent=2) + "\n"


def parse_toml(text: str, source: object) -> dict[str, Any]:
    """Parse TOML; ``source`` begins the message of an error.

    Raises:
        UserError: the text is not TOML, or is nested too deeply.
    """
    try:
        return _shallow(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # a ValueError such as a number of too many digits
        raise UserError(f"{source} is not TOML: {_reason(error)}") from error


def strict_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON of a table in which a number that is not finite becomes ``null``.

    JSON has no other word for it, and strict readers refuse ``NaN`` and ``Infinity``.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps(finite, indent=indent, allow_nan=False)


def parse_json(text: str) -> Any:
    """Parse JSON, also with NaN and infinities, which are not JSON but which Python writes.

    Raises:
        UserError: the text is not JSON, or is nested too deeply.
    """
    try:
        return _shallow(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not JSON: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"it is nested deeper than {_MOST_LEVELS} levels" if isinstance(error, RecursionError) else str(error)


def _shallow(tree: Any) -> Any:
    """Return the tree; raise a ``RecursionError`` if it has more than ``_MOST_LEVELS`` levels."""
    level = [tree]
    for _ in range(_MOST_LEVELS + 1):
        level = [item for node in level for item in _inside(node)]
        if not level:
            return tree
    # The error of the parsers for deep nesting. Later code is recursive and would raise it where nobody catches it.
    raise RecursionError


def _inside(node: Any) -> Iterable[Any]:
    """Values of a table or a list; nothing for other values."""
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, MutableSequence) else ()
