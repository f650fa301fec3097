"""Output whose reader may end before the command."""

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class _Lasting(io.RawIOBase):
    """A descriptor to which some writes never fail: what cannot be written is dropped.

    Args:
        fd: the descriptor.
        dropped: the errors of writes whose text is dropped.
    """

    def __init__(self, fd: int, dropped: type[OSError]) -> None:
        self._fd, self._dropped = fd, dropped

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        """Write to the descriptor; return the number of bytes written or dropped."""
        try:
            return os.write(self._fd, data)
        except self._dropped:
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
def lasting_output(*, is_beside: bool = False) -> Iterator[None]:
    """Context in which a command continues when the reader of its output has ended, as ``head`` does.

    The command then still writes its files, and its status is its own. So it is where the output is closed from the
    beginning.

    Args:
        is_beside: whether the output is beside what the command is for, as that of a training is. Nothing then ends it:
            no full disk, and no terminal that is closed.
    """
    given = sys.stdout, sys.stderr
    dropped = OSError if is_beside else BrokenPipeError
    sys.stdout, sys.stderr = (_lasting(stream, dropped) for stream in given)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = given


def _lasting(stream: TextIO | None, dropped: type[OSError]) -> TextIO:
    if stream is None:  # Python's, of a descriptor that is closed
        return _Nowhere()
    if not isinstance(stream, io.TextIOWrapper) or not _is_of(stream, dropped):
        return stream
    stream.flush()
    buffer = io.BufferedWriter(cast("Any", _Lasting(stream.fileno(), dropped)))
    how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, **how)


class _Nowhere(io.StringIO):
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        """Drop the text; return its length."""
        return len(text)


def _is_of(stream: TextIO, dropped: type[OSError]) -> bool:
    """Whether writes to a stream may fail with an error that is dropped."""
    try:
        # Only a pipe has a reader that ends.
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) or dropped is OSError
    except OSError:  # it has no descriptor
        return False
