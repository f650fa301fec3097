"""What a person sees while a run goes on: a bar on a terminal, a few lines elsewhere."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_LINES_WITHOUT_TERMINAL = 15


def restore_terminal() -> None:
    """Show the cursor again, which a bar hides, after its process was stopped."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")


class StepProgress:
    """Progress over optimizer steps.

    Args:
        num_steps: of the run.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._every = max(1, num_steps // _LINES_WITHOUT_TERMINAL)
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
            )
            self._bar = Progress(*columns, console=Console())
            self._task = self._bar.add_task("", total=num_steps, numbers="starting")

    def __enter__(self) -> "StepProgress":
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, *, loss: float, grad_norm: float, tokens_per_s: float) -> None:
        """Report a step that is done, counted from 1."""
        numbers = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif step == 1 or step % self._every == 0 or step == self._num_steps:
            print(f"step {step}/{self._num_steps}  {numbers}", flush=True)  # noqa: T201  progress is output
