"""What a person sees while a machine is measured: a bar on a terminal, a few lines elsewhere; on standard error."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_LINES_WITHOUT_TERMINAL = 6


class ProfileProgress:
    """Progress over measurements.

    Args:
        count: how many there will be.
        is_shown: on one rank.
    """

    def __init__(self, count: int, *, is_shown: bool) -> None:
        self._count = count
        self._is_shown = is_shown
        self._begun = 0
        self._every = max(1, count // _LINES_WITHOUT_TERMINAL)
        self._bar: Progress | None = None
        if is_shown and sys.stderr.isatty():
            columns = (
                TextColumn("measurement {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[what]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=count, what="starting")

    def __enter__(self) -> "ProfileProgress":
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, what: str) -> None:
        """A measurement begins, or is left out if it has no name."""
        self._begun += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._begun, what=what)
        elif self._is_shown and what and (self._begun - 1) % self._every == 0:
            print(f"measuring {self._begun}/{self._count}: {what}", file=sys.stderr, flush=True)  # noqa: T201


def restore_terminal() -> None:
    """Show the cursor again, which a bar hides, after its process was stopped."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
