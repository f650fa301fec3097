"""Figures for people: tables, times, memory, large numbers."""

import os
import sys
from collections.abc import Collection, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

from pipeloom.terminal.console import make_console
from pipeloom.terminal.guard import printable, raw
from pipeloom.workload.dtypes import dtype_of

_WIDE = 210
"""Columns of an output that is no terminal: enough for every table."""
_MOST_OF_NAMES = 0.4
"""Share of the width that names of rows may take; longer ones go over several lines."""
_TEXT = 40
"""Columns that a text needs at least; longer ones go over several lines."""


def wide_console() -> Console:
    """As wide as the terminal; where there is none, wide enough for everything."""
    # Rich takes 80 columns for a pipe or a file, and would wrap tables there.
    has_width = raw(sys.stdout).isatty() or "COLUMNS" in os.environ
    return make_console(width=None if has_width else _WIDE)


def print_table(console: Console, rows: Table) -> None:
    """Print a table of ``table``. Columns that the width has no room for follow below, behind the names of the rows."""
    for number, block in enumerate(_blocks(rows, console.width)):
        if number:
            console.print()
        console.print(block)


def _blocks(rows: Table, width: int) -> Iterator[Table]:
    """The table in parts that fit the width, each with the names of the rows."""
    names, *others = rows.columns
    room = width - min(_width(names), int(width * _MOST_OF_NAMES)) - 1
    block, left = list[Column](), room
    for column in others:
        needed = _width(column) if column.no_wrap else min(_width(column), _TEXT)
        if block and needed > left:
            yield _part(rows, [names, *block])
            block, left = list[Column](), room
        block.append(column)
        left -= needed + 1
    yield _part(rows, [names, *block])


def _width(column: Column) -> int:
    return max(cell_len(printable(str(cell))) for cell in (column.header, *column.cells))


def _part(rows: Table, columns: Sequence[Column]) -> Table:
    """Some columns of a table."""
    part = _empty()
    for column in columns:
        part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
    for row, *cells in zip(rows.rows, *(column.cells for column in columns), strict=True):
        part.add_row(*cells, style=row.style, end_section=row.end_section)
    return part


def _empty() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))


def table(first: str, columns: Sequence[str], texts: Collection[str] = ()) -> Table:
    """A table for ``print_table``.

    Args:
        first: title of the first column, which names the rows.
        columns: titles of the others.
        texts: those of them that are no numbers: they may go over several lines.
    """
    found = _empty()
    found.add_column(first, overflow="fold")
    for column in columns:
        is_text = column in texts
        found.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return found


def unit_s(seconds: float) -> tuple[float, str]:
    """The unit of a time: its seconds, and its name."""
    # Milliseconds up to ten seconds: steps that are compared have one unit.
    return (1.0, "s") if seconds >= 10 else (1e-3, "ms")


def unit_bytes(size: float) -> tuple[float, str]:
    """The unit of a memory: its bytes, and its name."""
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
