"""Rules of stages that are swapped between device and host, and of updates; ``verify.RULES`` says when they hold."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, USES_STAGE, Kind
from pipeloom.schedule.violation import Violation, Violations

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule


def on_device_when_used(schedule: "Schedule") -> Violations:
    """If a stage is ever swapped, it is on the device whenever it is used; it comes and goes in turn, and goes last."""
    swapped = {action.stage for _, _, action in schedule.actions() if action.kind is Kind.SWAP_IN}
    since: dict[int, tuple[int, int]] = {}  # stage -> where it came
    for rank, slot, action in schedule.actions():
        is_here = action.stage in since
        if action.kind is Kind.SWAP_IN:
            if is_here:
                yield Violation(f"{action}: the stage is on the device already", rank, slot)
            since[action.stage] = rank, slot
        elif action.kind is Kind.SWAP_OUT:
            if not is_here:
                yield Violation(f"{action}: the stage is not on the device", rank, slot)
            since.pop(action.stage, None)
        elif action.kind in USES_STAGE and action.stage in swapped and not is_here:
            yield Violation(f"{action} takes stage {action.stage}, which is not on the device", rank, slot)
    for stage, (rank, slot) in since.items():
        yield Violation(f"{stage}SWAP_IN is the last word on stage {stage}: {stage}SWAP_OUT is missing", rank, slot)


def resident_bound(schedule: "Schedule") -> Violations:
    """No rank has more of its stages on the device at once than the schedule promises, those on their way included."""
    limit, sizes = schedule.max_resident, schedule.stage_sizes
    if limit is None:
        return
    for rank, row in enumerate(schedule.rows):
        taken = 0
        for slot, action in enumerate(row):
            size = 1 if sizes is None else sizes[action.stage]
            if action.kind is Kind.SWAP_OUT:
                taken -= size
            elif action.kind is Kind.SWAP_IN:
                taken += size
                if taken > limit:
                    message = f"{action} makes {taken} on the device, but max_resident promises {limit}"
                    yield Violation(message, rank, slot)


def update_each_stage_once(schedule: "Schedule") -> Violations:
    """If stages are updated at all, each that trains is, once, behind all that adds to its gradient or reduces it.

    Or all of them are updated before their first use, with the gradients of the step before.
    """
    if not any(action.kind is Kind.UPDATE for _, _, action in schedule.actions()):
        return
    is_deferred: dict[int, bool] = {}
    used: set[int] = set()
    for rank, slot, action in schedule.actions():
        if action.kind is Kind.UPDATE:
            for problem in _wrong_update(action, used, is_deferred, schedule):
                yield Violation(problem, rank, slot)
            is_deferred.setdefault(action.stage, action.stage not in used)
        elif action.kind in USES_STAGE:
            used.add(action.stage)
            is_final = action.kind in ADDS_TO_GRADIENT | {Kind.REDUCE_GRAD}
            if is_final and not is_deferred.get(action.stage, True):
                yield Violation(f"{action} stands behind {action.stage}UPDATE, which uses the gradient", rank, slot)
    for stage in range(schedule.first_backward_stage, schedule.num_stages):
        if stage not in is_deferred:
            yield Violation(f"{stage}UPDATE is missing", schedule.placement.rank_by_stage[stage])


def _wrong_update(update: Action, used: set[int], is_deferred: dict[int, bool], schedule: "Schedule") -> Iterator[str]:
    """What is wrong with an update, given the stages used before it and the updates before it."""
    if update.stage in is_deferred:
        yield f"{update} appears a second time"
    elif is_deferred and next(iter(is_deferred.values())) is not (update.stage not in used):
        yield f"{update} and another update are not of the same step"
    if update.stage < schedule.first_backward_stage:
        yield f"{update} updates a stage that runs no backward"
