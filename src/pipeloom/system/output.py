"""Output that cannot be written does not end a command: its reader has ended, or the disk is full."""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class _Lasting(io.RawIOBase):
    """A descriptor to which writes never fail: what cannot be written is dropped.

    Args:
        fd: the descriptor.
        lost: receives the first error of a dropped text, other than that its reader has ended.
    """

    def __init__(self, fd: int, lost: list[OSError]) -> None:
        self._fd, self._lost = fd, lost

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        """Write to the descriptor; return the number of bytes written or dropped."""
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:  # another program of the terminal has set it so
                select.select((), (self._fd,), ())
            except BrokenPipeError:
                return len(data)
            except OSError as error:
                self._lost[:] = self._lost or [error]  # a training prints for weeks
                return len(data)

    def writable(self) -> bool:
        """``True``."""
        return True

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._fd)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd


@contextmanager
def lasting_output() -> Iterator[list[OSError]]:
    """Context in which a command continues when its output cannot be written, so that it still writes its files.

    Its status is its own where the reader of the output has ended, as ``head`` does, and where the output is closed
    from the beginning.

    Yields:
        The first error of standard output for any other reason, such as a full disk; empty without one. Complete at the
        end of the context.
    """
    given, lost = (sys.stdout, sys.stderr), list[OSError]()
    sys.stdout, sys.stderr = _lasting(given[0], lost), _lasting(given[1], [])
    try:
        yield lost
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = given


def _lasting(stream: TextIO | None, lost: list[OSError]) -> TextIO:
    if stream is None:  # Python's, of a descriptor that is closed
        return _Nowhere()
    if not isinstance(stream, io.TextIOWrapper) or not _has_descriptor(stream):
        return stream
    stream.flush()
    buffer = io.BufferedWriter(cast("Any", _Lasting(stream.fileno(), lost)))
    how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, **how)


class _Nowhere(io.StringIO):
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        """Drop the text; return its length."""
        return len(text)


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except OSError:
        return False
    return True
