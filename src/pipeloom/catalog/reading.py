"""Reading of data files by name or by path, with all problems reported together."""

from collections.abc import Collection, Mapping, Set
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeloom.config.paths import names_file
from pipeloom.cost.hardware import Curve
from pipeloom.cost.units import FRACTION, NUMBER, Unit
from pipeloom.errors import ConfigError, UserError
from pipeloom.system.files import exists, parse_toml, read_text
from pipeloom.terminal.words import did_you_mean, has_line_break, same_name


def names(folder: str) -> list[str]:
    """Names of the data files in a folder of the catalog."""
    found = files("pipeloom.catalog").joinpath(folder).iterdir()
    return sorted(item.name.removesuffix(".toml") for item in found if item.name.endswith(".toml"))


def find_name(folder: str, name: str) -> str | None:
    """The catalog's spelling of a name, up to case and ``_`` for ``-``; ``None`` if ``folder`` has no such name."""
    known = names(folder)
    return name if name in known else same_name(name, known)


def text_of(folder: str, name: str) -> str | None:
    """The text of a data file of the catalog; ``None`` if ``folder`` has no such name."""
    if name not in names(folder):
        return None
    return files("pipeloom.catalog").joinpath(folder, f"{name}.toml").read_text(encoding="utf-8")


def read_toml(folder: str, name_or_path: str, known: Collection[str] = ()) -> tuple[dict[str, Any], str]:
    """A data file's table, and its source: the name in the catalog, or the path.

    Args:
        folder: of the catalog.
        name_or_path: a name, or a file's path.
        known: names that the message about an unknown name lists; empty for those of the folder.

    Raises:
        UserError: there is no such name or file, or it is not TOML.
    """
    path, name = Path(name_or_path), find_name(folder, name_or_path)
    if name is not None:
        text = files("pipeloom.catalog").joinpath(folder, f"{name}.toml").read_text(encoding="utf-8")
        return parse_toml(text, name), name
    if names_file(name_or_path) and not exists(path):
        raise UserError(f"there is no {folder.removesuffix('s')} '{name_or_path}': no such file")
    if not names_file(name_or_path) or not path.is_file():
        known = known or names(folder)
        hint = did_you_mean(name_or_path, known)
        raise UserError(
            f"there is no {folder.removesuffix('s')} '{name_or_path}': {hint}{' ' if hint else ''}expected a file "
            f"(with a folder or .toml in its name) or one of {', '.join(known)}"
        )
    return parse_toml(read_text(path), path), str(path)


def source_of(folder: str, name_or_path: str) -> str:
    """The text ``source`` of a data file; empty if it has none."""
    return str(read_toml(folder, name_or_path)[0].get("source", ""))


