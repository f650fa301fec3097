"""What passes are told about bytes, and budgets of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.errors import UserError
from pipeloom.schedule.clock import SecondsOf, times
from pipeloom.schedule.graph import Seconds
from pipeloom.schedule.held import Bytes, Changes, Kept, all_changes
from pipeloom.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class SizesGiven:
    """What callers of the passes may say about sizes: arguments of ``balance`` and ``offload``, see there."""

    input_bytes: Sequence[float] | None = None
    recomputed_bytes: Sequence[float] | None = None
    pending_bytes: Sequence[float] | None = None
    always_bytes: Sequence[float] | None = None
    slice_shares: Sequence[float] = ()


@dataclass(frozen=True)
class Sizes:
    """How large the things are that ranks hold.

    Attributes:
        inputs: for each stage what a micro-batch keeps from forward to backward.
        recomputed: the same where it is recomputed, until it is.
        pending: the same between the halves of a backward that is split; empty for as much as before.
        always: for each rank what it holds besides.
        shares: of each token slice in what a micro-batch keeps; empty where they are alike.
    """

    inputs: tuple[float, ...]
    recomputed: tuple[float, ...]
    always: tuple[float, ...]
    pending: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        *,
        input_bytes: Sequence[float] | None = None,
        recomputed_bytes: Sequence[float] | None = None,
        pending_bytes: Sequence[float] | None = None,
        always_bytes: Sequence[float] | None = None,
        slice_shares: Sequence[float] = (),
    ) -> "Sizes":
        """Those that a caller names, see ``balance``.

        Raises:
            UserError: there are more or fewer than stages or ranks, or one of them is negative or infinite.
        """
        stages, ranks = schedule.num_stages, schedule.num_ranks
        return cls(
            checked("input_bytes", input_bytes if input_bytes is not None else [1.0] * stages, stages),
            checked("recomputed_bytes", recomputed_bytes if recomputed_bytes is not None else [0.0] * stages, stages),
            checked("always_bytes", always_bytes if always_bytes is not None else [0.0] * ranks, ranks),
            checked("pending_bytes", pending_bytes, stages) if pending_bytes is not None else (),
            checked("slice_shares", slice_shares, schedule.num_slices) if slice_shares else (),
        )

    @property
    def _kept(self) -> Kept:
        return Kept(self.inputs, self.pending, self.recomputed, self.shares)

    def changes(self, schedule: Schedule, clock: tuple[Seconds, Seconds]) -> Changes:
        """When ranks hold how much more or less between forwards and backwards, for themselves and for partners."""
        return all_changes(schedule, *clock, self._kept)

    def moved(self, schedule: Schedule) -> Bytes:
        """For each stage, micro-batch and slice what can be moved of it."""
        return self._kept.moved(schedule)


def checked(name: str, values: Sequence[float], length: int) -> tuple[float, ...]:
    """The values, if they are as many as wanted, and numbers of bytes.

    Raises:
        UserError: they are not.
    """
    if len(values) != length or not all(0 <= value < float("inf") for value in values):
        raise UserError(f"{name} must be {length} numbers of at least 0, found {list(values)}")
    return tuple(values)


def refuse_missing(schedule: Schedule, seconds_of: SecondsOf, sizes: Sizes, budget: Sequence[float]) -> None:
    """Hold a schedule against a budget.

    Raises:
        UserError: some rank holds more: which ones, and how much is missing.
    """
    held = sizes.changes(schedule, times(schedule, seconds_of))
    problems: list[str] = []
    for rank, most in enumerate(budget):
        needed = sizes.always[rank] + held.peak(rank)
        if needed > most * (1 + 1e-9):
            problems.append(
                f"pipeline rank {rank} still needs {_told(needed)}, {_told(needed - most)} more than its {_told(most)}"
            )
    if problems:
        raise UserError(
            f"the budget cannot be kept by moving what backwards need: {'; '.join(problems)}; allow more, or recompute"
        )


def _told(amount: float) -> str:
    """Bytes, or a few stage inputs."""
    return f"{amount:,.0f} bytes" if amount >= 10_000 else f"{amount:.4g}"
