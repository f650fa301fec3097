"""What is written into the type of a setting: its limits, where its names come from, whether the short help has it."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from pipeloom.terminal.words import and_finite


@dataclass(frozen=True)
class Limits:
    """Allowed values of a number; never NaN.

    Attributes:
        least: smallest value.
        above: values must be larger than this; ``None`` for no such limit.
        most: largest value; infinity is allowed only if this is infinite.
    """

    least: float = -math.inf
    above: float | None = None
    most: float = sys.float_info.max

    @property
    def words(self) -> str:
        """The range as text, such as ``at least 1``; empty for every finite number."""
        found = [f"above {self.above:g}"] if self.above is not None else []
        found += [f"at least {self.least:,}"] if self.least > -math.inf and self.above is None else []
        found += [f"at most {self.most:,}"] if self.most < sys.float_info.max else []
        return ", ".join(found)

    def refusal(self, value: float) -> str | None:
        """The limit that a value violates, as a phrase; ``None`` for a value within the limits."""
        if self.most < sys.float_info.max and value > self.most:
            return f"must be at most {self.most:,}, found {value:,}"
        if self.least <= value <= self.most and (self.above is None or value > self.above):
            return None
        wanted = f"at least {self.least:,}" if self.above is None else f"above {self.above:g}"
        return f"must be {and_finite(wanted, value)}, found {value}"


Count = Annotated[int, Limits(least=1)]
"""An integer of at least 1."""
CountOrNone = Annotated[int, Limits(least=0)]
"""An integer of at least 0."""
Seed = Annotated[int, Limits(least=-(2**63), most=2**63 - 1)]
"""A random seed; PyTorch's generators take integers of 64 bits only."""
Positive = Annotated[float, Limits(above=0)]
"""A number above 0."""
Fraction = Annotated[float, Limits(least=0, most=1)]
"""A number from 0 to 1."""
Headroom = Annotated[float, Limits(least=0, most=0.9)]
"""A fraction of the memory that stays free; at 1 there would be no memory to use."""


_Value = TypeVar("_Value")


COMMON = "common"
Common = Annotated[_Value, COMMON]
"""A setting that the short help of a command lists; the others follow with ``--help-all``."""


@dataclass(frozen=True)
class Names:
    """A setting whose values are names.

    Attributes:
        of: what they name: a registry or a part of the catalog, see ``pipeloom.cli.reference``.
        or_file: whether a value may also be a file: with a folder in it, or ending in ``.toml``.
    """

    of: str
    or_file: bool = False


ClusterName = Annotated[str, Names("clusters", or_file=True)]
ModelName = Annotated[str, Names("models", or_file=True)]
ProgramName = Annotated[str, Names("programs", or_file=True)]
FamilyName = Annotated[str, Names("families")]
PlacementName = Annotated[str, Names("placements")]


def notes_of(hint: Any) -> Iterator[Any]:
    """Everything that is written into a type and its alternatives, such as ``Limits``."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint):
        # Literals have values inside, which are no types.
        yield from notes_of(inner) if not isinstance(inner, str) else ()


def limits_of(hint: Any) -> list[Limits]:
    """The limits in the type of a setting."""
    return [note for note in notes_of(hint) if isinstance(note, Limits)]
