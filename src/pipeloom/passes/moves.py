"""Both passes that move what backwards need: to partners, then to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.passes.balance import balance
from pipeloom.passes.offload import offload
from pipeloom.schedule.clock import SecondsOf, nominal_s
from pipeloom.schedule.held import KeptBytes
from pipeloom.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What may move.

    Attributes:
        to_partners: whether full pipeline ranks evict to empty ones.
        to_host: whether what is too much for the budget goes to the host; not without one.
        budget_bytes: for each rank the most that it may hold; ``None``: pairs of ranks share evenly.
    """

    to_partners: bool = False
    to_host: bool = False
    budget_bytes: Sequence[float] | None = None


def add_moves(
    schedule: Schedule,
    moves: Moves,
    kept: KeptBytes | None = None,
    *,
    seconds_of: SecondsOf = nominal_s,
    partners: Sequence[int] | None = None,
) -> Schedule:
    """``balance`` or ``offload`` or both: then pairs of ranks share first, and the host takes what is still too much.

    Args:
        schedule: as ``balance`` and ``offload`` take it.
        moves: what may move.
        kept: what stages keep of micro-batches; ``None`` for 1 each.
        seconds_of: seconds of every action, see there.
        partners: pairs to take instead of those of the profile.

    Raises:
        UserError: see there; one is that the budget cannot be kept.
    """
    budget = moves.budget_bytes
    if moves.to_partners:
        own = None if moves.to_host else budget
        schedule = balance(schedule, kept, seconds_of=seconds_of, budget_bytes=own, partners=partners)
    if moves.to_host and budget is not None:
        schedule = offload(schedule, kept, seconds_of=seconds_of, budget_bytes=budget)
    return schedule
