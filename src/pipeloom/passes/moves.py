"""Both passes that move what backwards need: to partners, then to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.passes.balance import balance
from pipeloom.passes.offload import offload
from pipeloom.schedule.clock import SecondsOf, nominal_s
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

    Args:
        schedule: as ``balance`` and ``offload`` take it.
        moves: what may move.
        kept: what stages keep of micro-batches; ``None`` for 1 each.
        seconds_of: seconds of every action, see there.
        partners: pairs to take instead of those of the profile.

    Raises:
        UserError: see there; one is that the budget cannot be kept.
    """
    budget = None if moves.budget_bytes is None else [moves.budget_bytes] * schedule.num_ranks
    if moves.balance:
        # With both, pairs share evenly first, and only what is still too much takes the slower way to the host.
        own = None if moves.offload else budget
        schedule = balance(schedule, kept, seconds_of=seconds_of, budget_bytes=own, partners=partners)
    if moves.offload and budget is not None:
        schedule = offload(schedule, kept, seconds_of=seconds_of, budget_bytes=budget)
    return schedule
