"""Consoles and tables; control characters of the text in them are escaped."""

import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from pipeloom.terminal.guard import printable, raw

_WIDE = 210
"""Characters in a line of an output that is not a terminal: enough for every table."""
_MOST_OF_NAMES = 0.4
"""Share of the width that names of rows may take; longer names wrap."""
_TEXT = 40
"""Width from which a column of text wraps, in characters."""


class _PrintableConsole(Console):
    """A console that escapes the control characters of texts."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text before its width is computed."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape the segments to print, except Rich's own control segments, such as cursor moves."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_console(stream: TextIO | None = None, *, width: int | None = None) -> Console:
    """A console that prints text literally: no markup, no emoji names, no control characters.

    Args:
        stream: to print to; ``None`` for standard output.
        width: in characters; ``None`` for the terminal's.
    """
    file = raw(sys.stdout if stream is None else stream)
    # By default Rich parses [..] as markup and :name: as an emoji, and colors numbers. All three are wrong in paths.
    return _PrintableConsole(file=file, width=width, markup=False, emoji=False, highlight=False)


def headed(head: str, text: str = "", style: str = "bold") -> Text:
    """``head`` in a style, followed by ``text``."""
    return Text.assemble((printable(head), style), printable(text))


def hanging(text: str, indent: int) -> str:
    """Lines of names and texts for a terminal, which long ones wrap at; for other outputs unchanged.

    Args:
        text: lines whose texts begin behind ``indent`` characters.
        indent: of the lines that a long one continues in, which begin two characters further.
    """
    if not _has_width():
        return text
    room = max(make_console().width, 2 * indent)
    lines = [
        part
        for line in text.split("\n")
        for part in textwrap.wrap(
            line, room, subsequent_indent=" " * (indent + 2), break_long_words=False, break_on_hyphens=False
        )
        or [line]
    ]
    return "\n".join(lines)


def wide_console(most: int | None = None) -> Console:
    """A console as wide as the terminal; without a terminal, wide enough for every table.

    Args:
        most: limit of the width, in characters.
    """
    # Rich assumes 80 columns for a pipe or a file, and would wrap tables there.
    console = make_console(width=None if _has_width() else _WIDE)
    return console if most is None or console.width <= most else make_console(width=most)


def _has_width() -> bool:
    return raw(sys.stdout).isatty() or "COLUMNS" in os.environ


def print_table(console: Console, rows: Table) -> None:
    """Print a table of ``table``. Columns that exceed the width follow below, with the names of the rows repeated."""
    for number, block in enumerate(_blocks(rows, console.width)):
        if number:
            console.print()
        console.print(block)


def _blocks(rows: Table, width: int) -> Iterator[Table]:
    """Parts of the table that fit the width, each with the names of the rows."""
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
    """A table of some columns of another."""
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
        first: title of the first column, which has the names of the rows.
        columns: titles of the others.
        texts: columns of text, aligned to the left, which may wrap; the others are numbers, aligned to the right.
    """
    found = _empty()
    found.add_column(first, overflow="fold")
    for column in columns:
        is_text = column in texts
        found.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return found


Columns = Mapping[str, tuple[str, Callable[[Any], str]]]
"""Key of a record, as in JSON -> the title of its column, and a function that formats its value."""


def cells_of(record: Mapping[str, Any], columns: Columns) -> list[str]:
    """Formatted values of a record; ``-`` for ``None``."""
    return ["-" if record[key] is None else form(record[key]) for key, (_, form) in columns.items()]


def table_of(records: Mapping[str, Mapping[str, Any]], columns: Columns, first: str = "") -> Table:
    """A table for ``print_table`` of the records that ``--json`` prints, by name; ``first`` is the names' title."""
    found = table(first, [title for title, _ in columns.values()])
    for name, record in records.items():
        found.add_row(name, *cells_of(record, columns))
    return found
