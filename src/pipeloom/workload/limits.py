"""Limits of numeric settings, as annotations of their types."""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any, get_args

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

    def refusal(self, value: float) -> str | None:
        """The limit that a value violates, as a phrase; ``None`` for a value within the limits."""
        if self.most < sys.float_info.max and value > self.most:
            return f"must be at most {self.most:,}, found {value:,}"
        if self.least <= value <= self.most and (self.above is None or value > self.above):
            return None
        wanted = f"at least {self.least:g}" if self.above is None else f"above {self.above:g}"
        return f"must be {and_finite(wanted, value)}, found {value}"


Count = Annotated[int, Limits(least=1)]
"""An integer of at least 1."""
CountOrNone = Annotated[int, Limits(least=0)]
"""An integer of at least 0."""
Positive = Annotated[float, Limits(above=0)]
"""A number above 0."""
Fraction = Annotated[float, Limits(least=0, most=1)]
"""A number from 0 to 1."""


def limits_of(hint: Any) -> list[Limits]:
    """The limits in the type of a setting, which may be a union."""
    # `Count | None` has them in a member of the union, `Count` in itself.
    types = (hint, *get_args(hint))
    return [limit for one in types for limit in getattr(one, "__metadata__", ()) if isinstance(limit, Limits)]
