"""Rules of stages that are swapped between device and host, and of updates; ``verify.RULES`` says when they hold."""

from typing import TYPE_CHECKING

from pipeloom.schedule.action import Kind
from pipeloom.schedule.sharding import ADDS_TO_GRADIENT
from pipeloom.schedule.stage_swaps import USES_STAGE
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
    """If stages are updated at all, each that trains is, once, behind all that adds to its gradient or reduces it."""
    if not any(action.kind is Kind.UPDATE for _, _, action in schedule.actions()):
        return
    updated: set[int] = set()
    for rank, slot, action in schedule.actions():
        if action.kind is Kind.UPDATE:
            if action.stage in updated:
                yield Violation(f"{action} appears a second time", rank, slot)
            if action.stage < schedule.first_backward_stage:
                yield Violation(f"{action} updates a stage that runs no backward", rank, slot)
            updated.add(action.stage)
        elif action.stage in updated and action.kind in ADDS_TO_GRADIENT | {Kind.REDUCE_GRAD}:
            yield Violation(f"{action} stands behind {action.stage}UPDATE, which uses the gradient", rank, slot)
    for stage in range(schedule.first_backward_stage, schedule.num_stages):
        if stage not in updated:
            yield Violation(f"{stage}UPDATE is missing", schedule.placement.rank_by_stage[stage])
