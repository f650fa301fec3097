"""Escaping of control characters: printed text may come from a model or a file, and a terminal executes them.

Everything that this program prints goes through ``guarded_streams``, so that no caller can forget it. Code that needs
control sequences, such as tables and progress bars, writes to ``raw(stream)``; see ``pipeloom.terminal.console``.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    r"""Replace control characters by their escapes, such as ``\x1b``; line ends and tabs stay.

    Control characters can move the cursor, change the terminal's title, or hide and reorder text.
    """
    return _UNPRINTABLE.sub(lambda found: _escaped(ord(found[0])), text)


def print_beside(text: str, stream: TextIO | None = None) -> None:
    """Print a text at once, to standard error or another stream; a closed terminal ends nothing."""
    with suppress(OSError):
        print(printable(text), file=stream or sys.stderr, flush=True)


def print_warning(text: str) -> None:
    """Print a warning of a training run to standard error."""
    print_beside(f"pipeloom train: warning: {text}")


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class GuardedStream:
    """A text stream that escapes control characters; see ``printable``.

    Args:
        stream: to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        # Before escaping, as callers of write expect.
        self.raw.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """``False``, so that libraries which style text for terminals print plain text: styles would be escaped."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the stream's."""
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """The stream below a guarded one, for code that escapes text itself; any other stream as it is."""
    return stream.raw if isinstance(stream, GuardedStream) else stream


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Escape control characters in standard output and standard error within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", GuardedStream(raw(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
