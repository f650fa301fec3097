"""Flags of a command line -> the dataclass of a command, with everything that is wrong with them at once."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from io import StringIO
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipeloom.errors import ConfigError
from pipeloom.terminal.words import did_you_mean

_Options = TypeVar("_Options")
_KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", int),
    float: ("a number", float),
    NoneType: ("None", {"None": None}.__getitem__),
    bool: ("True or False", {"True": True, "False": False}.__getitem__),
}
"""Type of a value -> how it is called, and what reads it; any text is of another type."""


def parse_flags(
    options_class: type[_Options],
    words: list[str],
    command: str,
    description: str,
    *,
    default: _Options | None = None,
    beside: Callable[[], list[str]] = list,
    source: str = "the command line",
) -> _Options:
    """Read the words of a command.

    Args:
        options_class: every flag is one of its fields, or ``--section.field`` of a field that is a dataclass.
        words: behind the command.
        command: its name, as the help shows it.
        description: for the help.
        default: without flags; ``None`` for the defaults of the class.
        beside: what else is wrong, which is reported with the flags.
        source: what has these problems, for the headline.

    Raises:
        ConfigError: each flag that is unknown, with those that are close, and each value that is wrong.
        SystemExit: with what the parser prints where it alone finds something wrong; or for --help.
    """
    import tyro  # takes a quarter of a second, which a run without flags need not wait for

    printed = StringIO()
    start = tyro.MISSING_NONPROP if default is None else default
    try:
        # The parser stops at its first problem and prints it itself; it is shown only where nothing better is found.
        with redirect_stderr(printed):
            return tyro.cli(
                options_class, args=words, prog=f"pipeloom {command}", description=description, default=start
            )
    except SystemExit as end:
        found = flag_problems(options_class, words) if end.code else []
        # A code of 0 is --help.
        if end.code and (problems := [*found, *beside()]):
            if not found:
                print(printed.getvalue(), end="", file=sys.stderr)
                source = f"beside the flags above, {source}"
            raise ConfigError(problems, source) from None
        print(printed.getvalue(), end="", file=sys.stderr)
        raise


def flag_problems(options_class: type, words: list[str]) -> list[str]:
    """A sentence for each flag that is unknown and for each that has a wrong value, or none."""
    known = dict(_flags(options_class))
    problems: list[str] = []
    for flag, values in _groups(words):
        hint = known.get(flag.replace("_", "-"))
        if hint is None:
            close = did_you_mean(flag.removeprefix("--"), [name.removeprefix("--") for name in known], "--")
            problems.append(f"there is no flag {flag}{f'; {close}' if close else ''}")
        elif hint == () and values:
            problems.append(f"{flag} takes no value, found {_shown(values)}; write {' or '.join(_pair(flag))} alone")
        elif not _fits(hint, values):
            shown = f"found {_shown(values)}" if values else "found nothing"
            choices = [str(one) for one in _literals(hint)]
            close = did_you_mean(values[0], choices) if len(values) == 1 else ""
            problems.append(f"{flag} must be {_called(hint)}, {shown}{f'; {close}' if close else ''}")
    return problems


def _flags(options_class: type, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """Each flag and the type of its value; ``None`` is none, but ``()`` that of a flag that takes no value."""
    hints = get_type_hints(options_class)
    for item in fields(cast("Any", options_class)):
        name, hint = item.name.replace("_", "-"), hints[item.name]
        if is_dataclass(hint):
            yield from _flags(cast("type", hint), f"{prefix}{name}.")
        elif hint is bool:
            yield f"{prefix}{name}", ()
            yield f"{prefix}no-{name}", ()
        else:
            yield f"{prefix}{name}", hint


def _groups(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words behind it; those before the first one have places, not flags."""
    # A letter behind the dash: -1 is a value.
    starts = [place for place, word in enumerate(words) if re.match(r"--?[A-Za-z]", word)]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=False):
        flag, is_joined, value = words[start].partition("=")
        yield flag, [*([value] if is_joined else []), *words[start + 1 : end]]


def _pair(flag: str) -> tuple[str, str]:
    """A flag that takes no value as it is written for true and for false."""
    section, dot, name = flag.removeprefix("--").rpartition(".")
    name = name.removeprefix("no-")
    return f"--{section}{dot}{name}", f"--{section}{dot}no-{name}"


def _fits(hint: Any, values: list[str]) -> bool:
    if hint == ():
        return not values
    origin, inner = get_origin(hint), get_args(hint)
    # `int | None` and `Optional[int]` have different origins.
    if origin in (Union, UnionType):
        return any(_fits(one, values) for one in inner)
    if origin is tuple:
        wanted = [inner[0]] * len(values) if inner[-1] is ... else list(inner)
        return len(wanted) == len(values) and all(_fits(one, [v]) for one, v in zip(wanted, values, strict=True))
    if len(values) != 1:
        return False
    if origin is Literal:
        return values[0] in map(str, inner)
    try:
        _KINDS.get(hint, ("", str))[1](values[0])
    except (ValueError, KeyError):
        return False
    return True


def _called(hint: Any) -> str:
    """What a value must be, for people."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_called(one) for one in inner)
    if origin is tuple:
        many = "any number of values" if inner[-1] is ... else f"{len(inner)} values"
        return f"{many}, each {_called(inner[0])}"
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else str(inner[0])
    return _KINDS.get(hint, ("one word", str))[0]


def _literals(hint: Any) -> list[Any]:
    """Every text that a value may be by its type."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [one for inner in get_args(hint) for one in _literals(inner)]


def _shown(values: list[str]) -> str:
    text = " ".join(values)
    return f"'{text}'" if len(text) <= 100 else f"'{text[:100]}...'"
