"""What a command takes, from the definitions of its options: for the parser, the help and the reference of the site."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipeloom.config import RunConfig
from pipeloom.config.file import RETIRED
from pipeloom.config.paths import table_of
from pipeloom.workload.limits import COMMON, Limits, Names, notes_of

Options_ = TypeVar("Options_")
Idle = Callable[[Options_], str]
"""From the options of a command to the reason why one of them has no effect, such as ``without --fit``; empty if it has
one."""
RUN_FILE, RUN_FIELD = "CONFIG", "config"
"""A run file as the help shows it, and the field of the folder of a run that a command needs instead."""
_WIDEST = 30
"""Columns of an option with its value; longer lists of choices are shortened to one word."""


@dataclass(frozen=True)
class Place:
    """An option without a flag, which its position selects; ``name`` as the help shows it."""

    name: str


@dataclass(frozen=True)
class Flag:
    """An option whose flag has another name than its field; ``name`` without the dashes."""

    name: str


@dataclass(frozen=True)
class Output:
    """An option that names what a command writes, so that it is checked before the work."""

    kind: Literal["file", "folder", "picture"]


@dataclass(frozen=True, kw_only=True)
class Command(Generic[Options_]):
    """A command: ``pipeloom.cli.NAME.COMMAND``. Its description is in ``pipeloom.cli.COMMANDS``.

    Attributes:
        name: as it is typed.
        options: every flag is one of its fields, or ``--section.field`` of a field that is a dataclass. Further
            paragraphs of its docstring are part of the help.
        examples: command lines, with what each one does.
        settings: sections and settings of a run file that the command reads. With some, it takes a run file.
        brief: those of them whose common settings the short help lists; all if empty.
        default: the run without a file and flags; ``None`` for the defaults of the class.
        retired: flags that there were -> what to use instead.
        idle: names of options that have no effect with some others -> when; ``pipeloom.cli.idle`` refuses them.
        repeatable: names of lists whose values may be equal.
    """

    name: str
    options: type[Options_]
    examples: Mapping[str, str]
    settings: tuple[str, ...] = ()
    brief: tuple[str, ...] = ()
    default: RunConfig | None = None
    retired: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, Sequence[Idle[Options_]]] = field(default_factory=dict)
    repeatable: tuple[str, ...] = ()

    @property
    def needs_run(self) -> bool:
        """Whether it needs the folder of a run, where other commands take a run file."""
        return RUN_FIELD in self.options.__annotations__

    def is_brief(self, option: "Option") -> bool:
        """Whether the short help may list an option."""
        return not option.group or not self.brief or _is_in(option, self.brief)

    @property
    def about(self) -> str:
        """The docstring of ``options`` after its first paragraph; empty without more."""
        paragraphs = inspect.cleandoc(self.options.__doc__ or "").split("\n\n")[1:]
        # Some options are public classes, whose docstrings end with sections for programmers.
        return "\n\n".join(takewhile(lambda one: not one.startswith(("Examples:", "Attributes:")), paragraphs))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a command.

    Attributes:
        name: of the field, with its section: ``layout.pp``.
        group: the section, or empty.
        place: its name in the usage where its position selects it, else empty.
        hint: type of the value, without what is written into it.
        notes: what is written into the type.
        default: its value; ``dataclasses.MISSING`` where one must be given.
        owner: the dataclass that defines it.
        is_of_run: whether it is a setting of the run that the command needs, which has the value of that run.
    """

    name: str
    group: str = ""
    place: str = ""
    hint: Any
    notes: tuple[Any, ...] = ()
    default: Any = MISSING
    owner: type
    is_of_run: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false, so that its flag takes no value."""
        return bool in (self.hint, *get_args(self.hint))

    @property
    def is_common(self) -> bool:
        """Whether the short help lists it."""
        return COMMON in self.notes or self.default is MISSING or bool(self.place)

    @property
    def most_values(self) -> int | None:
        """Words that its flag takes; ``None`` for as many as follow."""
        return 0 if self.is_switch else None if any(get_origin(one) is tuple for one in _types(self.hint)) else 1

    @property
    def flags(self) -> tuple[str, ...]:
        """As they are typed: one, or two for a switch, or none for a place."""
        own = next((note.name for note in self.notes if isinstance(note, Flag)), self.name)
        flag = f"--{own.replace('_', '-')}"
        if self.place or self.is_table:
            return ()
        section, dot, name = flag.removeprefix("--").rpartition(".")
        return (flag, f"--{section}{dot}no-{name}") if self.is_switch else (flag,)

    @property
    def shown(self) -> str:
        """Flag and value as the help shows them."""
        if self.place or self.is_table:
            return self.place or f"[[{self.name}]]"
        section, dot, name = self.flags[0].removeprefix("--").rpartition(".")
        return f"--{section}{dot}[no-]{name}" if self.is_switch else f"{self.flags[0]} {self.value}"

    @property
    def briefly(self) -> str:
        """The same; of a switch that is off the flag that sets it."""
        return self.flags[0] if self.default is False and not self.is_of_run else self.shown

    @property
    def is_table(self) -> bool:
        """Whether it is a list of tables, which a run file sets and no flag."""
        return table_of(self.hint) is not None

    @property
    def value(self) -> str:
        """Placeholder of the value: ``N``, ``PATH``, ``NAME``, ``a|b``, ``N ...``."""
        types = [one for one in _types(self.hint) if one is not NoneType]
        texts = [str(one) for one in self.choices if not self.is_named]
        # A number or a file as well as a few names.
        others = dict.fromkeys(self._word(one) for one in types if not _literals(one))
        shown = "|".join([*texts, *(one for one in others if f"{one} ..." not in others)])
        if texts and len("".join(self.flags[:1])) + len(shown) < _WIDEST:
            return f"{shown} ..." if self.most_values is None and not shown.endswith(" ...") else shown
        words = dict.fromkeys(self._word(one) for one in types)
        return "|".join(one for one in words if f"{one} ..." not in words)

    def _word(self, hint: Any) -> str:
        if get_origin(hint) is tuple:
            inner = get_args(hint)
            word = self._word(inner[0])
            return f"{word} ..." if inner[-1] is ... else " ".join([word] * len(inner))
        if get_origin(hint) is Literal:
            values = get_args(hint)
            return str(values[0]) if len(values) == 1 else "NAME"
        if hint is Path:
            output = next((note for note in self.notes if isinstance(note, Output)), None)
            return "PATH" if output is None else "FOLDER" if output.kind == "folder" else "FILE"
        if self.is_named:
            return "NAME|FILE" if any(one.or_file for one in self.notes if isinstance(one, Names)) else "NAME"
        return {int: "N", float: "X"}.get(hint, "TEXT")

    @property
    def is_named(self) -> bool:
        """Whether its choices are those of a registry or of the catalog, so that there may be many."""
        return any(isinstance(note, Names) for note in self.notes)

    @property
    def choices(self) -> tuple[str, ...]:
        """Every word that the value may be; empty where it is a number or any text. With those of plug-ins."""
        named = [name for note in self.notes if isinstance(note, Names) for name in _NAMES[note.of]()]
        return (*named, *(str(value) for one in _types(self.hint) for value in _literals(one)))

    @property
    def text(self) -> str:
        """What it is, without what ``None`` means; its first sentence is all that the short help has."""
        return _described(self.owner)[self.name.rpartition(".")[2]][0]

    @property
    def first_sentence(self) -> str:
        """What it is, in brief."""
        return self.text.split(". ")[0].rstrip(".")

    @property
    def shown_default(self) -> str:
        """The default as text; empty where a value must be given, where nothing is set, or where a run has it."""
        if self.default is MISSING or self.is_of_run:
            return ""
        if self.default is None or self.default == ():
            return _described(self.owner)[self.name.rpartition(".")[2]][1]
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return " ".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)

    @property
    def limits(self) -> str:
        """The range of its numbers, such as ``at least 1``; empty without one."""
        return ", ".join(note.words for note in self.notes if isinstance(note, Limits))


def _types(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type."""
    # `int | None` and `Optional[int]` have different origins.
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _literals(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is tuple:
        return tuple(value for one in _types(get_args(hint)[0]) for value in _literals(one))
    return get_args(hint) if get_origin(hint) is Literal else ()


def command_of(name: str) -> Command[Any]:
    """The command of a name; the name is known."""
    return importlib.import_module(f"pipeloom.cli.{name}").COMMAND


def options_of(command: str | Command[Any]) -> tuple[Option, ...]:
    """Every option of a command: those with a place, its own flags, those of several commands, settings of a run.

    Of the settings of a run file there are those that the command reads; the others cannot be set as flags.
    """
    known = command_of(command) if isinstance(command, str) else command
    found = list(_options(known.options, default=known.default))
    kept = [one for one in found if not one.group or _is_in(one, known.settings)]
    if known.settings and not known.needs_run:
        kept.insert(0, Option(name=RUN_FIELD, place=RUN_FILE, hint=Path, default=None, owner=_RunFile))
    if known.needs_run:
        kept = [replace(one, is_of_run=bool(one.group)) for one in kept]
    # What several commands share follows what is a command's own.
    shared = {item.name for base in known.options.__mro__[1:] if is_dataclass(base) for item in fields(base)}
    return tuple(sorted(kept, key=lambda one: (not one.place, bool(one.group), one.name in shared)))


def _is_in(option: Option, settings: tuple[str, ...]) -> bool:
    """Whether sections and settings of a run file contain an option."""
    # The dot ends a section, or the whole name.
    return f"{option.name}.".startswith(tuple(f"{name}." for name in settings))


def settings_of_runs() -> tuple[Option, ...]:
    """Every setting of a run file, as an option."""
    return tuple(_options(RunConfig))


def all_but(section: str, *left_out: str) -> tuple[str, ...]:
    """The names of a section's settings without some, as ``Command.settings`` has them."""
    keys = [item.name for item in fields(getattr(RunConfig(), section))]
    return tuple(f"{section}.{key}" for key in keys if key not in left_out)


def section_text(section: str) -> str:
    """What the settings of a section of the run file are, a sentence without its full stop."""
    text = _described(RunConfig)[section][0].rstrip(".")
    return text[:1].lower() + text[1:]


def replacement_of(name: str, command: Command[Any]) -> str | None:
    """What to use instead of a flag that there was; ``None`` if there was none."""
    known = {**command.retired, **({f"--{old}": what for old, what in RETIRED.items()} if command.settings else {})}
    return known.get(name)


class _RunFile:
    """A run file."""

    config: Path
    """Run file (TOML); flags override its settings. Relative paths in the file start at its folder, those of flags at
    the current one. Every run and every plan writes one."""


def _options(owner: type, group: str = "", default: Any = None) -> Iterator[Option]:
    plain, whole = get_type_hints(owner), get_type_hints(owner, include_extras=True)
    for item in fields(cast("Any", owner)):
        start = getattr(default, item.name, MISSING)
        if start is MISSING:
            start = item.default_factory() if item.default_factory is not MISSING else item.default
        if is_dataclass(plain[item.name]):
            yield from _options(cast("type", plain[item.name]), item.name, start)
            continue
        notes = tuple(notes_of(whole[item.name]))
        place = next((note.name for note in notes if isinstance(note, Place)), "")
        name = f"{group}.{item.name}" if group else item.name
        yield Option(
            name=name, group=group, place=place, hint=plain[item.name], notes=notes, default=start, owner=owner
        )


@cache
def _described(owner: type) -> dict[str, tuple[str, str]]:
    """Field -> the string below it, without the sentences about ``None``, and the meanings of ``None`` in these."""
    found: dict[str, tuple[str, str]] = {}
    # Settings of a run are defined in sections; of classes that derive from others, each has its own fields.
    for one in reversed(owner.__mro__):
        if one is object or one is Generic:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        name = ""
        for node in cast("ast.ClassDef", tree).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text, *default = " ".join(str(node.value.value).split()).split(" None: ", 1)
                found[name] = (text, "".join(default).rstrip("."))
    return found


def _of_catalog(folder: str) -> Callable[[], Collection[str]]:
    def names() -> Collection[str]:
        from pipeloom.catalog import names

        return names(folder)

    return names


def _of(module: str, name: str) -> Callable[[], Collection[str]]:
    return lambda: list(getattr(importlib.import_module(module), name))


_NAMES: dict[str, Callable[[], Collection[str]]] = {
    "clusters": _of("pipeloom.catalog", "CLUSTERS"),
    "models": _of_catalog("models"),
    "programs": _of_catalog("software"),
    "model families": _of("pipeloom.workload.model_families", "MODELS"),
    "optimizers": _of("pipeloom.workload.optimizers", "OPTIMIZERS"),
    "families": _of("pipeloom.families", "FAMILIES"),
    "placements": _of("pipeloom.schedule", "PLACEMENTS"),
    "strategies": _of("pipeloom.planner.strategies", "STRATEGIES"),
    "methods": _of("pipeloom.planner.tradeoff", "METHODS"),
}
"""What names name -> those that there are; imported when they are printed, since a command needs few of them."""
