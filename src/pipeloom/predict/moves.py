"""Seconds of moving activations to partners and to the host, and their placement by these seconds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeloom.cost.costs import ActionCosts, StageCosts
from pipeloom.cost.exchanges import evict_seconds, offload_seconds
from pipeloom.cost.placed import Placed
from pipeloom.passes.balance import find_partners
from pipeloom.passes.moves import Moves
from pipeloom.recipe import PlacedBy, Timing
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import KeptBytes


def with_moves(
    costs: StageCosts, placed: Placed, moves: Moves, partners: Sequence[int] | None, kept: KeptBytes
) -> StageCosts:
    """Add the seconds of moving activations to costs.

    Args:
        costs: of all other actions, for whole micro-batches.
        placed: the run; its nodes determine the links of the moves.
        moves: kinds of moves.
        partners: for each rank its partner; ``None`` without evictions.
        kept: bytes that stages keep of a micro-batch.

    Raises:
        UserError: the cluster's file has no ``[host]`` link.
    """
    if partners is not None:
        costs = replace(costs, evict_s=evict_seconds(placed, partners, kept.by_stage(placed.run.num_stages)))
    if moves.offload and moves.budget_bytes is not None:
        costs = replace(costs, offload_s=offload_seconds(placed, kept.by_stage(placed.run.num_stages)))
    return costs


def by_seconds(costs: StageCosts, placed: Placed, moves: Moves, price: Callable[[StageCosts], ActionCosts]) -> Timing:
    """A ``Timing`` that places moves by the predicted seconds of the step.

    Args:
        costs: see ``with_moves``.
        placed: see ``with_moves``.
        moves: see ``with_moves``.
        price: converts costs of whole micro-batches to those of the schedule's actions, such as token slices.
    """

    def place(schedule: Schedule, kept: KeptBytes) -> PlacedBy:
        partners = find_partners(schedule, kept, seconds_of=price(costs).seconds) if moves.balance else None
        return PlacedBy(price(with_moves(costs, placed, moves, partners, kept)).seconds, partners)

    return place
