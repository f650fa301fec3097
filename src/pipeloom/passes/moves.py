"""What backwards need moves while it is not used: to the memory of the host, or to partners first (``balance``)."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What may move.

    Attributes:
        balance: whether full pipeline ranks evict to empty ones.
        offload: whether what is too much for the budget goes to the host; not without one.
        budget_bytes: the most that each rank may hold; ``None``: pairs of ranks share evenly.
    """

    balance: bool = False
    offload: bool = False
    budget_bytes: float | None = None

    @property
    def is_any(self) -> bool:
        """Whether anything may move."""
        return self.balance or self.offload


def add_moves(
    schedule: Schedule,
    moves: Moves,
    kept: KeptBytes | None = None,
    *,
    seconds_of: SecondsOf = nominal_s,
    partners: Sequence[int] | None = None,
) -> Schedule:
    """``balance`` or ``offload`` or both: then pairs of ranks share first, and the host takes what is still too much.

    Arguments and errors are those of ``balance`` and ``offload``.
    """
    budget = None if moves.budget_bytes is None else [moves.budget_bytes] * schedule.num_ranks
    if moves.balance:
        # With both, pairs share evenly first, and only what is still too much takes the slower way to the host.
        own = None if moves.offload else budget
        schedule = balance(schedule, kept, seconds_of=seconds_of, budget_bytes=own, partners=partners)
    if moves.offload and budget is not None:
        schedule = offload(schedule, kept, seconds_of=seconds_of, budget_bytes=budget)
    return schedule


def offload(
    schedule: Schedule,
    kept: KeptBytes | None = None,
    *,
    budget_bytes: Sequence[float],
    seconds_of: SecondsOf = nominal_s,
) -> Schedule:
    """Offload what it takes to keep every rank within its budget, and reload it before its backward.

    Where a rank would hold too much, that is offloaded which is needed last. It leaves and comes back as late as it
    can, where its lane of the two between device and host is free, so that no backward waits for it on the clock of
    ``seconds_of``. Only where that is not enough, things come back late, and the step takes longer by what is exposed;
    ``pipeloom.simulation`` says by how much.

    Args:
        schedule: at any level, without offloads; compute actions alone are lowered first. One that is balanced stays
            so, and what partners accept counts.
        kept: what stages keep of micro-batches; ``None`` for 1 each.
        budget_bytes: for each rank the most that it may hold.
        seconds_of: seconds of every action, of ``OFFLOAD`` and ``RELOAD`` too. By default a backward is two
            forwards, and a transfer takes one.

    Returns:
        The schedule with ``OFFLOAD`` and ``RELOAD``, at the level with communication.

    Raises:
        UserError: the schedule offloads already, arguments have a wrong length, or the budget cannot be kept: which
            ranks, and what is missing.
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
