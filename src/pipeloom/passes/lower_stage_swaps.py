"""Passes of a model that does not fit on its devices: updates within the row, and stages that come and go."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from pipeloom.errors import UserError
from pipeloom.passes.lower_sharding import visits
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, COMPUTE_KINDS, STAGE_SWAP_KINDS, TIED_KINDS, USES_STAGE, Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.schedule.sharding import arrivals, fewest_stays

UpdatePlace = Literal["at once", "at the end", "in the next step"]
"""Where a row has the update of a stage: behind what completes its gradient; behind everything else; before the stage's
first use in the next step, of which this row then has the updates that the step before owes."""


def place_of_updates(num_stages: int, *, needs_norm: bool) -> UpdatePlace:
    """Where updates are with which the fewest stages are swapped, on one rank.

    Args:
        num_stages: of the model.
        needs_norm: whether an update needs the norm of the whole model's gradient, as clipping does: then it cannot be
            done at once. In the next step it comes with the stage's first visit, which hides it; but with two stages
            the second one is on its way by then.
    """
    if not needs_norm:
        return "at once"
    return "in the next step" if num_stages > 2 else "at the end"


def add_updates(schedule: Schedule, place: UpdatePlace) -> Schedule:
    """Add the optimizer's step on each stage that trains; run it before ``add_stage_swaps``.

    Args:
        schedule: with its other communication.
        place: where. At the end those stages come first that were used last, which are on the device still.

    Raises:
        UserError: the schedule has updates already; or they wait for the whole gradient, of which other ranks have a
            part.
    """
    if schedule.facts.has(Kind.UPDATE):
        raise UserError("the schedule updates weights already; start from one without UPDATE")
    if place != "at once" and schedule.num_ranks > 1:
        raise UserError(
            f"the norm of the whole gradient takes all of {schedule.num_ranks} pipeline ranks, and no action exchanges "
            "it; use one rank, or clip nothing and update at once"
        )
    return schedule.with_rows([_with_updates(row, place) for row in schedule.rows], Level.COMMUNICATION)


def _with_updates(row: Row, place: UpdatePlace) -> Row:
    finals = row.is_kind(*ADDS_TO_GRADIENT, Kind.REDUCE_GRAD)
    used = row.is_kind(*COMPUTE_KINDS)
    added: list[tuple[int, int, Action]] = []  # (slot behind which it stands, order there, what)
    for stage in np.unique(row.stage[finals]).tolist():
        mine = row.stage == stage
        uses = np.flatnonzero(mine & used).tolist()
        slot = {
            "at once": int(np.flatnonzero(mine & finals)[-1]),
            "at the end": len(row) - 1,
            "in the next step": uses[0] - 1,
        }[place]
        # Of several at one place the stage that was used last comes first: it is still on the device.
        added.append((slot, -uses[-1], Action(Kind.UPDATE, stage)))
    return row.with_actions(added)


def add_stage_swaps(
    schedule: Schedule, max_resident: int, *, sizes: Sequence[int] | None = None, ahead: int = 1
) -> Schedule:
    """Keep stages in the memory of the host and bring them to the device for the visits to them, as rarely as possible.

    A *visit* is a run of actions that use one stage. A stage is brought as early as there is room, but not more than
    ``ahead`` visits before its own, and goes right after the last visit before its room is needed by another whose next
    visit is nearer. No stage is on the device where the step begins, and none where it ends, so that every step, and
    an evaluation between two, begins alike. Breadth-first on one rank with room for two of S stages takes 2 S - 2 swaps
    in, whatever the number of micro-batches (as ATOM, arXiv 2403.10504).

    Args:
        schedule: with its other communication, and its updates if they are to be in it.
        max_resident: room of each rank, in units of ``sizes``; those on their way take it too.
        sizes: for each stage what room it takes, such as bytes; ``None`` for one each, so that the room is stages.
        ahead: 1 hides a swap behind the visit before; with 0 every swap is waited for.

    Raises:
        UserError: a stage does not fit, or the schedule gathers, swaps or sends what this cannot be combined with.
    """
    if ahead < 0:
        raise UserError(f"ahead must be at least 0, found {ahead}")
    if sizes is not None and (len(sizes) != schedule.num_stages or min(sizes) < 1):
        raise UserError(f"expected a size above 0 for each of {schedule.num_stages} stages, found {list(sizes)}")
    largest = 1 if sizes is None else max(sizes)
    if max_resident < largest:
        raise UserError(f"max_resident must be at least {largest}, what the largest stage takes, found {max_resident}")
    # Gathers and swaps would both decide when a stage's weights have memory.
    others = {Kind.UNSHARD, Kind.RESHARD, *STAGE_SWAP_KINDS, *TIED_KINDS}
    found = sorted(kind.value for kind in others if schedule.facts.has(kind))
    if found:
        raise UserError(f"stages are swapped in schedules without {', '.join(found)}; start from one without")
    rows = [_with_swaps(row, max_resident, ahead, sizes) for row in schedule.rows]
    promised = None if sizes is None else tuple(sizes)
    return schedule.with_rows(rows, Level.COMMUNICATION, max_resident=max_resident, stage_sizes=promised)


def _with_swaps(row: Row, room: int, ahead: int, sizes: Sequence[int] | None) -> Row:
    firsts, lasts = visits(row, USES_STAGE)
    stages = row.stage[firsts].tolist()
    stays = fewest_stays(stages, room, sizes)
    before = [-1, *lasts.tolist()]  # for each visit the slot before it
    added: list[tuple[int, int, Action]] = []  # (slot behind which it stands, out before in, what)
    for stay, visit in zip(stays, arrivals(stays, stages, room, ahead, sizes), strict=True):
        added.append((before[visit], 1, Action(Kind.SWAP_IN, stages[stay.first])))
        added.append((before[stay.last + 1], 0, Action(Kind.SWAP_OUT, stages[stay.last])))
    return row.with_actions(added)
