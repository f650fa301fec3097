"""Rules of sharded weights and gradients; ``verify.RULES`` says when they are checked."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, Kind
from pipeloom.schedule.sharding import gathered_counts, unreduced_counts
from pipeloom.schedule.violation import Violation, Violations

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule


def gathered_bound(schedule: "Schedule") -> Violations:
    """No rank has more stages gathered at once than the schedule promises, those being gathered included."""
    limit = schedule.max_gathered
    if limit is None:
        return
    for rank, row in enumerate(schedule.rows):
        for slot, count in gathered_counts(row):
            if count > limit:
                message = f"{row[slot]} makes {count} gathered stages, but max_gathered promises {limit}"
                yield Violation(message, rank, slot)


def reduce_each_contribution_once(schedule: "Schedule") -> Violations:
    """If gradients are reduced at all, every micro-batch's contribution to every stage is, exactly once.

    A reduction takes what the backwards since the stage's reduction before it have added, so each takes something,
    and one stands after the stage's last backward.
    """
    if not any(action.kind is Kind.REDUCE_GRAD for _, _, action in schedule.actions()):
        return
    for rank, row in enumerate(schedule.rows):
        yield from _reductions_without_contribution(rank, row)
        yield from _contributions_without_reduction(rank, row)


def _reductions_without_contribution(rank: int, row: Sequence[Action]) -> Violations:
    unreduced: set[int] = set()
    for slot, action in enumerate(row):
        if action.kind in ADDS_TO_GRADIENT:
            unreduced.add(action.stage)
        elif action.kind is Kind.REDUCE_GRAD:
            if action.stage not in unreduced:
                yield Violation(f"{action} reduces nothing: no backward before it adds to the gradient", rank, slot)
            unreduced.discard(action.stage)


def _contributions_without_reduction(rank: int, row: Sequence[Action]) -> Violations:
    reduced_later: set[int] = set()
    reported: set[int] = set()
    for slot in range(len(row) - 1, -1, -1):
        action = row[slot]
        if action.kind is Kind.REDUCE_GRAD:
            reduced_later.add(action.stage)
        elif action.kind in ADDS_TO_GRADIENT and action.stage not in reduced_later | reported:
            reported.add(action.stage)
            yield Violation(f"{action} adds to a gradient that no {action.stage}REDUCE_GRAD reduces", rank, slot)


def gradient_bound(schedule: "Schedule") -> Violations:
    """No rank holds unreduced gradients of more stages than it has buffers for."""
    limit = schedule.gradient_buffers
    if limit is None:
        return
    for rank, row in enumerate(schedule.rows):
        for slot, count in unreduced_counts(row):
            if count > limit:
                message = f"{row[slot]} begins unreduced gradient number {count}, but gradient_buffers is {limit}"
                yield Violation(message, rank, slot)
