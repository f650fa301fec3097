"""Tables and bars for people, without the control characters of foreign text."""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from pipeloom.terminal.guard import printable, raw

_WIDE = 210
"""Columns of an output that is no terminal: enough for every table."""
_MOST_OF_NAMES = 0.4
"""Share of the width that names of rows may take; longer ones go over several lines."""
_TEXT = 40
"""Columns that a text needs at least; longer ones go over several lines."""


class _PrintableConsole(Console):
    """A console that shows the control characters of texts instead of sending them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A text as it is laid out: escaped before its width counts."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is drawn; a segment without text of its own, such as the move of a cursor, stays as it is."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_console(stream: TextIO | None = None, *, width: int | None = None) -> Console:
    """A console that takes every text literally: no markup, no emoji names, no control characters.

    Args:
        stream: where to; ``None`` for standard output.
        width: in characters; ``None`` for that of the terminal.
    """
    file = raw(sys.stdout if stream is None else stream)
    # Rich takes [..] for markup, :name: for an emoji and colors numbers: in foreign text and paths all three are wrong.
    return _PrintableConsole(file=file, width=width, markup=False, emoji=False, highlight=False)


def headed(head: str, text: str = "", style: str = "bold") -> Text:
    """A text whose head is marked."""
    return Text.assemble((printable(head), style), printable(text))


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


Columns = Mapping[str, tuple[str, Callable[[Any], str]]]
"""Key of a record, as JSON has it -> the title of its column, and its value as text."""


def cells_of(record: Mapping[str, Any], columns: Columns) -> list[str]:
    """A record as people see it; ``-`` where there is no value."""
    return ["-" if record[key] is None else form(record[key]) for key, (_, form) in columns.items()]


def table_of(records: Mapping[str, Mapping[str, Any]], columns: Columns, first: str = "") -> Table:
    """Records by name, as ``--json`` prints them, as a table for ``print_table``; ``first`` titles the names."""
    found = table(first, [title for title, _ in columns.values()])
    for name, record in records.items():
        found.add_row(name, *cells_of(record, columns))
    return found
