"""Tables and bars for people, without the control characters of foreign text."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from pipeloom.terminal.guard import printable, raw


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
