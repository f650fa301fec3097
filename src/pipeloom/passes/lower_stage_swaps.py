"""Passes for a model that is larger than its device: updates in the row, swaps of whole stages with the host."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.passes.lower_sharding import visits
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import (
    ADDS_TO_GRADIENT,
    CHANGES_GRADIENT,
    COMPUTE_KINDS,
    STAGE_SWAP_KINDS,
    TIED_KINDS,
    Kind,
)
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.schedule.sharding import arrivals, fewest_stays
from pipeloom.schedule.stage_swaps import swap_uses, swaps_rest

UpdatePlace = Literal["at once", "at the end", "in the next step"]
"""Where a row has the update of a stage: when its gradient is complete; at the end of the row; or before the stage's
first use in the next step. Then each row begins with the updates of the step before."""


@checked
def place_of_updates(num_stages: int, *, needs_norm: bool) -> UpdatePlace:
    """The place of updates with the fewest swaps, on one rank.

    Args:
        num_stages: of the model.
        needs_norm: whether an update needs the norm of the whole model's gradient, as clipping does; then it must wait
            for the end of the step. In the next step it belongs to the stage's first visit, which hides it; but with
            two stages the second one is already in transfer by then.
    """
    if not needs_norm:
        return "at once"
    return "in the next step" if num_stages > 2 else "at the end"


@checked
def add_updates(schedule: Schedule, place: UpdatePlace) -> Schedule:
    """Add the optimizer's step on each stage that trains; run it before ``add_stage_swaps``.

    Args:
        schedule: with its other communication.
        place: see ``UpdatePlace``. At the end the stages that were used last are updated first: they are on the device.
            At once means right behind the last backward, or, where a reduction follows it, behind the backwards of the
            next stage, which hide the reduction.

    Raises:
        UserError: the schedule has updates already; or they need the norm of a gradient that several ranks hold before
            the step ends.
    """
    if schedule.facts.has(Kind.UPDATE):
        raise UserError("the schedule updates weights already; start from one without UPDATE")
    if place == "at the end" and schedule.num_ranks > 1:
        raise UserError(
            f"the norm of the whole gradient takes all of {schedule.num_ranks} pipeline ranks, and no action exchanges "
            "it; use one rank, update in the next step, or set optimizer.clip_grad_norm to inf and update at once"
        )
    return schedule.with_rows([_with_updates(row, place) for row in schedule.rows], Level.COMMUNICATION)


def _with_updates(row: Row, place: UpdatePlace) -> Row:
    used = row.is_kind(*COMPUTE_KINDS)
    added: list[tuple[int, int, Action]] = []  # (slot that it follows, order among equal slots, action)
    for stage in np.unique(row.stage[row.is_kind(*ADDS_TO_GRADIENT)]).tolist():
        uses = np.flatnonzero((row.stage == stage) & used).tolist()
        slot = {"at the end": len(row) - 1, "in the next step": uses[0] - 1}.get(place)
        if slot is None:
            added.append((_at_once(row, stage), uses[-1], Action(Kind.UPDATE, stage)))
        else:
            # Of several at one place the stage that was used last is first: it is still on the device.
            added.append((slot, -uses[-1], Action(Kind.UPDATE, stage)))
    return row.with_actions(added)


def _at_once(row: Row, stage: int) -> int:
    """The slot behind which a stage is updated when its gradient is complete."""
    changed, firsts = row.is_kind(*CHANGES_GRADIENT) & (row.stage == stage), visits(row, ADDS_TO_GRADIENT)[0]
    complete = int(np.flatnonzero(changed)[-1])
    if not (changed & row.is_kind(Kind.REDUCE_GRAD)).any():
        return complete
    # As late as the stage after the next one takes its gradient's memory: until then nobody needs it.
    later = firsts[firsts > np.flatnonzero(changed & row.is_kind(*ADDS_TO_GRADIENT))[-1]]
    return max(complete, int(later[1]) - 1 if len(later) > 1 else len(row) - 1)


@checked
def add_stage_swaps(
    schedule: Schedule,
    max_resident: int,
    *,
    sizes: Sequence[int] | None = None,
    ahead: int = 1,
    hides: bool = False,
) -> Schedule:
    """Keep stages in host memory and swap them in for their visits, with the fewest swaps.

    A *visit* is a run of consecutive actions that use one stage. A stage is swapped in as soon as there is room, at
    most ``ahead`` visits early. When room is needed, the stage whose next visit is furthest ahead is swapped out after
    its latest visit. No stage is on the device at the begin and at the end of a step, so that steps, and evaluations
    between them, begin alike. Breadth-first on one rank with room for two of S stages takes 2 S - 2 swaps in, for any
    number of micro-batches (as ATOM, arXiv 2403.10504).

    Where stages are gathered, too, what is swapped is the rest of them, such as the experts of a rank (``swap_uses``).

    Args:
        schedule: with its other communication, and with updates if they are part of it.
        max_resident: room of each rank, in units of ``sizes``; stages in transfer count.
        sizes: for each stage its room, such as bytes; ``None`` for 1 each.
        ahead: number of visits by which a swap may start early; 1 hides it behind the visit before, 0 exposes it.
        hides: whether the stage of the visit before makes room only if no other can (``fewest_stays``). For rows that
            use stages in turn, over and over, where the fewest swaps would all be exposed.

    Raises:
        UserError: a stage exceeds the room, or the schedule has actions that cannot be combined with swaps.
    """
    if ahead < 0:
        raise UserError(f"ahead must be at least 0, found {ahead}")
    if sizes is not None and (len(sizes) != schedule.num_stages or min(sizes) < 1):
        raise UserError(f"expected a size above 0 for each of {schedule.num_stages} stages, found {list(sizes)}")
    largest = 1 if sizes is None else max(sizes)
    if max_resident < largest:
        raise UserError(f"max_resident must be at least {largest}, what the largest stage takes, found {max_resident}")
    # A tied matrix is lent by what is gathered, if anything is.
    others = STAGE_SWAP_KINDS if swaps_rest(schedule.facts.row) else {*STAGE_SWAP_KINDS, *TIED_KINDS}
    found = sorted(kind.value for kind in others if schedule.facts.has(kind))
    if found:
        raise UserError(f"stages are swapped in schedules without {', '.join(found)}; start from one without")
    rows = [_with_swaps(row, max_resident, ahead, sizes, hides=hides) for row in schedule.rows]
    promised = None if sizes is None else tuple(sizes)
    return schedule.with_rows(rows, Level.COMMUNICATION, max_resident=max_resident, stage_sizes=promised)


def _with_swaps(row: Row, room: int, ahead: int, sizes: Sequence[int] | None, *, hides: bool) -> Row:
    firsts, lasts = visits(row, swap_uses(row))
    stages = row.stage[firsts].tolist()
    stays = fewest_stays(stages, room, sizes, hides=hides)
    before = [-1, *lasts.tolist()]  # for each visit the slot before it
    added: list[tuple[int, int, Action]] = []  # (slot that it follows, order among equal slots: out first, action)
    for stay, visit in zip(stays, arrivals(stays, stages, room, ahead, sizes), strict=True):
        added.append((before[visit], 1, Action(Kind.SWAP_IN, stages[stay.first])))
        added.append((before[stay.last + 1], 0, Action(Kind.SWAP_OUT, stages[stay.last])))
    return row.with_actions(added)
