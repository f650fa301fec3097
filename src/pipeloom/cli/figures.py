"""Figures for people: tables, times, memory, large numbers."""

from collections.abc import Sequence

from rich.table import Table

from pipeloom.dtypes import dtype_of


def table(first: str, columns: Sequence[str]) -> Table:
    """A table whose first column names the rows; the others are numbers."""
    found = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    found.add_column(first, overflow="fold")
    for column in columns:
        found.add_column(column, justify="right", no_wrap=True)
    return found


def unit_s(seconds: float) -> tuple[float, str]:
    """The unit that a time is told in: its seconds, and its name."""
    return (1.0, "s") if seconds >= 10 else (1e-3, "ms")


def unit_bytes(size: float) -> tuple[float, str]:
    """The unit that a memory is told in: its bytes, and its name."""
    return (1e9, "GB") if size >= 1e10 else (1e6, "MB")


def seconds(value: float) -> str:
    """A time with its unit."""
    unit, name = unit_s(value)
    return f"{short(value / unit)} {name}"


def short(value: float) -> str:
    """Three or four digits."""
    if not value:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f}"


def told_dtype(precision: str, *, is_default: bool) -> str:
    """A run's type of weights and activations, and whether nobody chose it."""
    return dtype_of(precision) + (" (the devices' default)" if is_default else "")


def amount(number: float) -> str:
    """A number of parameters: 3.6 M, 51.8 B, 1.01 T."""
    scale, letter = next(pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1.0, "")) if number >= pair[0])
    return f"{number / scale:.3g} {letter}".strip()
