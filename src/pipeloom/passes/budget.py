"""What passes are told about bytes, and budgets of them."""

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.errors import UserError
from pipeloom.schedule.clock import SecondsOf, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.held import Bytes, Changes, KeptBytes, all_changes
from pipeloom.schedule.schedule import Schedule
from pipeloom.terminal.words import count


class Sizes(NamedTuple):
    """How large the things are that ranks hold.

    Attributes:
        kept: what stages keep of micro-batches.
        always: for each rank what it holds besides.
    """

    kept: KeptBytes
    always: tuple[float, ...]

    @classmethod
    def of(cls, schedule: Schedule, kept: KeptBytes | None, always_bytes: Sequence[float] | None) -> "Sizes":
        """Those that a caller of a pass names, see ``balance``.

        Raises:
            UserError: they are more or fewer than stages, slices or ranks, or one of them is negative or infinite; all
                of them are named.
        """
        kept = kept or KeptBytes()
        always = [0.0] * schedule.num_ranks if always_bytes is None else always_bytes
        lengths = [*[schedule.num_stages] * 3, schedule.num_slices]
        found = [(name, values, wanted) for (name, values), wanted in zip(kept._asdict().items(), lengths, strict=True)]
        problems = [_wrong(f"kept {name}", values, wanted) for name, values, wanted in found if len(values)]
        _refuse(*problems, _wrong("always_bytes", always, schedule.num_ranks))
        return cls(kept, tuple(always))

    def changes(self, schedule: Schedule, clock: tuple[Seconds, Seconds]) -> Changes:
        """When ranks hold how much more or less between forwards and backwards, for themselves and for partners."""
        return all_changes(schedule, *clock, self.kept)

    def moved(self, schedule: Schedule) -> Bytes:
        """For each stage, micro-batch and slice what can be moved of it."""
        return self.kept.moved(schedule)


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


def _wrong(name: str, values: Sequence[float], length: int) -> str:
    """What is wrong with some numbers of bytes; empty if nothing is."""
    if len(values) == length and all(0 <= value < float("inf") for value in values):
        return ""
    return f"{name} must be {count(length, 'number')} of at least 0, found {list(values)}"


def refuse_missing(schedule: Schedule, seconds_of: SecondsOf, sizes: Sizes, budget: Sequence[float]) -> None:
    """Hold a schedule against a budget.

    Raises:
        UserError: some rank holds more: which ones, and how much is missing.
    """
    held = sizes.changes(schedule, times(schedule, seconds_of))
    problems: list[str] = []
    for rank, most in enumerate(budget):
        needed = sizes.always[rank] + held.peak(rank)
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
