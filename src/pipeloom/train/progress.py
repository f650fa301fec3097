"""What a person sees while a run goes on: a bar on a terminal, a few lines elsewhere."""

import sys

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from pipeloom.progress import Bar

_LINES_WITHOUT_TERMINAL = 15


class StepProgress(Bar):
    """Progress over optimizer steps.

    Args:
        num_steps: of the run.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._every = max(1, num_steps // _LINES_WITHOUT_TERMINAL)
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        super().__init__(sys.stdout, *columns, total=num_steps, numbers="starting")

    def show(self, step: int, *, loss: float, grad_norm: float, tokens_per_s: float) -> None:
        """Report a step that is done, counted from 1."""
        numbers = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s"
        is_bar = self._update(step, numbers=numbers)
        if not is_bar and (step == 1 or step % self._every == 0 or step == self._num_steps):
            print(f"step {step}/{self._num_steps}  {numbers}", flush=True)  # noqa: T201  progress is output
