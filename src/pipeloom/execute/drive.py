"""Runs a rank's row in its process, which waits where the row has to."""

from collections.abc import Callable, Sequence

from torch import Tensor

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.executor import Executor, StepResult, Steps
from pipeloom.execute.stages.stage import Objective


def run_rank(
    executor: Executor,
    inputs: Sequence[Tensor],
    objective: Objective | None,
    timeout_s: float = 60.0,
    positions: Callable[[], str] | None = None,
) -> StepResult:
    """Run one rank's row, waiting for the other ranks where it must.

    Args:
        executor: of this process's rank.
        inputs: the first stage's input for each micro-batch.
        objective: applied to the last stage's output.
        timeout_s: longest wait for one tensor.
        positions: returns where all ranks are, for the message of a stall.

    Raises:
        StallError: a tensor did not come in time.
        RunError: an action failed.
    """
    try:
        return _wait_through(executor, executor.steps(inputs, objective), timeout_s, positions)
    except BaseException as error:
        try:
            if isinstance(error, PeerLostError | StallError):  # what failed beside the row may be what led to it
                executor.check_services()
            raise
        finally:
            # Tensors of a failed step would be taken for those of the next one.
            executor.forget()


def _wait_through(
    executor: Executor, steps: Steps, timeout_s: float, positions: Callable[[], str] | None
) -> StepResult:
    while True:
        try:
            transfer = next(steps)
        except StopIteration as end:
            return end.value
        except StallError as error:  # in the middle of an action
            raise StallError(f"{error}{_everyone(positions)}") from error
        if not transfer.wait(timeout_s):
            raise StallError(f"waited {timeout_s:g} s in vain: {executor.position()}{_everyone(positions)}")


def _everyone(positions: Callable[[], str] | None) -> str:
    return "" if positions is None else f"\nevery rank's position:\n{positions()}"
