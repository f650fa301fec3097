"""Units of figures in cluster files and what-ifs, with the range of plausible values; limits of values in SI units."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pipeloom.workload.limits import Limits

Amount = Annotated[float, Limits(least=1e-6, most=1e100)]
"""Bytes, FLOPs, or either per second: a time is divided by it, so that 0 would make it infinite."""
AmountOrNone = Annotated[float, Limits(least=0, most=1e100)]
"""A latency or a price: a number that may be 0."""
Share = Annotated[float, Limits(above=0, most=1)]
"""A fraction that is not 0."""


@dataclass(frozen=True)
class Unit:
    """A unit of cluster files.

    Attributes:
        name: as in datasheets; empty for a plain number.
        base: the SI unit, which a file may have by mistake.
        scale: of this unit in SI units.
        most: largest plausible value: far above any hardware, and below that of slow hardware in SI units.
        least: smallest plausible value.
    """

    name: str
    base: str
    scale: float
    most: float
    least: float = 1e-6

    @property
    def words(self) -> str:
        """The range as text."""
        most = f"{self.most:,.0f}" if self.most <= 1e9 else f"{self.most:g}"
        return f"from {self.least:g} to {most} {self.name}".rstrip()

    def has(self, value: float) -> bool:
        """Whether a value in this unit is plausible."""
        return self.least <= value <= self.most

    def hint(self, value: float) -> str:
        """How a value that seems to be in SI units is written in this one; empty for any other value."""
        return f"; if that is in {self.base}, write {value / self.scale:g}" if self._is_base(value) else ""

    def hints(self, values: Iterable[Any]) -> str:
        """The same for the first such value of a list."""
        numbers = (value for value in values if isinstance(value, int | float))
        return next((self.hint(value) for value in numbers if self._is_base(value)), "")

    def _is_base(self, value: float) -> bool:
        return self.most < value and self.has(value / self.scale)


TFLOP_PER_S = Unit("TFLOP/s", "FLOP/s", 1e12, most=1e6)
GB = Unit("GB", "bytes", 1e9, most=1e6)
GB_PER_S = Unit("GB/s", "bytes/s", 1e9, most=1e6)
GFLOP = Unit("GFLOP", "FLOP", 1e9, most=1e8, least=1e-12)
FRACTION = Unit("", "", 1.0, most=1.0)
NUMBER = Unit("", "", 1.0, most=1e100)
