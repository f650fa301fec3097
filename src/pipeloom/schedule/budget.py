"""Budgets of bytes, and what else passes are told for each rank or stage."""

from collections.abc import Sequence

from pipeloom.errors import UserError
from pipeloom.schedule.clock import SecondsOf, times
from pipeloom.schedule.held import all_changes
from pipeloom.schedule.schedule import Schedule


def sized(name: str, values: Sequence[float] | None, length: int, default: float) -> tuple[float, ...]:
    """The values, or as many times the default.

    Raises:
        UserError: there are more or fewer than wanted, or one of them is negative or infinite.
    """
    if values is None:
        return (default,) * length
    if len(values) != length or not all(0 <= value < float("inf") for value in values):
        raise UserError(f"{name} must be {length} numbers of at least 0, found {list(values)}")
    return tuple(values)


def refuse_missing(
    schedule: Schedule,
    seconds_of: SecondsOf,
    sizes: Sequence[float],
    budget: Sequence[float],
    always: Sequence[float],
) -> None:
    """Hold a schedule against a budget.

    Raises:
        UserError: some rank holds more: which ones, and how much is missing.
    """
    held = all_changes(schedule, *times(schedule, seconds_of), sizes)
    problems: list[str] = []
    for rank, most in enumerate(budget):
        needed = always[rank] + held.peak(rank)
        if needed > most * (1 + 1e-9):
            problems.append(
                f"pipeline rank {rank} still needs {needed:.6g}, {needed - most:.3g} more than its {most:.6g}"
            )
    if problems:
        raise UserError(f"the budget cannot be kept by moving what backwards need: {'; '.join(problems)}")
