"""Who resumes a rank that waits: its own process, or the one process that plays all ranks."""

from collections.abc import Callable, Sequence

from torch import Tensor

from pipeloom.errors import PeerLostError, StallError
from pipeloom.execute.communication.transport import Pending
from pipeloom.execute.communication.turns import Turn
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


def run_in_process(
    executors: Sequence[Executor], inputs: Sequence[Tensor], objective: Objective | None
) -> list[StepResult]:
    """Run all ranks of a pipeline in this process: each in turn, as far as it gets. Deterministic.

    Args:
        executors: one for each pipeline rank, in order, on transports of one ``Post``.
        inputs: the first stage's input for each micro-batch.
        objective: applied to the last stage's output.

    Returns:
        Each rank's result.

    Raises:
        StallError: no rank can go on, which a verified schedule excludes.
        RunError: an action failed.
    """
    return play_in_process([(executor, executor.steps(inputs, objective)) for executor in executors])


def play_in_process(ranks: Sequence[tuple[Executor, Steps]], *, in_turns: bool = False) -> list[StepResult]:
    """Run ranks of any number of pipelines that work together, as ``run_in_process`` does those of one.

    Args:
        ranks: each rank's executor with its steps, which no one has begun.
        in_turns: whether ranks wait for each other in the middle of a stage, as tensor-parallel ones do. Each then
            runs in a thread of its own, one at a time.

    Returns:
        Each rank's result.

    Raises:
        StallError: no rank can go on, which a verified schedule excludes.
        RunError: an action failed.
    """
    running = {rank: Turn(steps) if in_turns else steps for rank, (_, steps) in enumerate(ranks)}
    try:
        return _play(ranks, running)
    except BaseException:
        for steps in running.values():
            steps.close()
        for executor, _ in ranks:
            executor.forget()
        raise


def _play(ranks: Sequence[tuple[Executor, Steps]], running: dict[int, Turn | Steps]) -> list[StepResult]:
    waiting: dict[int, Pending] = {}
    results: dict[int, StepResult] = {}
    while running:
        # All that can go on, in their order, before any goes on: so every run has the same order of events.
        ready = [rank for rank in running if rank not in waiting or waiting[rank].is_done()]
        if not ready:
            positions = "\n".join(f"  {ranks[rank][0].position()}" for rank in running)
            raise StallError(f"no rank can go on:\n{positions}")
        for rank in ready:
            try:
                waiting[rank] = next(running[rank])
            except StopIteration as end:
                results[rank] = end.value
                del running[rank]
    return [results[rank] for rank in range(len(ranks))]
