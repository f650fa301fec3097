"""Sizes and budgets that passes take of what is kept for backwards: checked, and compared with what ranks hold."""

from collections.abc import Sequence

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.clock import SecondsOf, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.ledger import Balance, KeptBytes, Ledger, PerStage
from pipeloom.schedule.schedule import Schedule
from pipeloom.terminal.words import count


def checked_kept(schedule: Schedule, kept: KeptBytes | None) -> KeptBytes:
    """What stages keep of micro-batches; 1 each for ``None``.

    Raises:
        UserError: values are more or fewer than stages or slices, or one is negative or infinite; all are named.
    """
    kept = kept or KeptBytes()
    wanted = {name: schedule.num_slices if name == "shares" else schedule.num_stages for name in KeptBytes._fields}
    given = [(name, values) for name, values in kept._asdict().items() if len(values)]
    _refuse([_wrong(f"kept {name}", values, wanted[name]) for name, values in given])
    return kept


def checked_budget(schedule: Schedule, budget_bytes: Sequence[float]) -> Sequence[float]:
    """For each rank the most that it may hold.

    Raises:
        UserError: they are not numbers of bytes, one for each rank.
    """
    _refuse([_wrong("budget_bytes", budget_bytes, schedule.num_ranks)])
    return budget_bytes


def _refuse(problems: Sequence[str]) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise UserError("; ".join(found))


def _wrong(name: str, values: PerStage, length: int) -> str:
    """What is wrong with some numbers of bytes; empty if nothing is."""
    found = np.asarray(values, np.float64)
    if len(found) == length and bool(((found >= 0) & np.isfinite(found)).all()):
        return ""
    return f"{name} must be {count(length, 'number')} of at least 0, found {list(values)}"


def kept_on(schedule: Schedule, clock: tuple[Seconds, Seconds], kept: KeptBytes) -> Balance:
    """What ranks keep between forwards and backwards on a clock, for themselves and for partners."""
    return Ledger.of_kept(schedule, kept).on(schedule.num_ranks, *clock)


def refuse_missing(schedule: Schedule, seconds_of: SecondsOf, kept: KeptBytes, budget: Sequence[float]) -> None:
    """Compare what a schedule holds with a budget.

    Raises:
        UserError: some rank holds more: which ones, and how much is missing.
    """
    held = kept_on(schedule, times(schedule, seconds_of), kept)
    # Sums of bytes in another order differ by rounding.
    problems = [
        f"pipeline rank {rank} still holds {_words(needed)}, {_words(needed - most)} more than its {_words(most)}"
        for rank, most in enumerate(budget)
        if (needed := held.peak(rank)) > most * (1 + 1e-9)
    ]
    if problems:
        raise UserError(
            f"the budget cannot be kept by moving what backwards need: {'; '.join(problems)}; allow more, or recompute"
        )


def _words(amount: float) -> str:
    """Bytes, or a few stage inputs."""
    return f"{amount:,.0f} bytes" if amount >= 10_000 else f"{amount:.4g}"
