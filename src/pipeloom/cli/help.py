"""The help of a command: what it does, examples, and its options, the common ones or all."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from typing import Any

from pipeloom.cli.reference import Command, Option, options_of, section_text

_WIDEST, _NARROWEST = 110, 60
_INDENT = 2
_MOST_CHOICES = 60
"""Characters of names that follow an option; more of them are printed with all options alone."""
_FLAGS = 34
"""Columns of the flags; a longer one has its text in the next line."""


def help_page(command: Command[Any], *, is_whole: bool) -> str:
    """The help of a command.

    Args:
        command: the command.
        is_whole: whether all options follow with everything about them, or the common ones in a line each.
    """
    from pipeloom.cli import COMMANDS

    options = options_of(command)
    shown = [option for option in options if is_whole or option.is_common]
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((100, 40)).columns))
    summary = COMMANDS.get(command.name, "")
    lines = [f"pipeloom {command.name}: {summary}", ""]
    lines += [_usage(command, options), ""]
    if command.about:
        lines += [*_wrapped(command.about, width), ""]
    column = max(map(len, command.examples), default=0) + 2
    lines += [f"  {line:<{column}}{what}".rstrip() for line, what in command.examples.items()]
    lines += [""]
    group = None
    for option in shown:
        if option.group != group:
            group = option.group
            lines += [f"{group}: {section_text(group)}" if group else "options"]
        lines += _about(option, width, is_whole=is_whole)
    if is_whole:
        lines += ["", *_wrapped(_RULES, width)]
    else:
        lines += ["", f"[...] is a default. --help-all describes all {len(options)} options."]
    return "\n".join(lines)


_RULES = (
    "--flag=VALUE is the same as --flag VALUE. Lists take spaces or commas: --flag 1 2 4, --flag 1,2,4. A value that "
    "begins with a dash and is no number takes the form --flag=-VALUE. None sets a default that is described in words. "
    "Of a flag that is given twice the last one counts."
)


def _usage(command: Command[Any], options: Sequence[Option]) -> str:
    places = [option.place if option.default is MISSING else f"[{option.place}]" for option in options if option.place]
    flags = " [--section.setting VALUE ...]" if command.settings else ""
    own = " [OPTIONS]" if any(not option.group and not option.place for option in options) else ""
    return f"usage: pipeloom {' '.join([command.name, *places])}{own}{flags}"


def _about(option: Option, width: int, *, is_whole: bool) -> Iterator[str]:
    """The lines of an option."""
    lines = _wrapped(_described_whole(option) if is_whole else _described_briefly(option), width - _FLAGS)
    head = " " * _INDENT + (option.shown if is_whole else option.briefly)
    yield f"{head:<{_FLAGS}}{lines.pop(0)}" if len(head) < _FLAGS - 1 else head
    yield from (" " * _FLAGS + line for line in lines)


def _described_briefly(option: Option) -> str:
    text = option.first_sentence
    names = ", ".join(option.choices)
    if option.place or (option.value.startswith("NAME") and len(names) < _MOST_CHOICES):
        text += f": {names}" if names else ""
    default = option.shown_default.split(";")[0]
    return text if not default or option.is_switch else f"{text} [{default}]"


def _described_whole(option: Option) -> str:
    facts = [option.limits] if option.limits else []
    if option.choices and option.value.startswith("NAME"):
        facts.append(", ".join(option.choices))
    facts += [f"default: {option.shown_default}"] if option.shown_default else []
    return option.text + (f" [{'; '.join(facts)}]" if facts else "")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
