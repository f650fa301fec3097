"""Passes that cut compute actions: micro-batches into token slices, backwards into halves for input and weights."""

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule


def add_slices(schedule: Schedule, num_slices: int) -> Schedule:
    """Every action becomes its token slices where it stands: a forward's ascending, a backward's descending.

    A token attends to those before it, so a slice needs keys and values of the earlier ones on its stage, and gives
    their gradients back before they go backward (TeraPipe, arXiv 2102.07988, section 3.2). Ranks then begin as
    soon as the first slice of a micro-batch reaches them, and hold as much as they held before. Whatever the schedule:
    who ran micro-batches one after the other can run their slices so, so that the result has no deadlock either.

    Args:
        schedule: compute-only, of whole micro-batches.
        num_slices: of each micro-batch, at least 1.

    Raises:
        UserError: ``num_slices`` is below 1, or the schedule has slices or communication already.
    """
    if num_slices < 1:
        raise UserError(f"expected at least one token slice of a micro-batch, found {num_slices}")
    if schedule.num_slices > 1 or schedule.level is not Level.COMPUTE:
        raise UserError("token slices come first: slice a compute-only schedule of whole micro-batches, then lower it")
    rows = [sliced(row, num_slices) for row in schedule.rows]
    return schedule.with_rows(rows, Level.COMPUTE, num_slices=num_slices)


def sliced(row: Row, num_slices: int) -> Row:
    """Compute actions of whole micro-batches, each as its slices in the order in which a stage may run them."""
    kind, stage, microbatch, _ = (np.repeat(array, num_slices) for array in row.arrays)
    ascending = np.arange(num_slices, dtype=np.int32)
    is_forward = row.is_kind(Kind.FORWARD)[:, None]
    # Back in reverse: the gradient of a slice's keys and values is complete when all later slices have gone back.
    part = np.where(is_forward, ascending, ascending[::-1]).astype(np.int32).reshape(-1)
    return Row(kind, stage, microbatch, part)


def split_backward(schedule: Schedule, delay: int | None = 0) -> Schedule:
    """Split every whole backward into its halves (arXiv 2401.10241, section 2).

    The half for the input stands where the backward stood, so that nobody waits longer for its result. That for the
    weights follows the rank's ``delay``-th half for an input after it, or at the end of the row. A delay keeps
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
