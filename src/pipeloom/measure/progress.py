"""What a person sees while a machine is measured: a bar on a terminal, a few lines elsewhere; on standard error."""

import sys

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from pipeloom.terminal.progress import Bar

_LINES_WITHOUT_TERMINAL = 6


class ProfileProgress(Bar):
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
        columns = (
            TextColumn("measurement {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
        )
        super().__init__(sys.stderr, *columns, total=count, is_shown=is_shown, transient=True, what="starting")

    def show(self, what: str) -> None:
        """A measurement begins, or is left out if it has no name."""
        self._begun += 1
        is_bar = self._update(self._begun, what=what)
        if not is_bar and self._is_shown and what and (self._begun - 1) % self._every == 0:
            print(f"measuring {self._begun}/{self._count}: {what}", file=sys.stderr, flush=True)  # noqa: T201
