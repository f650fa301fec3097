"""Offloads activations to host memory, alone or after ``balance`` has evicted some to partner ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.passes.balance import balance
from pipeloom.passes.budget import checked_budget, checked_kept, kept_on, refuse_missing
from pipeloom.passes.lower_messages import lower
from pipeloom.passes.room import Clock, Plan, make_room, row_clock, settle
from pipeloom.schedule.clock import SecondsOf, nominal_s
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Moves:
    """How activations leave ranks between forward and backward.

    Attributes:
        balance: whether full pipeline ranks evict to empty ones.
        offload: whether activations beyond the budget go to the host; needs a budget.
        budget_bytes: limit of activation memory of each rank; ``None``: pairs of ranks share evenly.
    """

    balance: bool = False
    offload: bool = False
    budget_bytes: float | None = None

    @property
    def is_any(self) -> bool:
        """Whether any activation may move."""
        return self.balance or self.offload


@checked
def add_moves(
    schedule: Schedule,
    moves: Moves,
    kept: KeptBytes | None = None,
    *,
    seconds_of: SecondsOf = nominal_s,
    partners: Sequence[int] | None = None,
) -> Schedule:
    """Apply ``balance``, ``offload`` or both: first pairs of ranks share, then the host takes the rest.

    Arguments and errors are those of ``balance`` and ``offload``.
    """
    budget = None if moves.budget_bytes is None else [moves.budget_bytes] * schedule.num_ranks
    if moves.balance:
        # With both, pairs share evenly first, and only the rest takes the slower way to the host.
        own = None if moves.offload else budget
        schedule = balance(schedule, kept, seconds_of=seconds_of, budget_bytes=own, partners=partners)
    if moves.offload and budget is not None:
        schedule = offload(schedule, kept, seconds_of=seconds_of, budget_bytes=budget)
    return schedule


@checked
def offload(
    schedule: Schedule,
    kept: KeptBytes | None = None,
    *,
    budget_bytes: Sequence[float],
    seconds_of: SecondsOf = nominal_s,
) -> Schedule:
    """Offload as few activations as keep every rank within its budget, and reload them before their backwards.

    Where a rank would exceed its budget, the activations with the latest backward are offloaded. Both transfers start
    as late as possible while their lane is free, so that no backward waits for them on the clock of ``seconds_of``.
    Only where that is not enough, reloads are late, and the step takes longer by what is exposed
    (``pipeloom.simulate``).

    Args:
        schedule: at any level, without offloads; a compute-only schedule is lowered first. Evictions of a balanced one
            stay, and activations that partners accept count.
        kept: activation memory of each stage for a micro-batch; ``None`` for 1 each.
        budget_bytes: for each rank its limit.
        seconds_of: seconds of every action, of ``OFFLOAD`` and ``RELOAD`` too. By default a backward is two
            forwards, and a transfer takes one.

    Returns:
        The schedule with ``OFFLOAD`` and ``RELOAD``, at the level with communication.

    Raises:
        UserError: the schedule offloads already, arguments have a wrong length, or ranks cannot keep the budget; names
            them and the missing bytes.
    """
    if schedule.facts.has(Kind.OFFLOAD):
        raise UserError("the schedule offloads already; start from one without OFFLOAD and RELOAD")
    schedule = lower(schedule)
    kept, budget = checked_kept(schedule, kept), checked_budget(schedule, budget_bytes)

    def plan(clock: Clock) -> list[Plan]:
        held, moved = kept_on(schedule, clock, kept), kept.moved(schedule)
        rows = (
            row_clock(schedule, rank, clock, held.of(rank), sizes=moved, out=Kind.OFFLOAD, seconds_of=seconds_of)
            for rank in range(schedule.num_ranks)
        )
        return [make_room(row, most, allows_late=True) for row, most in zip(rows, budget, strict=True)]

    found = settle(schedule, seconds_of, Kind.OFFLOAD, plan)
    refuse_missing(found, seconds_of, kept, budget)
    return found
