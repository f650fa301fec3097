"""What a described run moves away between forward and backward: to partners, to the host."""

from collections.abc import Callable
from dataclasses import replace

from pipeloom.config import RunConfig
from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.cost.moves import evict_seconds, offload_seconds
from pipeloom.cost.placed import Placed
from pipeloom.passes.balance import find_partners
from pipeloom.passes.moves import Moves
from pipeloom.recipe import PlacedBy
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import KeptBytes


def why_schedules_may_differ(config: RunConfig) -> str | None:
    """Why ``train`` may run another schedule than ``simulate``; ``None`` where both make the same one.

    Everything else of a schedule comes from the configuration alone (``tests/train/test_same_schedule.py``).
    """
    schedule = config.schedule
    moved = [f"schedule.{name}" for name in ("balance", "offload") if getattr(schedule, name)]
    reasons: list[str] = []
    if moved:
        reasons.append(
            f"with {' and '.join(moved)} train counts the bytes that PyTorch keeps and has no seconds, simulate "
            "takes both from closed forms"
        )
    if config.layout.token_slices == "auto":
        reasons.append("with layout.token_slices auto train measures slices, simulate predicts them")
    return f"the trained schedule may differ from the simulated one: {'; '.join(reasons)}" if reasons else None


class MovePrices:
    """Seconds by which moves are placed, with those of the moves themselves.

    Args:
        placed: what is trained; which links moves take depends on where ranks stand.
        costs: of everything else, of whole micro-batches.
        price: from them those of the schedule's actions, which may be of token slices.
        moves: what moves.
    """

    def __init__(self, placed: Placed, costs: StageCosts, price: Callable[[StageCosts], Costs], moves: Moves) -> None:
        self._placed, self._price, self._moves = placed, price, moves
        self.costs = costs
        """Of whole micro-batches; with those of moving them once ``place`` was called."""

    def place(self, schedule: Schedule, kept: KeptBytes) -> PlacedBy:
        """Seconds of every action, and who evicts to whom.

        Raises:
            UserError: the cluster does not say how fast a device reaches its host.
        """
        run, cluster, software = self._placed.run, self._placed.cluster, self._placed.software
        partners = None
        if self._moves.balance:
            partners = find_partners(schedule, kept, seconds_of=self._price(self.costs).seconds)
            seconds = evict_seconds(run, cluster, software, partners, kept.whole)
            # Kept, since the step is simulated with the prices by which its moves were placed.
            self.costs = replace(self.costs, evict_s=seconds)
        if self._moves.offload and self._moves.budget_bytes is not None:
            self.costs = replace(self.costs, offload_s=offload_seconds(run, cluster, kept.whole))
        return PlacedBy(self._price(self.costs).seconds, partners)
