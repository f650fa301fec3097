"""Progress of ``pipeloom plan``: each layout that is faster than all before, and a bar or a line every few seconds."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from pipeloom.cli.plan_layouts import settings_words
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.progress import Bar

FIRST_S, EVERY_S = 1.0, 10.0
"""Seconds to the first line, and between lines. A bar is shown at once."""


class PlanProgress(Bar):
    """Number of decided layouts, and the fastest layout so far.

    Args:
        is_shown: whether to print anything.
        first_s: seconds to the first line if there is no terminal.
    """

    def __init__(self, *, is_shown: bool, first_s: float = FIRST_S) -> None:
        columns = (TextColumn("planning"), BarColumn(), TextColumn("{task.fields[layouts]}"), TimeElapsedColumn())
        # Standard output is for the answer.
        super().__init__(sys.stderr, *columns, total=1, is_shown=is_shown, transient=True, layouts="finds layouts")
        self._text, self._begin, self._is_shown = "finds layouts", time.monotonic(), is_shown
        self._first_s, self._is_over, self._best = first_s, threading.Event(), ""
        self._lines = threading.Thread(target=self._write_lines, daemon=True)

    def __enter__(self) -> Self:
        """Start the bar and the lines."""
        super().__enter__()
        if self._is_shown:
            # A thread, since one bound may take longer than the time between two lines; a daemon, so that it never
            # keeps the process alive.
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar, or stop the lines."""
        self._is_over.set()
        if self._is_shown:
            self._lines.join(timeout=1.0)  # no line of it behind the answer
        super().__exit__(kind, error, trace)

    def show(self, decided: int, layouts: int) -> None:
        """Set the number of decided layouts and of all layouts."""
        self._text = f"{decided:,} of {layouts:,} layouts decided"
        if self._bar is not None:
            self._bar.update(self._task, total=layouts)
        self.update(decided, layouts=self._text)

    def found(self, step: SimulatedStep) -> None:
        """Print a layout that is faster than all before, an answer long before it is proved; at first one at most."""
        after_s = time.monotonic() - self._begin
        layout = f"{step.prediction.step_time_s * 1e3:,.0f} ms: {settings_words(step)}"
        self._best = f"found so far, after {after_s:.1f} s: {layout}"
        # Most answers take less than that, and need no line before them.
        if after_s >= self._first_s:
            self._print_best()

    def _print_best(self) -> None:
        line, self._best = self._best, ""
        if line and self._is_shown:
            self._print_above(line)

    def _write_lines(self) -> None:
        wait_s = self._first_s
        while not self._is_over.wait(wait_s):
            self._print_best()
            if self._bar is not None:
                return  # it shows the rest
            self._print_above(f"planning: {self._text}, {time.monotonic() - self._begin:.0f} s")
            wait_s = EVERY_S
