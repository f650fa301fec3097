"""Sizes that callers of passes give, and budgets of bytes."""

from collections.abc import Sequence

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.clock import SecondsOf, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.ledger import Balance, HeldBytes, KeptBytes, Ledger, PerStage
from pipeloom.schedule.schedule import Schedule
from pipeloom.terminal.words import count


def sizes_of(schedule: Schedule, kept: KeptBytes | None, always_bytes: Sequence[float] | None) -> HeldBytes:
    """What a caller of a pass says that ranks hold, see ``balance``.

    Raises:
        UserError: they are more or fewer than stages, slices or ranks, or one of them is negative or infinite; all
            of them are named.
    """
    kept = kept or KeptBytes()
    always = [0.0] * schedule.num_ranks if always_bytes is None else always_bytes
    wanted = {name: schedule.num_slices if name == "shares" else schedule.num_stages for name in KeptBytes._fields}
    problems = [_wrong(f"kept {name}", values, wanted[name]) for name, values in kept._asdict().items() if len(values)]
    _refuse(*problems, _wrong("always_bytes", always, schedule.num_ranks))
    return HeldBytes(always_bytes=tuple(always), kept=kept)


def kept_on(schedule: Schedule, clock: tuple[Seconds, Seconds], sizes: HeldBytes) -> Balance:
    """What ranks keep between forwards and backwards on a clock, for themselves and for partners."""
    return Ledger.of_kept(schedule, sizes.kept).on(schedule.num_ranks, *clock)


def checked(name: str, values: Sequence[float], length: int) -> tuple[float, ...]:
    """The values, if they are as many as wanted, and numbers of bytes.

    Raises:
        UserError: they are not.
    """
    _refuse(_wrong(name, values, length))
    return tuple(values)


def _refuse(*problems: str) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise UserError("; ".join(found))


def _wrong(name: str, values: PerStage, length: int) -> str:
    """What is wrong with some numbers of bytes; empty if nothing is."""
    found = np.asarray(values, np.float64)
    if len(found) == length and bool(((found >= 0) & np.isfinite(found)).all()):
        return ""
    return f"{name} must be {count(length, 'number')} of at least 0, found {list(values)}"


def refuse_missing(schedule: Schedule, seconds_of: SecondsOf, sizes: HeldBytes, budget: Sequence[float]) -> None:
    """Hold a schedule against a budget.

    Raises:
        UserError: some rank holds more: which ones, and how much is missing.
    """
    held = kept_on(schedule, times(schedule, seconds_of), sizes)
    problems: list[str] = []
    for rank, most in enumerate(budget):
        needed = sizes.always_bytes[rank] + held.peak(rank)
        # Sums of bytes in another order differ by rounding.
        if needed > most * (1 + 1e-9):
            problems.append(
                f"pipeline rank {rank} still holds {_told(needed)}, {_told(needed - most)} more than its {_told(most)}"
            )
    if problems:
        raise UserError(
            f"the budget cannot be kept by moving what backwards need: {'; '.join(problems)}; allow more, or recompute"
        )


def _told(amount: float) -> str:
    """Bytes, or a few stage inputs."""
    return f"{amount:,.0f} bytes" if amount >= 10_000 else f"{amount:.4g}"
