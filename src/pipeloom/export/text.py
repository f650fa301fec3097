"""How written files look: their comments, their flags, the bodies that lie beside this module."""

import shlex
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import NamedTuple

from pipeloom.config import RunConfig, usual_values
from pipeloom.export.job import Draft

MARK = "Written by pipeloom"
"""Begins the comment of every file, so that a later call finds what it may replace."""
_WIDTH = 116


class Flag(NamedTuple):
    """A flag with its values; none for a switch."""

    name: str
    values: tuple[str, ...] = ()


def flag(name: str, *values: object) -> Flag:
    """A flag with its values as text."""
    return Flag(name, tuple(_number(value) if isinstance(value, float) else str(value) for value in values))


def _number(value: float) -> str:
    """The short form if it is exact; a rounded learning rate would be another training."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def bash_array(name: str, flags: Sequence[Flag]) -> str:
    """A bash array with a flag a line, quoted."""
    # Quoted: a path may contain spaces, and a value must never become a command.
    lines = [" ".join([item.name, *map(shlex.quote, item.values)]) for item in flags]
    return "\n".join([f"{name}=(", *(f"  {line}" for line in lines), ")"])


def needs_array(notes: Draft) -> str:
    """What a script does not start without, as the bash array that ``start.sh`` checks: name, flag, what it is."""
    entries = [f"  {shlex.quote(f'{need.name} {need.flag} {need.what}')}" for need in notes.needs]
    return "\n".join(["needs=(", *entries, ")"])


def comment(program: str, notes: Draft, about: Sequence[str] = (), config: RunConfig | None = None) -> str:
    """What a file is for, how it is started, what has to be set and what it lacks; lines that begin with ``#``.

    Args:
        program: that it is for.
        notes: what to print.
        about: more sentences.
        config: the run, where its recipe is in the file.
    """
    usual = None if config is None else usual_values(config)
    paragraphs = [
        f"{MARK} {version('pipeloom')} for {program}; it has not been run.",
        f"Start: {notes.start}",
        *about,
        *([] if usual is None else [usual]),
    ]
    if notes.needs:
        sentence = "SET: variables of the environment, without which nothing starts:"
        paragraphs += [sentence, *(f"- {need.name}: {need.what}" for need in notes.needs)]
    for head, sentences in (("Differs from what pipeloom does:", notes.differs), ("Left out:", notes.left_out)):
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
        # Commands, paths and flags have to stay on one line to be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )


def body(name: str) -> str:
    """The part of a file that is the same for every run."""
    return (files("pipeloom.export") / "bodies" / name).read_text(encoding="utf-8")
