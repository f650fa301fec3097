"""An answer in sections of prose and tables, which a terminal prints and a page shows."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from pipeloom.terminal.console import headed, print_table, wide_console

WIDTH = 120
"""Most characters in a line of prose, or of a table that ends in text."""


@dataclass
class Section:
    """A part of an answer.

    Attributes:
        head: heading; empty for the first section.
        more: words behind it, in the same line.
        parts: paragraphs, lists of sentences, and tables of ``terminal.console.table``.
        is_bad: whether the heading reports a failure.
        is_wide: whether its tables may have the width of the terminal; others end in text, which wraps.
    """

    head: str = ""
    more: str = ""
    parts: list[str | list[str] | Table] = field(default_factory=list)
    is_bad: bool = False
    is_wide: bool = False


def print_sections(sections: Iterable[Section]) -> None:
    """Print the sections with their headings, and an empty line before every heading but that of the first section."""
    console = wide_console(WIDTH)
    for number, section in enumerate(sections):
        if section.head:
            console.print(
                headed(
                    f"\n{section.head}" if number else section.head,
                    section.more,
                    "bold red" if section.is_bad else "bold",
                )
            )
        for part in section.parts:
            if isinstance(part, Table):
                print_table(wide_console() if section.is_wide else console, part)
            elif isinstance(part, list):
                for sentence in part:
                    console.print(f"- {sentence}")
            else:
                console.print(part)


def sections_contents(sections: Iterable[Section]) -> list[dict[str, Any]]:
    """The sections for a page: of each the heading and its parts, which are texts, lists and tables."""
    return [
        {"head": one.head + one.more, "is_bad": one.is_bad, "parts": [_contents(part) for part in one.parts]}
        for one in sections
    ]


def _contents(part: str | list[str] | Table) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    if isinstance(part, list):
        return {"list": part}
    columns = part.columns
    rows = zip(*(column.cells for column in columns), strict=True)
    return {
        "heads": [str(column.header) for column in columns],
        "is_text": [number == 0 or column.justify == "left" for number, column in enumerate(columns)],
        "rows": [[str(cell) for cell in row] for row in rows],
    }
