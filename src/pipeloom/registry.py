"""Registries: names that users write -> values of the package and of plug-ins of other distributions.

A module adds its values when it is imported. So a plug-in is one file: a script imports it, or an entry point of the
registry's group names it. Entry points are imported at the first lookup of a name that is missing, or of all names. A
broken plug-in is left out; a message names its distribution and the error.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeloom.errors import PipeloomError, UserError, raised_in, type_and_text
from pipeloom.terminal.words import and_list, plural, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Value = TypeVar("Value")
_REGISTRIES: list["Registry[Any]"] = []


def broken_plugins() -> list[str]:
    """The sentences about broken plug-ins, of the registries that have been read."""
    return list(dict.fromkeys(sentence for registry in _REGISTRIES for sentence in registry.broken.values()))


class Registry(Mapping[str, Value], Generic[Value]):
    """Values by name.

    Args:
        what: noun for a value, in messages.
        group: of the entry points that name further modules, such as ``pipeloom.families``.
        kind: type of the values.

    Attributes:
        what, group, kind: as given.
        broken: name of a broken plug-in -> one sentence with the reason, the same for all that have the same reason.
    """

    def __init__(self, what: str, group: str, kind: type[Value]) -> None:
        self.what, self.group, self.kind = what, group, kind
        self.broken: dict[str, str] = {}
        self._values: dict[str, Value] = {}
        self._makers: dict[str, Callable[[], Value]] = {}
        self._source_of: dict[str, str] = {}
        self._source, self._is_loaded = "", False
        _REGISTRIES.append(self)

    def add(self, name: str, value: Value) -> Value:
        """Add a value; returns it.

        Raises:
            UserError: it has another type, or the name is taken.
        """
        if not isinstance(value, self.kind):
            raise UserError(f"a {self.what} must be of type {self.kind.__name__}, found {value!r:.80} for '{name}'")
        if self.is_taken(name):
            raise UserError(self._taken(name))
        self._values[name], self._source_of[name] = value, self._source
        return value

    def add_later(self, name: str, make: Callable[[], Value]) -> None:
        """Add a value of the package that is made at its first lookup."""
        self._makers[name] = make

    def is_taken(self, name: object) -> bool:
        """Whether a value has been added under a name; imports no plug-in, so that registration may use it."""
        return name in self._values or name in self._makers

    def remove(self, name: str) -> None:
        """Remove a value if it exists, so that a notebook may add another one of its name."""
        self._values.pop(name, None)

    def leave_out(self, name: str, error: PipeloomError) -> bool:
        """Leave out a plug-in whose value turned out to be wrong, as one that is broken.

        Args:
            name: of the value.
            error: that it led to.

        Returns:
            Whether the value is of another distribution; those of the package and of a script stay.
        """
        source = self._source_of.get(name)
        if not source or name not in self._values:
            return False
        self.remove(name)
        self.broken[name] = f"the {self.what} '{name}' of {source} is left out: {_line_of(error)}"
        return True

    def find(self, name: str) -> Value:
        """The value of a name.

        Raises:
            UserError: there is none; contains close names, or why a plug-in of that name is left out.
        """
        if name not in self:
            raise UserError(self.unknown(name))
        return self[name]

    def unknown(self, name: str) -> str:
        """The sentence about a name that has no value."""
        return unknown_name(self.what, name, tuple(self)) if name not in self.broken else self.broken[name]

    def __getitem__(self, name: str) -> Value:
        """The value of a name; a ``KeyError`` if there is none."""
        if name in self._makers and name not in self._values:
            self._values[name] = self._makers[name]()
        # A plug-in is imported only for a name that the package does not have.
        if name not in self._values:
            self._load()
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        """Whether a name has a value."""
        if isinstance(name, str) and not self.is_taken(name):
            self._load()
        return self.is_taken(name)

    def __iter__(self) -> Iterator[str]:
        """All names, the package's own first."""
        self._load()
        # One dictionary, since a value that has been made is in both.
        return iter({**self._makers, **self._values})

    def __len__(self) -> int:
        """How many there are."""
        return len(list(iter(self)))

    def _taken(self, name: str) -> str:
        """The sentence about a name that has a value."""
        source, article = self._source_of.get(name, ""), "an" if self.what[0] in "aeiou" else "a"
        return f"there is {article} {self.what} '{name}' already{f', of {source}' if source else ''}"

    def _load(self) -> None:
        """Import the modules of all entry points, once."""
        if self._is_loaded:
            return
        from importlib.metadata import entry_points  # takes 50 ms, which built-in names need not wait for

        self._is_loaded = True  # at once, since a module may look for a name while it is imported
        names_by_reason = dict[tuple[str, str], list[str]]()
        # Sorted: the order of installed distributions differs from machine to machine.
        for entry in sorted(entry_points(group=self.group), key=lambda one: (one.name, _distribution(one))):
            if reason := self._import(entry):
                names_by_reason.setdefault((_distribution(entry), reason), []).append(entry.name)
        for (source, reason), names in names_by_reason.items():
            listed = and_list([f"'{name}'" for name in names])
            what, are = (self.what, "is") if len(names) == 1 else (plural(self.what), "are")
            self.broken |= dict.fromkeys(names, f"the {what} {listed} of {source} {are} left out: {reason}")

    def _import(self, entry: "EntryPoint") -> str:
        """Import a module that adds the value of an entry point; why that is not possible, or nothing."""
        # A script may have imported this module, and an entry of this distribution may have added all of its values.
        is_own = entry.module in sys.modules or self._source_of.get(entry.name) == _distribution(entry)
        if self.is_taken(entry.name) and not is_own:
            return self._taken(entry.name)
        known, self._source = dict(self._values), _distribution(entry)
        reason = ""
        try:
            entry.load()
        except PipeloomError as error:
            reason, place = _line_of(error), _place(error, entry)
            reason += "" if place.split(", line ")[0] in reason else f", in {place}"
        except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
            reason = f"{type_and_text(error)}, in {_place(error, entry)}"
        self._source = ""
        if reason:
            self._values = known  # nothing of a module that is only half there
        elif entry.name not in self._values:
            # What the module does add stays: another entry may name it, and a second import adds nothing.
            reason = f"{entry.module} adds no {self.what} of that name"
        return reason


def _line_of(error: PipeloomError) -> str:
    """An error on one line: its first line, the problem that follows if that is a heading, and its notes."""
    first, *more = str(error).splitlines()
    first += f" {more[0].strip(' -')}" if more and first.endswith(":") else ""
    return "; ".join([first, *getattr(error, "__notes__", [])])


def _distribution(entry: "EntryPoint") -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _place(error: BaseException, entry: "EntryPoint") -> str:
    """File, line and text of the line of a plug-in that raised; its module if that has no file."""
    try:
        spec = find_spec(entry.module)
    except (ImportError, ValueError):  # of the package around it
        spec = None
    file = spec.origin if spec is not None and spec.origin else entry.module
    return raised_in(error, file) or file
