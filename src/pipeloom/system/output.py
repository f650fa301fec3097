"""Output whose reader may end before the command."""

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class _Pipe(io.RawIOBase):
    """A pipe to which writes never fail: what is written after its reader has closed it is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        """Write to the pipe; return the number of bytes written or dropped."""
        try:
            return os.write(self._fd, data)
        except BrokenPipeError:
            return len(data)

    def writable(self) -> bool:
        """``True``."""
        return True

    def fileno(self) -> int:
        """The descriptor of the pipe."""
        return self._fd


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which a command continues when the reader of its output has ended, as ``head`` does.

    The command then still writes its files, and its status is its own.
    """
    given = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_lasting(stream) for stream in given)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = given


def _lasting(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or not _is_pipe(stream):
        return stream
    stream.flush()
    buffer = io.BufferedWriter(cast("Any", _Pipe(stream.fileno())))
    how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, **how)


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except OSError:  # it has no descriptor
        return False
