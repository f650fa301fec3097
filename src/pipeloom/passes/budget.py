"""Checks of the activation sizes and budgets that passes take, and of a schedule against a budget."""

from collections.abc import Sequence

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.clock import SecondsOf, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import LOAD_OF
from pipeloom.schedule.ledger import Balance, KeptBytes, Ledger, PerStage, most_in_rows
from pipeloom.schedule.schedule import Schedule
from pipeloom.terminal.words import count


def checked_kept(schedule: Schedule, kept: KeptBytes | None) -> KeptBytes:
    """Activation memory of each stage for a micro-batch; 1 each for ``None``.

    Raises:
        UserError: lengths that are not those of stages or slices, negative or infinite values; names all of them.
    """
    kept = kept or KeptBytes()
    wanted = {name: schedule.num_slices if name == "shares" else schedule.num_stages for name in KeptBytes._fields}
    given = [(name, values) for name, values in kept._asdict().items() if len(values)]
    _refuse([_wrong(f"kept {name}", values, wanted[name]) for name, values in given])
    return kept


def checked_budget(schedule: Schedule, budget_bytes: Sequence[float]) -> Sequence[float]:
    """For each rank its limit.

    Raises:
        UserError: not one number of bytes for each rank.
    """
    _refuse([_wrong("budget_bytes", budget_bytes, schedule.num_ranks)])
    return budget_bytes


def _refuse(problems: Sequence[str]) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise UserError("; ".join(found))


def _wrong(name: str, values: PerStage, length: int) -> str:
    """The problem of some numbers of bytes; empty without one."""
    found = np.asarray(values, np.float64)
    if len(found) == length and bool(((found >= 0) & np.isfinite(found)).all()):
        return ""
    return f"{name} must be {count(length, 'number')} of at least 0, found {list(values)}"


def kept_on(schedule: Schedule, clock: tuple[Seconds, Seconds], kept: KeptBytes) -> Balance:
    """Activation memory of ranks over time, for themselves and for partners."""
    return Ledger.of_kept(schedule, kept).on(schedule.num_ranks, *clock)


def refuse_missing(schedule: Schedule, seconds_of: SecondsOf, kept: KeptBytes, budget: Sequence[float]) -> None:
    """Compare the peaks of a schedule with a budget.

    Raises:
        UserError: ranks that hold more, with the missing bytes.
    """
    held = kept_on(schedule, times(schedule, seconds_of), kept)
    problems = [
        f"pipeline rank {rank} still holds {_excess(needed, most)}"
        for rank, most in enumerate(budget)
        if _exceeds(needed := held.peak(rank), most)
    ]
    if problems:
        raise UserError(
            f"the budget cannot be kept by moving what backwards need: {'; '.join(problems)}; allow more, or recompute"
        )


def unmoved_problems(schedule: Schedule, kept: KeptBytes, most: float) -> list[str]:
    """One sentence for each rank that moves no activation and holds more bytes than a budget.

    What the other ranks hold depends on the seconds of their moves.
    """
    facts = schedule.facts
    moving = set(facts.ranks[facts.where(*LOAD_OF)].tolist())
    return [
        f"pipeline rank {rank} moves nothing and holds {_excess(needed, most)}"
        for rank, needed in enumerate(most_in_rows(schedule, kept))
        if rank not in moving and _exceeds(needed, most)
    ]


def _exceeds(needed: float, most: float) -> bool:
    # Sums of bytes in another order differ by rounding.
    return needed > most * (1 + 1e-9)


def _excess(needed: float, most: float) -> str:
    return f"{_words(needed)}, {_words(needed - most)} more than its {_words(most)}"


def _words(amount: float) -> str:
    """Bytes, or a few stage inputs."""
    return f"{amount:,.0f} bytes" if amount >= 10_000 else f"{amount:.4g}"
