"""Settings that are paths or lists of tables, recognized by their types."""

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pipeloom.workload.limits import Names, notes_of

_Config = TypeVar("_Config")


def names_file(name: str) -> bool:
    """Whether a name is a file's and not one of the catalog: it contains a folder, or ends in ``.toml``."""
    return os.sep in name or name.endswith(".toml")


def with_absolute_paths(config: _Config, folder: Path = Path()) -> _Config:
    """The settings with absolute paths: relative to ``folder``, ``~`` expanded."""
    return _change(config, lambda path: _absolute(folder / expand_home(path)))


def with_home(config: _Config) -> _Config:
    """The settings with ``~`` expanded in all paths."""
    return _change(config, expand_home)


def unwritable_paths(config: Any) -> list[Path]:
    """The absolute paths of the settings that no run file can contain: their names are not UTF-8."""
    found: list[Path] = []

    def note(path: Path) -> Path:
        try:
            str(path).encode()
        except UnicodeEncodeError:  # a byte of a name that is not UTF-8 is half of a surrogate pair
            found.append(path)
        return path

    _change(with_absolute_paths(config), note)
    return found


def expand_home(path: Path) -> Path:
    """The path with ``~`` expanded; unchanged if there is no such user."""
    try:
        return path.expanduser()
    # Raised if the user has no home folder; `~name` may then be the name of a file.
    except RuntimeError:
        return path


def table_of(hint: Any) -> type | None:
    """The dataclass of a setting that is a list of tables; ``None`` for other settings."""
    tuples = [one for one in (hint, *get_args(hint)) if get_origin(one) is tuple]
    return next((one for inner in tuples for one in get_args(inner) if is_dataclass(one)), None)


def _absolute(path: Path) -> Path:
    """The absolute path; without ``..`` unless removing it changes the meaning."""
    whole = path.absolute()
    # If `link` is a symbolic link, `a/link/..` is not `a` but the folder that contains the link's target.
    short = Path(os.path.normpath(whole))
    return short if short.resolve() == whole.resolve() else whole


def _change(config: Any, change: Callable[[Path], Path]) -> Any:
    hints = get_type_hints(type(config), include_extras=True)
    changed: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            changed[item.name] = _change(value, change)
        elif isinstance(value, tuple) and any(is_dataclass(one) for one in value):
            changed[item.name] = tuple(_change(one, change) for one in value)
        elif isinstance(value, Path):
            changed[item.name] = change(value)
        elif any(isinstance(note, Names) and note.or_file for note in notes_of(hints[item.name])) and names_file(value):
            changed[item.name] = str(change(Path(value)))
    return replace(config, **changed)
