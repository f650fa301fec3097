"""The progress bar of long commands, shown on terminals only."""

from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TextIO

from rich.progress import Progress, ProgressColumn

from pipeloom.terminal.console import make_console
from pipeloom.terminal.guard import print_beside, raw


def restore_terminal(stream: TextIO) -> None:
    """Show the cursor, which a progress bar hides, after the bar's process was killed."""
    if raw(stream).isatty():
        with suppress(OSError):
            # DECTCEM, the control sequence that shows the cursor.
            raw(stream).write("\x1b[?25h")
            raw(stream).flush()


class Bar:
    """A progress bar, shown within a ``with`` block if the stream is a terminal.

    Never raises an ``OSError``, so that work continues when its terminal is closed.

    Args:
        stream: to draw on.
        columns: of the bar.
        total: number of steps.
        is_shown: whether this process shows the bar.
        transient: whether the bar is removed at the end.
        fields: initial values of the columns' own fields.
    """

    def __init__(
        self,
        stream: TextIO,
        *columns: ProgressColumn,
        total: int,
        is_shown: bool = True,
        transient: bool = False,
        **fields: Any,
    ) -> None:
        self._bar: Progress | None = None
        self._stream = stream
        if is_shown and raw(stream).isatty():
            self._bar = Progress(*columns, console=make_console(stream), transient=transient)
            self._task = self._bar.add_task("", total=total, **fields)

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar; remove it if it is transient."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()

    def _print_above(self, line: str) -> None:
        """Print a line to the bar's stream, above the bar if there is one."""
        if self._bar is None:
            print_beside(line, self._stream)
            return
        with suppress(OSError):
            self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def update(self, completed: int, **fields: Any) -> bool:
        """Set the number of completed steps; return whether there is a bar."""
        if self._bar is None:
            return False
        with suppress(OSError):
            self._bar.update(self._task, completed=completed, **fields)
        return True
