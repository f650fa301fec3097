"""A bar on a terminal, nothing elsewhere: what the commands that take their time share."""

from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TextIO

from rich.progress import Progress, ProgressColumn

from pipeloom.terminal.console import make_console
from pipeloom.terminal.guard import raw


def restore_terminal(stream: TextIO) -> None:
    """Show the cursor again, which a bar hides, after its process was stopped."""
    if raw(stream).isatty():
        with suppress(OSError):
            # DECTCEM: shows the cursor. A process that is killed takes no bar away.
            raw(stream).write("\x1b[?25h")
            raw(stream).flush()


class Bar:
    """Progress as a bar, if the stream is a terminal; shown while it is entered.

    Work goes on when its terminal has gone away: nothing here raises an ``OSError``.

    Args:
        stream: where to.
        columns: of the bar.
        total: steps in all.
        is_shown: whether this process may show anything.
        transient: whether the bar is taken away at the end.
        fields: first values of the columns' own fields.
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
        """Keep the bar, or remove it."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()

    def _print_above(self, line: str) -> None:
        """Leave a line, above the bar if there is one."""
        with suppress(OSError):
            if self._bar is None:
                print(line, flush=True)  # noqa: T201  progress is output
            else:
                self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def update(self, completed: int, **fields: Any) -> bool:
        """Move the bar on; whether there is one."""
        if self._bar is None:
            return False
        with suppress(OSError):
            self._bar.update(self._task, completed=completed, **fields)
        return True
