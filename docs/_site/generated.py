"""Parts of pages that are generated: options of the run file and of every command, and the Python API.

A line ``<!-- generated: NAME -->`` of a page is replaced by what the function of that name returns, as Markdown. The
definitions are those of the command line, so that a page cannot differ from it. Sphinx is not needed here: the tests
call the same functions.
"""

import inspect
import re
import textwrap
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from architecture import picture

from pipeloom.cli import COMMANDS
from pipeloom.cli.reference import Option, command_of, options_of, section_text, settings_of_runs
from pipeloom.config import RunConfig

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_SIBLINGS = """

```{toctree}
:glob:
:titlesonly:

*
```
"""
"""Behind the README of a folder, which is its first page: a list of the other pages, which the navigation needs."""


def fill_in(app: Any, docname: str, source: list[str]) -> None:
    """Sphinx's event ``source-read``: replace the markers of a page."""
    folder, _, name = docname.rpartition("/")
    source[0] = filled(source[0]) + (_SIBLINGS if folder and name == "README" else "")


def filled(text: str) -> str:
    """The text of a page with its generated parts."""
    return MARKER.sub(lambda found: GENERATED[found[1]](), text)


@cache
def run_file() -> str:
    """Every section and key of the run file."""
    parts = []
    for section in fields(RunConfig):
        text = section_text(section.name)
        parts.append(f"## {section.name}\n\n{text[:1].upper()}{text[1:]}.\n")
        parts += [_entry(one, one.name) for one in settings_of_runs() if one.group == section.name]
    return "\n".join(parts)


@cache
def commands() -> str:
    """Every command: its usage, and the options that are not settings of the run file."""
    parts = []
    for name, summary in COMMANDS.items():
        command = command_of(name)
        parts.append(f"## {name}\n\n{summary[0].upper()}{summary[1:]}.\n")
        about = " ".join(inspect.cleandoc(command.options.__doc__ or "").partition("\n\n")[2].split())
        parts.append(f"{about}\n" if about else "")
        examples = "\n".join(command.examples)
        parts.append(f"```text\n{examples}\n```\n")
        if command.settings:
            parts.append(
                f"`pipeloom {name} [CONFIG] [--section.setting VALUE ...]` takes a run file, and as flags "
                f"[the settings of it](run-file.md) that the command reads. Its other options:\n"
            )
        parts += [
            _entry(one, one.place or one.flags[0], anchor=f"{name}-{one.name}")
            for one in options_of(command)
            if not one.group
        ]
    return "\n".join(parts)


@cache
def api() -> str:
    """Every public name of the package, by what it is."""
    import pipeloom

    names = getattr(pipeloom, "__all__", [])
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Modules and values": []}
    for name in names:
        value = getattr(pipeloom, name)
        kind = "Classes" if inspect.isclass(value) else "Functions" if callable(value) else "Modules and values"
        groups[kind].append(name)
    parts = []
    for title, members in groups.items():
        if members:
            parts.append(f"## {title}\n")
        parts += [
            f"### {name}\n\n```{{eval-rst}}\n{_directive(name, getattr(pipeloom, name))}\n```\n" for name in members
        ]
    return "\n".join(parts)


def _directive(name: str, value: Any) -> str:
    if inspect.isclass(value):
        return f".. autoclass:: pipeloom.{name}\n   :members:"
    if inspect.ismodule(value):
        return f".. automodule:: {value.__name__}\n   :members:\n   :imported-members:"
    return f".. autofunction:: pipeloom.{name}" if callable(value) else f".. autodata:: pipeloom.{name}\n   :no-value:"


def _entry(option: Option, name: str, anchor: str | None = None) -> str:
    """An option as an item of a definition list, which can be linked to."""
    plain = f"#{(anchor or name).replace('.', '-').replace('_', '-')}"
    kind = "on or off" if option.is_switch else option.value if not option.place else ""
    names = ", ".join(f"`{one}`" for one in option.choices)
    default = "required" if option.default is MISSING else f"default: {option.shown_default or 'none'}"
    facts = [f"`{kind}`" if kind else "", names, option.limits, default]
    body = textwrap.indent(f"{_markdown(option.text)} *{'; '.join(fact for fact in facts if fact)}*", "  ").strip()
    return f"[`{name}`]{{{plain}}}\n: {body}\n"


def _markdown(text: str) -> str:
    """A docstring's sentence in Markdown: code in one pair of backticks, no other markup."""
    return re.sub(r"([*<_\[])", r"\\\1", re.sub(r"``(.*?)``", r"`\1`", " ".join(text.split())))


def architecture() -> str:
    """The picture of the packages, in the page itself, so that it takes the page's colors."""
    return f"```{{raw}} html\n{picture()}\n```\n"


GENERATED = {"run_file": run_file, "commands": commands, "api": api, "architecture": architecture}