LEAST_US = 0.01
"""Shortest latency of any hardware but 0, in microseconds: in this time light passes three meters."""
_MOST = 1e100
"""Largest number in a file: far above any quantity, and still finite in other units."""


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0 and at most ``_MOST``."""
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    # In Python a bool is an int.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _bound(value: Any) -> str:
    """Addition to a message about a lower limit, if the value is too large instead."""
    return f" and at most {_MOST:g}" if isinstance(value, int | float) and value > _MOST else ""


def _shown(value: Any) -> str:
    # Python refuses to convert very long integers to text.
    is_long = isinstance(value, int) and value > 10**20
    return f"a number of {value.bit_length()} bits" if is_long else repr(value)


class Reader:
    """Reads values of a table and collects problems; ``check`` raises them together.

    Methods that read return a valid value in place of a wrong one.
    """

    def __init__(self, table: Mapping[str, Any], source: str) -> None:
        self._table = table
        self._source = source
        self._problems: list[str] = []
        self._seen: set[str] = set()
        self._title = ""
        self._path: tuple[str, ...] = ()
        self._inner: list[Reader] = []
        self._needs: dict[str, str] = {}

    def number(self, key: str, default: float | None = None, *, scale: float = 1.0, least: float = 0.0) -> float:
        """A number of at least ``least``, times ``scale``."""
        value = self._find(key, default)
        if not _is_number(value) or value < least:
            self.complain(f"{key} must be a number of at least {least:g}{_bound(value)}, found {_shown(value)}")
            return least * scale
        return float(value) * scale

    def latency(self, key: str, default: float | None = None) -> float:
        """A plausible number of microseconds, or 0, in seconds."""
        value = self._find(key, default)
        if not _is_number(value) or value < 0 or 0 < value < LEAST_US:
            in_us = value * 1e6 if _is_number(value) else 0.0
            hint = f"; if that is in seconds, write {in_us:g}" if in_us >= LEAST_US else ""
            bound = f"of at least {LEAST_US:g}{_bound(value)}"
            self.complain(f"{key} is in microseconds and must be 0 or a number {bound}, found {_shown(value)}{hint}")
            return 0.0
        return float(value) * 1e-6

    def quantity(self, key: str, unit: Unit) -> float:
        """A plausible number in a unit, as SI units."""
        value = self._find(key, None)
        if not _is_number(value) or not unit.has(value):
            hint = unit.hints([value])
            self.complain(f"{key} must be a number {unit.words}, found {_shown(value)}{hint}")
            value = unit.least
        return float(value) * unit.scale

    def numbers_of(self, units: Mapping[str, tuple[str, float]]) -> dict[str, float]:
        """Attribute -> number in SI units, for ``units``: key -> (attribute, factor from the file's unit)."""
        return {name: self.number(key, scale=scale) for key, (name, scale) in units.items()}

    def fraction(
        self, key: str, default: float | None = None, *, most: float = 1.0, is_zero_allowed: bool = False
    ) -> float:
        """A number above 0 (or at least 0, with ``is_zero_allowed``) and at most ``most``."""
        value = self._find(key, default)
        if not _is_number(value) or not (0 < value <= most or (is_zero_allowed and value == 0)):
            least = "of at least 0" if is_zero_allowed else "above 0"
            self.complain(f"{key} is a fraction and must be a number {least} and at most {most:g}, found {value!r}")
            return most
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._find(key, default)
        if not is_positive(value):
            self.complain(f"{key} must be a number above 0{_bound(value)}, found {_shown(value)}")
            return 1.0
        return float(value)

    def integer(self, key: str, default: int | None = None, *, most: int | None = None) -> int:
        """A whole number of at least 1, and of at most ``most``."""
        value = self._find(key, default)
        if most is not None and isinstance(value, int) and value > most:
            self.complain(f"{key} must be at most {most:,}, found {_shown(value)}")
            return most
        if not _is_number(value) or not isinstance(value, int) or value < 1:
            self.complain(f"{key} must be a whole number of at least 1{_bound(value)}, found {_shown(value)}")
            return 1
        return value

    def quantities(self, key: str, unit: Unit) -> list[float]:
        """A list of plausible numbers in a unit, as SI units."""
        value = self._find(key, None)
        items = value if isinstance(value, list) else []
        if not items or not all(_is_number(item) and unit.has(item) for item in items):
            self.complain(f"{key} must be a list of numbers {unit.words}, found {value!r}{unit.hints(items)}")
            # Any valid value, so that reading continues.
            return [1.0]
        return [float(item) * unit.scale for item in items]

    def indices(self, key: str, number: int) -> tuple[int, ...]:
        """A list of different whole numbers from 0 to below ``number``; rising."""
        value = self._find(key, None)
        items = value if isinstance(value, list) else [None]
        is_right = all(type(item) is int and 0 <= item < number for item in items) and len(set(items)) == len(items)
        if not is_right:
            self.complain(f"{key} must be a list of different whole numbers from 0 to {number - 1}, found {value!r}")
            return ()
        return tuple(sorted(items))

    def pair(self, key: str, *, scale: float = 1.0) -> tuple[float, float]:
        """Two numbers of at least 0, times ``scale``."""
        value = self._find(key, None)
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or not all(_is_number(item) and item >= 0 for item in value):
            self.complain(f"{key} must be a list of two numbers of at least 0, found {value!r}")
            return 0.0, 0.0
        return float(value[0]) * scale, float(value[1]) * scale

    def curve(
        self,
        x_key: str,
        y_key: str,
        *,
        x_unit: Unit = NUMBER,
        y_unit: Unit = FRACTION,
        within: "Reader | None" = None,
    ) -> Curve:
        """(x, y) points from two lists of equal length, x rising; y may be in another table, ``within``."""
        known = len(self._problems)
        xs, ys = self.quantities(x_key, x_unit), (within or self).quantities(y_key, y_unit)
        if len(self._problems) > known:
            return ((1.0, 1.0),)
        if len(xs) != len(ys):
            (within or self).complain(f"{y_key} must have one number for each of {x_key}, {len(xs)}, found {len(ys)}")
        if any(after <= before for before, after in pairwise(xs)):
            self.complain(f"{x_key} must rise, found {self._table[x_key]!r}")
        return tuple(zip(xs, ys, strict=False))

    def text(self, key: str, default: str | None = None, *, among: Collection[str] | None = None) -> str:
        """A text, one of ``among`` if that is given; of a registry, only a message lists the names."""
        value = self._find(key, default)
        if not isinstance(value, str) or has_line_break(value) or (among is not None and value not in among):
            wanted = f"one of {', '.join(among)}" if among is not None else "a text of one line"
            self.complain(f"{key} must be {wanted}, found {value!r}")
            return next(iter(among)) if among is not None else ""
        return value

    def texts(self, key: str, *, among: Collection[str] | None = None) -> tuple[str, ...]:
        """A list of texts, each one of ``among`` if that is given; empty if the key is missing."""
        value = self._find(key, [])
        if not isinstance(value, list) or not all(
            isinstance(item, str) and (among is None or item in among) for item in value
        ):
            wanted = f"of {', '.join(among)}" if among is not None else "of texts"
            self.complain(f"{key} must be a list {wanted}, found {value!r}")
            return ()
        return tuple(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """True or false."""
        value = self._find(key, default)
        if not isinstance(value, bool):
            self.complain(f"{key} must be true or false, found {value!r}")
            return False
        return value

    def table(self, key: str, *, is_optional: bool = False) -> "Reader":
        """A reader of a table inside this one, which shares its list of problems."""
        value = self._find(key, {} if is_optional else None)
        if not isinstance(value, dict):
            self.complain(f"{key} must be a table, found {value!r}")
            value = dict[str, Any]()
        return self._inside(value, *self._path, key)

    def tables(self, key: str) -> list["Reader"]:
        """Readers of a list of tables inside this one, which share its list of problems; empty if it is missing."""
        value = self._find(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.complain(f"{key} must be a list of tables, found {value!r}")
            return []
        numbers = [""] if len(value) == 1 else [f", number {number}" for number in range(1, len(value) + 1)]
        return [self._inside(item, *self._path, f"{key}{number}") for item, number in zip(value, numbers, strict=False)]

    def complain(self, problem: str) -> None:
        """Add a problem, with the title and the name of the table in front: ``[device.peak_tflop_per_s] ...``."""
        name = f"[{'.'.join(self._path)}] " if self._path else ""
        self._problems.append(f"{self._title}{name}{problem}")

    def entitle(self, title: str) -> None:
        """Set the title that begins every problem of this table and of those inside it, in place of its name."""
        self._title, self._path = f"{title}: ", ()

    def needs(self, what: str, *keys: str) -> None:
        """Set what is missing for keys of the format that were not read, so that they have no effect."""
        self._needs |= dict.fromkeys(keys, what)

    def complain_of_unknown(self, known: Set[str]) -> None:
        """Add a problem for each key that was not read and is not in ``known``, here and in tables inside."""
        for key in self._table:
            if key in self._seen | known:
                continue
            if key in self._needs:
                self.complain(f"{key} has no effect without {self._needs[key]}; set that or leave it out")
            else:
                # A key that is given may come from the file's base.
                hint = did_you_mean(key, self._seen - set(self._table)) or did_you_mean(key, self._seen)
                self.complain(f"there is no key '{key}' here{'; ' if hint else ''}{hint}")
        for inner in self._inner:
            inner.complain_of_unknown({"source"})

    @property
    def has_problems(self) -> bool:
        """Whether there are problems so far."""
        return bool(self._problems)

    def names(self) -> list[str]:
        """Keys of the table."""
        return list(self._table)

    def check(self, known: Set[str] = frozenset()) -> None:
        """Raise all problems, including those of keys that were not read, here and in tables inside.

        Args:
            known: keys that need not be read.

        Raises:
            ConfigError: there are problems.
        """
        self.complain_of_unknown(known)
        if self._problems:
            # Without repetitions: a value may be read twice.
            raise ConfigError(list(dict.fromkeys(self._problems)), self._source)

    def _inside(self, table: Mapping[str, Any], *path: str) -> "Reader":
        inner = Reader(table, self._source)
        # The same list, not a copy, so that problems stay in the order of the file.
        inner._problems, inner._title, inner._path = self._problems, self._title, path
        self._inner.append(inner)
        return inner

    def _find(self, key: str, default: Any) -> Any:
        self._seen.add(key)
        return self._table.get(key, default)
