"""How far ``pipeloom plan`` is: a bar on a terminal, elsewhere a line now and then."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from pipeloom.terminal.progress import Bar

FIRST_S, EVERY_S = 1.0, 10.0
"""Seconds to the first line, and between lines; a bar is there at once."""


class PlanProgress(Bar):
    """How many layouts are decided.

    Args:
        is_shown: whether anything is shown.
        first_s: seconds to the first line, where there is no terminal.
    """

    def __init__(self, *, is_shown: bool, first_s: float = FIRST_S) -> None:
        columns = (TextColumn("planning"), BarColumn(), TextColumn("{task.fields[layouts]}"), TimeElapsedColumn())
        # Standard output has the answer.
        super().__init__(sys.stderr, *columns, total=1, is_shown=is_shown, transient=True, layouts="finds layouts")
        self._text, self._begin = "finds layouts", time.monotonic()
        self._first_s, self._is_over = first_s, threading.Event()
        self._has_lines = is_shown and self._bar is None

    def __enter__(self) -> Self:
        """Show the bar, or begin with the lines."""
        super().__enter__()
        if self._has_lines:
            # A thread: a bound may take longer than the time between two lines. A
            # daemon, so that it never keeps a process alive.
            threading.Thread(target=self._write_lines, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away, and write no more lines."""
        self._is_over.set()
        super().__exit__(kind, error, trace)

    def show(self, decided: int, layouts: int) -> None:
        """So many are decided, of so many."""
        self._text = f"{decided:,} of {layouts:,} layouts decided"
        if self._bar is not None:
            self._bar.update(self._task, total=layouts)
        self.update(decided, layouts=self._text)

    def _write_lines(self) -> None:
        wait_s = self._first_s
        while not self._is_over.wait(wait_s):
            print(f"planning: {self._text}, {time.monotonic() - self._begin:.0f} s", file=sys.stderr, flush=True)
            wait_s = EVERY_S
