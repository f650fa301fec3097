"""Which numbers a setting may have, written into its type, so that a limit stands next to the field that it is for."""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pipeloom.terminal.words import and_finite


@dataclass(frozen=True)
class Limits:
    """The values of a number; NaN is never one of them.

    Attributes:
        least: the smallest one.
        above: where given, they are larger than this.
        most: the largest one; every number is finite unless this is not.
    """

    least: float = -math.inf
    above: float | None = None
    most: float = sys.float_info.max

    def refusal(self, value: float) -> str | None:
        """What the value must be and is not; ``None`` for a value within the limits."""
        if self.most < sys.float_info.max and value > self.most:
            return f"must be at most {self.most:,}, found {value:,}"
        if self.least <= value <= self.most and (self.above is None or value > self.above):
            return None
        wanted = f"at least {self.least:g}" if self.above is None else f"above {self.above:g}"
        return f"must be {and_finite(wanted, value)}, found {value}"


Count = Annotated[int, Limits(least=1)]
"""A whole number of things of which there is at least one."""
CountOrNone = Annotated[int, Limits(least=0)]
"""A whole number of things; 0 for none."""
Positive = Annotated[float, Limits(above=0)]
"""A number above 0."""
Fraction = Annotated[float, Limits(least=0, most=1)]
"""A share of a whole."""


def limits_of(hint: Any) -> list[Limits]:
    """The limits in the type of a setting, which may be one of several alternatives."""
    # `Count | None` has them in an alternative, and `Count` in itself.
    types = (hint, *get_args(hint))
    return [limit for one in types for limit in getattr(one, "__metadata__", ()) if isinstance(limit, Limits)]
