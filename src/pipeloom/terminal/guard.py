"""What reaches the terminal: a text may come from a model, a file or a stranger, and a terminal obeys what it prints.

Everything that this program prints goes through ``guarded_streams``, so that no caller can forget it. What draws, such
as tables and progress bars, writes its own control sequences to ``raw(stream)``; see ``pipeloom.terminal.console``.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_UNPRINTABLE = re.compile(
    "["
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of the text around them
    r"\u2028\u2029"  # separate lines, on some terminals only
    r"\ud800-\udfff"  # bytes of a file's name that are no text; cannot be written as UTF-8
    "]"
)


def printable(text: str) -> str:
    r"""A text without control characters: ``\x1b`` and the like replace them; lines and tabs stay.

    A terminal obeys control characters: they move its cursor, change its title, hide or reorder what is printed.
    """
    return _UNPRINTABLE.sub(lambda found: _escaped(ord(found[0])), text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class GuardedStream:
    """A stream of text without control characters; see ``printable``.

    Args:
        stream: where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        """Write a text; returns its length."""
        # The length of what was given, as callers of write expect, not of what was printed.
        self.raw.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts one behind the other."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """No: what styles its own text, such as help, would see its control sequences escaped."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the stream."""
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """The stream below a guarded one, for what escapes foreign text itself; else the stream."""
    return stream.raw if isinstance(stream, GuardedStream) else stream


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard standard output and standard error while the block runs."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", GuardedStream(raw(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
