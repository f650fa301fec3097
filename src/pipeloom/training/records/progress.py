"""Progress of a training run: lines with losses, and a progress bar where the output is a terminal."""

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from pipeloom.terminal.progress import Bar

_LINES, _LINES_WITHOUT_TERMINAL = 10, 15
"""Approximate number of lines that a run prints, on a terminal and elsewhere."""
_PAUSE_S = 5.0
"""Minimum seconds between two lines on a terminal, where the bar shows every step."""


class StepProgress(Bar):
    """Progress over optimizer steps; prints nothing where ``is_shown`` is false (all ranks but 0)."""

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
        """Remove the bar, and print the line of the last completed step."""
        super().__exit__(kind, error, trace)
        if not self._is_left:
            self._leave()

    def show(
        self, step: int, *, loss: float, grad_norm: float, tokens_per_s: float, validation_loss: float | None = None
    ) -> None:
        """Show a completed step, counted from 1."""
        if not self._is_shown:
            return
        numbers = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s"
        if validation_loss is not None:
            numbers += f"  validation {validation_loss:.4f}"
        self._line, self._is_left = f"step {step}/{self._num_steps}  {numbers}", False
        is_bar = self.update(step, numbers=numbers)
        # More lines without a terminal, where no bar shows progress.
        every = max(1, self._num_steps // (_LINES if is_bar else _LINES_WITHOUT_TERMINAL))
        is_due = step % every == 0 and time.monotonic() > self._left_s + _PAUSE_S
        is_due |= validation_loss is not None
        # A log gets the line of step 1 at once: it shows that the run works, and its speed.
        if is_due or (not is_bar and (step % every == 0 or step == 1)):
            self._leave()

    def _leave(self) -> None:
        self._print_above(self._line)
        self._is_left, self._left_s = True, time.monotonic()
