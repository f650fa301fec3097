"""Parts of pages that are generated: options of the run file and of every command, and the Python API.

A line ``<!-- generated: NAME -->`` of a page is replaced by what the function of that name returns, as Markdown. The
definitions are those of the command line, so that a page cannot differ from it. Sphinx is not needed here: the tests
call the same functions.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from architecture import picture

from pipeloom.cli import COMMANDS
from pipeloom.config import RunConfig
from pipeloom.workload.limits import Limits

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
SECTIONS = {
    "model": "The model.",
    "data": "Text, tokenizer and sequence length.",
    "layout": "Sizes of the parallel axes, and how the batch is divided.",
    "schedule": "The order of the work on each pipeline rank, and what moves or is recomputed when memory is short.",
    "optimizer": "Update rule and learning rate.",
    "training": "The training loop.",
    "checkpoint": "When checkpoints are written, and from which one a run resumes.",
    "output": "The run folder.",
    "machine": "The cluster for `simulate`, `slices` and `plan`; `train` runs where it is started.",
}


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
        options_class = get_type_hints(RunConfig)[section.name]
        parts.append(f"## {section.name}\n\n{SECTIONS[section.name]}\n")
        parts += [_entry(f"{section.name}.{key}", *rest) for key, *rest in _settings(options_class)]
    return "\n".join(parts)


@cache
def commands() -> str:
    """Every command: its usage, and the options that are not settings of the run file."""
    parts = []
    for command, summary in COMMANDS.items():
        options_class, description = _options_of(command)
        parts.append(f"## {command}\n\n{summary[0].upper()}{summary[1:]}.\n")
        rest = textwrap.dedent(description.partition("\n\n")[2]).split("CONFIG is a TOML file")[0].strip()
        parts.append(f"{rest}\n" if rest else "")
        own = list(_settings(options_class))
        run = [name for name, hint, *_ in own if is_dataclass(hint)]
        if run:
            parts.append(
                f"`pipeloom {command} [CONFIG] [--section.key value ...]` takes a run file and "
                f"[every setting of it](run-file.md) as a flag"
                f"{', and these options:' if len(own) > len(run) else '.'}\n"
            )
        for name, hint, default, text in own:
            if not is_dataclass(hint):
                parts.append(_entry(_flag(name, hint), hint, default, text, anchor=f"{command}-{name}"))
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


def _entry(name: str, hint: Any, default: Any, text: str, anchor: str | None = None) -> str:
    """An option as an item of a definition list, which can be linked to."""
    plain = f"#{(anchor or name).replace('.', '-').replace('_', '-')}"
    facts = [_called(hint), _limits(hint), "required" if default is MISSING else f"default `{_shown(default)}`"]
    body = textwrap.indent(f"{_markdown(text)} *{'; '.join(fact for fact in facts if fact)}*", "  ").strip()
    return f"[`{name}`]{{{plain}}}\n: {body}\n"


def _markdown(text: str) -> str:
    """A docstring's sentence in Markdown: code in one pair of backticks, links to pages, no other markup."""
    one_line = re.sub(r"``(.*?)``", r"`\1`", " ".join(text.split()))
    plain = re.sub(r"([*<_\[])", r"\\\1", one_line)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", plain)


def _settings(options_class: type) -> list[tuple[str, Any, Any, str]]:
    """Name, type, default and description of each field."""
    hints = get_type_hints(options_class, include_extras=True)
    texts = _descriptions(options_class)
    found = []
    for item in fields(options_class):  # pyrefly: ignore
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        found.append((item.name, hints[item.name], default, texts.get(item.name, "")))
    return found


def _descriptions(options_class: type) -> dict[str, str]:
    """Field -> the string below it, of the class and of those that it derives from."""
    found: dict[str, str] = {}
    for one in reversed(options_class.__mro__):
        if not is_dataclass(one):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        name = ""
        for node in tree.body:  # pyrefly: ignore
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found[name] = inspect.cleandoc(str(node.value.value))
    return found


def _called(hint: Any) -> str:
    """What a value must be."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _called(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_called(one) for one in inner if one is not type(None)))
    if origin is tuple:
        return f"{_called(inner[0])}, repeated" if inner[-1] is ... else f"{len(inner)} x {_called(inner[0])}"
    if origin is Literal:
        return "one of " + ", ".join(f"`{one}`" for one in inner)
    names = {int: "integer", float: "number", str: "text", Path: "path", bool: "true or false"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _limits(hint: Any) -> str:
    """The range of a number, where it has one."""
    found = [one for part in (hint, *get_args(hint)) for one in getattr(part, "__metadata__", ())]
    words = []
    for limit in found:
        if isinstance(limit, Limits):
            words.append(f"above {limit.above:g}" if limit.above is not None else f"at least {limit.least:g}")
            words += [f"at most {limit.most:,g}"] if limit.most < sys.float_info.max else []
    return ", ".join(word for word in words if "inf" not in word)


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none given"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _flag(name: str, hint: Any) -> str:
    """An option of a command as it is written, or the name of an argument without a flag."""
    if "Positional" in repr(hint):
        return name.upper()
    return f"--{name.replace('_', '-')}"


class _Found(Exception):  # noqa: N818 - it carries what was looked for
    """Ends a command as soon as it has named its options."""


def _options_of(command: str) -> tuple[type, str]:
    """The dataclass of a command's options, and its description."""

    def record(options_class: type, words: Any, name: str, description: str, **_: Any) -> Any:
        raise _Found(options_class, description)

    module = importlib.import_module(f"pipeloom.cli.{command}")
    users = [
        one for name, one in sys.modules.items() if name.startswith("pipeloom.cli") and hasattr(one, "parse_flags")
    ]
    kept = {one: one.parse_flags for one in users}
    try:
        for one in users:
            one.parse_flags = record
        module.run(["--help"])
    except _Found as found:
        options_class, description = found.args
        return options_class, description
    finally:
        for one, function in kept.items():
            one.parse_flags = function
    message = f"pipeloom {command} --help did not name its options"
    raise LookupError(message)


def architecture() -> str:
    """The picture of the packages, in the page itself, so that it takes the page's colors."""
    return f"```{{raw}} html\n{picture()}\n```\n"


GENERATED = {"run_file": run_file, "commands": commands, "api": api, "architecture": architecture}
