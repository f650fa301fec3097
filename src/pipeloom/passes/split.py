"""The pass that splits backwards into the gradient of the input and that of the weights."""

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule


def split_backward(schedule: Schedule, delay: int | None = 0) -> Schedule:
    """Split every whole backward into its halves (arXiv 2401.10241, section 2).

    The half for the input stands where the backward stood, so that nobody waits longer for its result. That for the
    weights stands behind the rank's ``delay``-th half for an input after it, or at the end of the row. A delay keeps
    stage inputs longer, so that the schedule's promise of how many there are falls.

    Args:
        schedule: of compute actions; halves that it has already stay where they are.
        delay: how many of the rank's backwards later; with 0 right behind its own. ``None``: at the end of the row.

    Raises:
        UserError: ``delay`` is below 0, or the schedule has its communication already.
    """
    if delay is not None and delay < 0:
        raise UserError(f"delay must be at least 0, found {delay}")
    if schedule.level is not Level.COMPUTE:
        raise UserError("backwards are split before sends and receives are added; start from a compute-only schedule")
    # Right behind each other the halves free an input when the whole backward did, so the promise still holds.
    promises = {} if delay == 0 else {"max_stage_inputs": None}
    return schedule.with_rows((_split(row, delay) for row in schedule.rows), schedule.level, **promises)


def _split(row: Row, delay: int | None) -> Row:
    slots = np.flatnonzero(row.is_kind(Kind.BACKWARD))
    chosen = row.take(slots)
    # Rows share their arrays.
    kind = row.kind.copy()
    kind[slots] = Kind.BACKWARD_INPUT.code
    halves = Row(np.full_like(chosen.kind, Kind.BACKWARD_WEIGHT.code), *chosen.arrays[1:])
    later = np.full(len(slots), len(row) - 1)
    if delay is not None and delay < len(slots):
        later[: len(slots) - delay] = slots[delay:]
    return Row(kind, *row.arrays[1:]).insert(later.tolist(), halves)
