"""Paths among the settings: which settings are paths is read off their types, and nothing else lists them."""

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pipeloom.workload.limits import Names, notes_of

_Config = TypeVar("_Config")


def names_file(name: str) -> bool:
    """Whether a name means a file, not an entry of the catalog: it has a folder in it, or ends in ``.toml``."""
    return os.sep in name or name.endswith(".toml")


def with_absolute_paths(config: _Config, folder: Path = Path()) -> _Config:
    """The same settings with every path absolute: relative ones begin at a folder, ``~`` at the user's home."""
    return _change(config, lambda path: _absolute(folder / expand_home(path)))


def with_home(config: _Config) -> _Config:
    """The same settings with every path's ``~`` expanded."""
    return _change(config, expand_home)


def expand_home(path: Path) -> Path:
    """The path with ``~`` expanded; as it is where there is no such user."""
    try:
        return path.expanduser()
    # expanduser raises it for a name without a home folder; then `~name` may be a file's own name.
    except RuntimeError:
        return path


def _absolute(path: Path) -> Path:
    """From the root on; without ``..``, unless a link to a folder gives it another meaning."""
    whole = path.absolute()
    # `a/link/..` is the folder that contains the link's target, which a plain removal of `..` would miss.
    short = Path(os.path.normpath(whole))
    return short if short.resolve() == whole.resolve() else whole


def _change(config: Any, change: Callable[[Path], Path]) -> Any:
    hints = get_type_hints(type(config), include_extras=True)
    changed: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            changed[item.name] = _change(value, change)
        elif isinstance(value, Path) and value != Path():  # which represents an empty text
            changed[item.name] = change(value)
        elif any(isinstance(note, Names) and note.or_file for note in notes_of(hints[item.name])) and names_file(value):
            changed[item.name] = str(change(Path(value)))
    return replace(config, **changed)
