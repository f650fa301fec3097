"""Parts of pages that are generated: options of the run file and of every command, the Python API, the architecture.

A line ``<!-- generated: NAME -->`` of a page is replaced by what the function of that name returns, as Markdown. The
definitions are those of the command line (``pipeloom.cli.reference``), so that a page cannot differ from it. Sphinx is
not needed here: the tests call the same functions.
"""

import inspect
import re
from functools import cache
from itertools import groupby
from typing import Any

from architecture import picture

from pipeloom.cli import COMMANDS
from pipeloom.cli.reference import Option, command_of, options_of, section_text, settings_of_runs

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_VALUES = {"N": "integer", "X": "number", "TEXT": "text", "PATH": "path", "N ...": "integers"}
"""What the help calls a value -> its type, where the reference has words for it."""
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
    """Every section and setting of the run file."""
    parts = []
    for section, options in groupby(settings_of_runs(), key=lambda option: option.group):
        text = section_text(section)
        parts.append(f"## {section}\n\n{_markdown(text[:1].upper() + text[1:])}.\n")
        parts += [_entry(option.name, option, option.name) for option in options]
    return "\n".join(parts)


@cache
def commands() -> str:
    """Every command: what it does, examples, and its options without the settings of a run file."""
    parts = []
    for name, summary in COMMANDS.items():
        command, options = command_of(name), options_of(name)
        places = [
            f" [{option.place}]" if _is_optional(option) else f" {option.place}" for option in options if option.place
        ]
        flags = " [--section.setting VALUE ...]" if command.settings else ""
        width = max(map(len, command.examples), default=0)
        examples = [f"{line:<{width}}  # {what}" if what else line for line, what in command.examples.items()]
        parts.append(f"## {name}\n\n{summary[:1].upper()}{summary[1:].rstrip('.')}.\n")
        parts += [f"{_markdown(command.about)}\n"] if command.about else []
        parts.append(f"Usage: `pipeloom {name}{''.join(places)} [OPTIONS]{flags}`\n")
        parts.append("\n".join(["```sh examples", *examples, "```\n"]))
        parts += [_entry(option.shown, option, f"{name}-{option.name}") for option in options if not option.group]
        if command.settings:
            read = sorted({setting.partition(".")[0] for setting in command.settings})
            links = ", ".join(f"[{section}](run-file.md#{section})" for section in read)
            parts.append(f"It reads these settings of the [run file](run-file.md), which are flags as well: {links}.\n")
    return "\n".join(parts)


@cache
def api() -> str:
    """Every public name of the package, by what it is."""
    import pipeloom

    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Modules": []}
    for name in getattr(pipeloom, "__all__", ()):
        value = getattr(pipeloom, name)
        groups["Classes" if inspect.isclass(value) else "Functions" if callable(value) else "Modules"].append(name)
    parts = []
    for title, members in groups.items():
        parts += [f"## {title}\n"] if members else []
        parts += [f"```{{eval-rst}}\n{_directive(name)}\n```\n" for name in members]
    return "\n".join(parts)


def architecture() -> str:
    """The picture of the packages, in the page itself, so that it takes the page's colors."""
    return f"```{{raw}} html\n{picture()}\n```\n"


def _directive(name: str) -> str:
    import pipeloom

    value = getattr(pipeloom, name)
    if inspect.ismodule(value):
        return f".. automodule:: {value.__name__}\n   :members:\n   :imported-members:"
    if not inspect.isclass(value):
        return f".. autofunction:: pipeloom.{name}"
    # Of a named tuple, whose own text describes its fields.
    fields = ", ".join(getattr(value, "_fields", ()))
    return f".. autoclass:: pipeloom.{name}\n   :members:" + (f"\n   :exclude-members: {fields}" if fields else "")


def _is_optional(option: Option) -> bool:
    return bool(option.shown_default) or option.default is None


def _entry(shown: str, option: Option, anchor: str) -> str:
    """An option as an item of a definition list, which can be linked to."""
    facts = [_VALUES.get(option.value, ""), option.limits, ", ".join(f"`{one}`" for one in option.choices)]
    facts += ["true or false"] if option.is_switch else []
    facts += [f"default: {_markdown(option.shown_default)}"] if option.shown_default else []
    facts_text = "; ".join(fact for fact in facts if fact)
    identity = re.sub(r"[._]", "-", anchor)
    return f"[`{shown}`]{{#{identity}}}\n: {_markdown(option.text)}{f' *[{facts_text}]*' if facts_text else ''}\n"


def _markdown(text: str) -> str:
    """A docstring's sentence in Markdown: code in one pair of backticks, links to pages, no other markup."""
    one_line = re.sub(r"``(.*?)``", r"`\1`", " ".join(text.split()))
    plain = re.sub(r"([*<_\[])", r"\\\1", one_line)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", plain)


GENERATED = {"run_file": run_file, "commands": commands, "api": api, "architecture": architecture}
