"""What backwards need later waits in the memory of the host: only as much as a budget takes, where it costs no time."""

from collections.abc import Sequence
from functools import partial

from pipeloom.errors import UserError
from pipeloom.passes.budget import checked, kept_on, refuse_missing, sizes_of
from pipeloom.passes.lower import lower
from pipeloom.passes.room import Clock, Plan, make_room, row_clock, settle
from pipeloom.schedule.clock import SecondsOf, nominal_s
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.schedule.schedule import Schedule


def offload(
    schedule: Schedule,
    kept: KeptBytes | None = None,
    *,
    budget_bytes: Sequence[float],
    seconds_of: SecondsOf = nominal_s,
    always_bytes: Sequence[float] | None = None,
) -> Schedule:
    """Offload what it takes to keep every rank within its budget, and reload it before its backward.

    Where a rank would hold too much, that is offloaded which is needed last. It leaves and comes back as late as it
    can, where its lane of the two between device and host is free, so that no backward waits for it on the clock of
    ``seconds_of``. Only where that is not enough, things come back late, and the step takes longer by what is exposed;
    ``pipeloom.simulate`` says by how much.

    Args:
        schedule: at any level, without offloads; compute actions alone are lowered first. One that is balanced stays
            so, and what partners accept counts.
        kept: what stages keep of micro-batches; ``None`` for 1 each.
        budget_bytes: for each rank the most that it may hold.
        seconds_of: seconds of every action, of ``OFFLOAD`` and ``RELOAD`` too. By default a backward is two
            forwards, and a transfer takes one.
        always_bytes: for each rank what it holds besides. ``None`` for nothing.

    Returns:
        The schedule with ``OFFLOAD`` and ``RELOAD``, at the level with communication.

    Raises:
        UserError: the schedule offloads already, arguments have a wrong length, or the budget cannot be kept: which
            ranks, and what is missing.
    """
    if any(row.is_kind(Kind.OFFLOAD).any() for row in schedule.rows):
        raise UserError("the schedule offloads already; start from one without OFFLOAD and RELOAD")
    schedule = lower(schedule)
    sizes = sizes_of(schedule, kept, always_bytes)
    budget = checked("budget_bytes", budget_bytes, schedule.num_ranks)
    found = settle(schedule, seconds_of, Kind.OFFLOAD, partial(_plans, schedule, seconds_of, sizes, budget))
    refuse_missing(found, seconds_of, sizes, budget)
    return found


def _plans(
    schedule: Schedule, seconds_of: SecondsOf, sizes: HeldBytes, budget: Sequence[float], clock: Clock
) -> list[Plan]:
    """For each rank what goes to the host and comes back when, on a clock."""
    held, moved = kept_on(schedule, clock, sizes), sizes.kept.moved(schedule)
    return [
        make_room(
            row_clock(schedule, rank, clock, held.of(rank), sizes=moved, out=Kind.OFFLOAD, seconds_of=seconds_of),
            most - sizes.always_bytes[rank],
            allows_late=True,
        )
        for rank, most in enumerate(budget)
    ]
