"""What a described run moves away between forward and backward: to partners, to the host."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.moves import evict_seconds, offload_seconds
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software
from pipeloom.passes.balance import find_partners
from pipeloom.passes.moves import Moves, add_moves
from pipeloom.predict.memory import held_bytes
from pipeloom.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Moving:
    """What moves.

    Attributes:
        balance: whether full pipeline ranks evict to empty ones.
        offload: whether what ``activation_bytes`` has no room for goes to the host.
        activation_bytes: what each rank has for what backwards need; ``None``: pairs of ranks share evenly.
    """

    balance: bool = False
    offload: bool = False
    activation_bytes: float | None = None

    @property
    def is_any(self) -> bool:
        """Whether anything may move."""
        return self.balance or self.offload


class Placed(NamedTuple):
    """A run, where, and with what."""

    run: Run
    cluster: Cluster
    software: Software


def with_moves(
    schedule: Schedule, placed: Placed, costs: StageCosts, price: Callable[[StageCosts], Costs], moving: Moving
) -> tuple[Schedule, StageCosts]:
    """The schedule with what moves, and the costs of whole micro-batches with those of moving them.

    Args:
        schedule: as it would be simulated without.
        placed: what is trained; which links moves take depends on where ranks stand.
        costs: of everything else, of whole micro-batches.
        price: from them those of the schedule's actions, which may be of token slices.
        moving: what moves.

    Raises:
        UserError: a rank needs more than its bytes, or the cluster does not say how fast a device reaches its host.
    """
    run, cluster, software = placed
    kept = held_bytes(run, software, schedule).kept
    room = None if moving.activation_bytes is None else [moving.activation_bytes] * schedule.num_ranks
    moves = Moves(to_partners=moving.balance, to_host=moving.offload, budget_bytes=room)
    partners = None
    if moving.balance:
        partners = find_partners(schedule, kept, seconds_of=price(costs).seconds)
        costs = replace(costs, evict_s=evict_seconds(run, cluster, software, partners, kept.whole))
    if moving.offload and room is not None:
        costs = replace(costs, offload_s=offload_seconds(run, cluster, kept.whole))
    seconds_of = price(costs).seconds
    return add_moves(schedule, moves, kept, seconds_of=seconds_of, partners=partners), costs
