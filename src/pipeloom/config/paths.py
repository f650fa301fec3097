"""Paths among the settings: which settings are paths is read off their types, and nothing else lists them."""

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

_Config = TypeVar("_Config")

_IS_FILE_BY_FORM = object()
NameOrFile = Annotated[str, _IS_FILE_BY_FORM]
"""The type of a setting that is a name of the catalog, or a file; see ``names_file``."""


def names_file(name: str) -> bool:
    """Whether a name means a file, not an entry of the catalog: it has a folder in it, or ends in ``.toml``."""
    return os.sep in name or name.endswith(".toml")


def place_paths(tree: dict[str, Any], config_class: type, folder: Path) -> dict[str, Any]:
    """The settings of a file with every path absolute: relative ones begin at ``folder``, ``~`` at the user's home.

    Args:
        tree: nested dictionaries, as they are read.
        config_class: the dataclass with these settings; its types show which are paths.
        folder: the folder of the file.
    """
    hints = get_type_hints(config_class, include_extras=True)
    placed = dict(tree)
    for key, value in tree.items():
        hint = hints.get(key)
        if isinstance(value, dict) and is_dataclass(hint):
            placed[key] = place_paths(value, cast("type", hint), folder)
        elif isinstance(value, str) and value and _is_path(hint, value):
            placed[key] = str(_absolute(folder / expand_home(Path(value))))
    return placed


def with_absolute_paths(config: _Config) -> _Config:
    """The same settings, which mean the same files from any folder."""
    return _change(config, _absolute)


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
        elif isinstance(value, str) and _is_path(hints[item.name], value):
            changed[item.name] = str(change(Path(value)))
    return replace(config, **changed)


def _is_path(hint: Any, value: str) -> bool:
    """Whether a text is a path, by the type of its setting."""
    if _IS_FILE_BY_FORM in getattr(hint, "__metadata__", ()):
        return names_file(value)
    return hint is Path or Path in get_args(hint)
