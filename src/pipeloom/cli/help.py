"""The help of a command: what it does, examples, and its options, the common ones or all."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

from pipeloom.cli.reference import Command, Option, options_of, section_text

_WIDEST, _NARROWEST = 110, 60
_INDENT = 2
_MOST_CHOICES = 60
"""Characters of names that follow an option; more of them are printed with all options alone."""
_MOST_FLAGS = 34
"""Most columns of the flags; a longer one has its text in the next line."""


def help_page(command: Command[Any], *, is_whole: bool) -> str:
    """The help of a command.

    Args:
        command: the command.
        is_whole: whether all options follow with everything about them, or the common ones in a line each.
    """
    from pipeloom.cli import COMMANDS

    options = options_of(command)
    shown = [option for option in options if is_whole or (option.is_common and command.is_brief(option))]
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((100, 40)).columns))
    summary = COMMANDS.get(command.name, "")
    lines = [*_wrapped(f"pipeloom {command.name}: {summary}", width), "", usage(command), ""]
    if command.about:
        lines += [*_wrapped(command.about, width), ""]
    lines += [*_examples(command, width), ""]
    heads = [_head(option, is_whole=is_whole) for option in shown]
    flags = min(_MOST_FLAGS, max(map(len, heads), default=0) + 2)
    sizes, group = Counter(option.group for option in shown), None
    for option, head in zip(shown, heads, strict=True):
        if option.group != group:
            group = option.group
            # Flags begin with their section, so that a single one needs no line for it.
            if is_whole or not group or sizes[group] > 1:
                lines += _wrapped(f"{group}: {section_text(group)}" if group else "options", width)
        texts = _described(option, width - flags, is_whole=is_whole)
        lines.append(f"{head:<{flags}}{texts.pop(0)}" if len(head) < flags - 1 else head)
        lines += [" " * flags + text for text in texts]
    has_run = any(option.is_of_run for option in shown)
    defaults = "Defaults are in [...], or those of RUN." if has_run else "[...] is a default."
    rules = f"{defaults} --help-all describes all {len(options)} options."
    if is_whole:
        rules = f"{_OF_RUN}{_RULES}" if has_run else _RULES
    return "\n".join([*lines, "", *_wrapped(rules, width)])


_OF_RUN = "Settings without a default have the values of RUN, unless a flag sets them. "
_RULES = (
    "--flag=VALUE is the same as --flag VALUE. Lists take spaces or commas: --flag 1 2 4, --flag 1,2,4; a number has "
    "no commas: 1024. Write a value that begins with a dash and is not a number as --flag=-VALUE. None selects a "
    "default that is described in words. "
    "If a flag is given twice, the last one applies."
)


def _examples(command: Command[Any], width: int) -> Iterator[str]:
    """Each example with what it does: in one line each where all fit, otherwise below it; pasted, all are commands."""
    column = max(map(len, command.examples), default=0) + 4
    fit = all(column + len(what) <= width for what in command.examples.values())
    for line, what in command.examples.items():
        if fit:
            yield f"  {line:<{column - 2}}{what}".rstrip()
            continue
        room = width if len(line) + 2 <= width else width - 2  # for the backslash
        parts = textwrap.wrap(line, room, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
        yield " \\\n".join(parts)
        if what:
            yield f"      # {what}"


def usage(command: Command[Any]) -> str:
    """The usage of a command, in one line."""
    options = options_of(command)
    places = [option.place if option.default is MISSING else f"[{option.place}]" for option in options if option.place]
    flags = " [--section.setting VALUE ...]" if command.settings else ""
    own = " [OPTIONS]" if any(not option.group and not option.place for option in options) else ""
    return f"usage: pipeloom {' '.join([command.name, *places])}{own}{flags}"


def _head(option: Option, *, is_whole: bool) -> str:
    return " " * _INDENT + (option.shown if is_whole else option.briefly)


def _described(option: Option, room: int, *, is_whole: bool) -> list[str]:
    return _wrapped(_described_whole(option) if is_whole else _described_briefly(option, room), room)


def _described_briefly(option: Option, room: int) -> str:
    """The first sentence, with the choices where they are few, and the default; one in words only where it fits."""
    text = option.first_sentence
    names = ", ".join(option.choices)
    if option.place or (option.value.startswith("NAME") and len(names) < _MOST_CHOICES):
        text += f": {names}" if names else ""
    is_all = option.shown_default.split() == [*option.choices]
    if not option.shown_default or option.default is False or is_all:
        return text
    whole = f"{text} [{option.shown_default.split(';')[0]}]"
    return whole if len(whole) <= room or option.default not in (None, ()) else text


def _described_whole(option: Option) -> str:
    facts = [option.limits] if option.limits else []
    if option.choices and option.value.startswith("NAME"):
        facts.append(", ".join(option.choices))
    facts += [f"default: {option.shown_default}"] if option.shown_default else []
    return option.text + (f" [{'; '.join(facts)}]" if facts else "")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
