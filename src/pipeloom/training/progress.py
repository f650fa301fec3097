"""What a person sees while a run goes on: lines of losses, below them a bar on a terminal."""

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from pipeloom.terminal.progress import Bar

_LINES, _LINES_WITHOUT_TERMINAL = 10, 15
"""How many lines a run leaves, about."""
_PAUSE_S = 5.0
"""Least seconds between two lines above a bar, which itself shows every step."""


class StepProgress(Bar):
    """Progress over optimizer steps; some ranks show none."""

    def __init__(self, num_steps: int, *, is_shown: bool = True) -> None:
        self._num_steps, self._is_shown = num_steps, is_shown
        self._line = ""
        self._is_left = True
        self._left_s = time.monotonic()
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        super().__init__(sys.stdout, *columns, total=num_steps, is_shown=is_shown, transient=True, numbers="starting")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away, and leave the line of the last step that was done."""
        super().__exit__(kind, error, trace)
        if not self._is_left:
            self._leave()

    def show(self, step: int, *, loss: float, grad_norm: float, tokens_per_s: float) -> None:
        """Report a step that is done, counted from 1."""
        if not self._is_shown:
            return
        numbers = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s"
        self._line, self._is_left = f"step {step}/{self._num_steps}  {numbers}", False
        is_bar = self.update(step, numbers=numbers)
        # More lines without a terminal, where no bar shows that the run goes on.
        every = max(1, self._num_steps // (_LINES if is_bar else _LINES_WITHOUT_TERMINAL))
        is_due = step % every == 0 and time.monotonic() > self._left_s + _PAUSE_S
        # The first line of a log comes at once: it shows that the run works and how fast.
        if is_due if is_bar else step % every == 0 or step == 1:
            self._leave()

    def _leave(self) -> None:
        self._print_above(self._line)
        self._is_left, self._left_s = True, time.monotonic()
