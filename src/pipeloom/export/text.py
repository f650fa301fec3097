"""Text of exported files: comments, flags, and fixed parts (``bodies``)."""

import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from math import isclose
from typing import NamedTuple

from pipeloom.config import RunConfig, usual_values
from pipeloom.export.job import Draft
from pipeloom.predict.recipes import recipe_notes
from pipeloom.terminal.words import quoted

MARK = "Written by pipeloom"
"""Beginning of the comment of every file, by which a later call recognizes files that it may replace."""
_WIDTH = 116
_DIGITS, _ROUNDING = 12, 1e-15
"""Most digits of a number that somebody chose, and the relative error of some operations in double precision."""


class Flag(NamedTuple):
    """A flag with its values; without values, a switch."""

    name: str
    values: tuple[str, ...] = ()


def flag(name: str, *values: object) -> Flag:
    """A flag with its values converted to text."""
    return Flag(name, tuple(_number(value) if isinstance(value, float) else str(value) for value in values))


def _number(value: float) -> str:
    """The shortest form of a number, without what a product of two numbers was rounded by; values are not rounded."""
    short = f"{value:.{_DIGITS}g}"
    return short if isclose(float(short), value, rel_tol=_ROUNDING) else repr(value)


def bash_array(name: str, flags: Sequence[Flag]) -> str:
    """A bash array with a flag on each line."""
    # Quoted, since values may contain spaces and must never be executed.
    lines = [" ".join([item.name, *map(quoted, item.values)]) for item in flags]
    return "\n".join([f"{name}=(", *(f"  {line}" for line in lines), ")"])


def needs_array(notes: Draft) -> str:
    """Required variables as the bash array that ``start.sh`` checks: name, flag, description."""
    entries = [f"  {quoted(f'{need.name} {need.flag} {need.what}')}" for need in notes.needs]
    return "\n".join(["needs=(", *entries, ")"])


def comment(program: str, notes: Draft, about: Sequence[str] = (), config: RunConfig | None = None) -> str:
    """The comment at the head of a file: program, start command, required variables, differences.

    Args:
        program: for which the file is.
        notes: about the file.
        about: further sentences.
        config: the run, if the file contains its hyperparameters.
    """
    usual, recipe = (None, ()) if config is None else (usual_values(config), recipe_notes(config))
    paragraphs = [
        f"{MARK} {version('pipeloom')} for {program}; it has not been run.",
        f"Start: {notes.start}",
        *about,
        *([] if usual is None else [usual]),
        *recipe,
    ]
    if notes.needs:
        sentence = "SET these environment variables; without them nothing starts:"
        paragraphs += [sentence, *(f"- {need.name}: {need.what}" for need in notes.needs)]
    for head, sentences in (("Differences from pipeloom:", notes.differs), ("Left out:", notes.left_out)):
        if sentences:
            paragraphs += [head, *(f"- {sentence}" for sentence in sentences)]
    return "\n".join(line for paragraph in paragraphs for line in _wrapped(paragraph))


def _wrapped(paragraph: str) -> list[str]:
    indent = "#   " if paragraph.startswith("- ") else "# "
    return textwrap.wrap(
        paragraph,
        _WIDTH,
        initial_indent="# ",
        subsequent_indent=indent,
        # Commands, paths and flags stay on one line, so that they can be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )


def body(name: str) -> str:
    """The fixed part of a file."""
    return (files("pipeloom.export") / "bodies" / name).read_text(encoding="utf-8")
