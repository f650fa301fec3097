"""The work of a step, of which an order is searched, and what an order of it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipeloom.cost.costs import ActionCosts
from pipeloom.errors import UserError
from pipeloom.orders.bound import least_step_s
from pipeloom.schedule import Row, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS
from pipeloom.schedule.ledger import KeptBytes, most_in_rows
from pipeloom.simulation import Sharing, simulate
from pipeloom.trace import Trace

ROUNDING = 1 + 1e-9
"""Factor within which sums of seconds and bytes are equal."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes and exchanges, without an order.

    Attributes:
        start: compute actions in any order; every rank has equally many stages.
        complete: adds messages, gathers and reductions to a schedule of compute actions; raises a ``UserError`` where
            that is impossible.
        costs: seconds of every action.
        sharing: resources that actions share.
        kept: activation memory.
        room: for each rank its limit of activation memory, in the unit of ``kept``.
        splits: whether backwards may be split into input gradient and weight gradient.
    """

    start: Schedule
    complete: Callable[[Schedule], Schedule]
    costs: ActionCosts
    sharing: Sharing | None = None
    kept: KeptBytes = field(default_factory=KeptBytes)
    room: Sequence[float]
    splits: bool = True

    def judged(self, rows: Sequence[Row], origin: str) -> "Judged | None":
        """What an order takes; ``None`` if it is illegal or needs more memory."""
        try:
            schedule = replace(self.start, rows=tuple(rows), max_stage_inputs=None)
            if not self.has_room(schedule):
                return None
            whole = self.complete(schedule.promising_its_peak())
        # An order that deadlocks, or that leaves no place for an exchange.
        except UserError:
            return None
        return Judged(schedule, whole, simulate(whole, self.costs, self.sharing), origin)

    def has_room(self, schedule: Schedule) -> bool:
        """Whether every rank keeps within its memory."""
        held = most_in_rows(schedule, self.kept)
        return all(most <= room * ROUNDING for most, room in zip(held, self.room, strict=True))

    def least_s(self, whole: Schedule) -> float:
        """Lower bound of the step time of all orders (``least_step_s``).

        Args:
            whole: any order with all exchanges.
        """
        return least_step_s(whole, self.costs, self.sharing, splits=self.splits, most_inputs=self.most_inputs)

    @property
    def most_inputs(self) -> tuple[int, ...]:
        """For each stage the most micro-batches whose activations its rank has room for."""
        (num_stages, count, _), owner = self.start.facts.shape, self.start.placement.rank_by_stage
        return tuple(
            count if each <= 0 else int(min(count, self.room[rank] * ROUNDING / each))
            for each, rank in zip(self.kept.by_stage(num_stages), owner, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Judged:
    """An order with its simulated step.

    Attributes:
        schedule: compute actions.
        whole: with messages, gathers and reductions.
        trace: simulated.
        origin: how it was made, for reports.
    """

    schedule: Schedule
    whole: Schedule
    trace: Trace
    origin: str

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.trace.end_s

    @cached_property
    def merit(self) -> float:
        """What a search compares: the step, and a little of the mean time at which ranks end.

        Most changes of an order leave the step as it is; the second term prefers those that bring ranks
        closer to an earlier end.
        """
        facts, end_s = self.whole.facts, self.trace.spans.end_s
        return self.step_s + 1e-3 * float(np.maximum.reduceat(end_s, facts.columns.first[:-1]).mean())

    @cached_property
    def critical(self) -> list[tuple[int, int]]:
        """(rank, slot of its compute actions) along a path of actions that determines the step, the last one first."""
        facts, (start_s, end_s) = self.whole.facts, (self.trace.spans.start_s, self.trace.spans.end_s)
        is_compute = facts.row.is_kind(*COMPUTE_KINDS)
        slot = np.cumsum(is_compute) - 1
        first = slot[facts.columns.first[:-1]] - is_compute[facts.columns.first[:-1]] + 1
        node, path = int(end_s.argmax()), list[tuple[int, int]]()
        while True:
            rank = int(facts.ranks[node])
            if is_compute[node]:
                path.append((rank, int(slot[node] - first[rank])))
            needed = self.whole.graph.needed(node)
            if not needed or start_s[node] <= 0:
                return path
            node = max(needed, key=lambda one: end_s[one])
