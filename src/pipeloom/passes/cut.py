"""Passes that split compute actions: micro-batches into token slices, backwards into input and weight gradients."""

import numpy as np

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule


@checked
def add_slices(schedule: Schedule, num_slices: int) -> Schedule:
    """Replace every action by its token slices: ascending for a forward, descending for a backward.

    A token attends to earlier tokens. So the forward of a slice needs keys and values of the earlier slices on its
    stage, and its backward adds to their gradients before their own backwards (TeraPipe, arXiv 2102.07988, section
    3.2). Ranks can begin when the first slice of a micro-batch arrives, and hold as much as before. The order of
    micro-batches does not change, so the result cannot deadlock if the schedule did not.

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


@checked
def sliced(row: Row, num_slices: int) -> Row:
    """A row of whole micro-batches with each action replaced by its slices, in the order that dependencies allow."""
    kind, stage, microbatch, _ = (np.repeat(array, num_slices) for array in row.arrays)
    ascending = np.arange(num_slices, dtype=np.int32)
    is_forward = row.is_kind(Kind.FORWARD)[:, None]
    # Backwards in reverse: the gradient of a slice's keys and values is complete after the backwards of later slices.
    part = np.where(is_forward, ascending, ascending[::-1]).astype(np.int32).reshape(-1)
    return Row(kind, stage, microbatch, part)


@checked
def split_backward(schedule: Schedule, delay: int | None = 0) -> Schedule:
    """Split every whole backward into input gradient (I) and weight gradient (W) (arXiv 2401.10241, section 2).

    I takes the place of the backward, so that no rank waits longer for its result. W follows the rank's ``delay``-th
    next I, or is at the end of the row. With a delay stage inputs are held longer, so the result has no
    ``max_stage_inputs``.

    Args:
        schedule: compute-only; backwards that are split already stay as they are.
        delay: W follows this many backwards later; 0 is right behind its own I, ``None`` the end of the row.

    Raises:
        UserError: ``delay`` is below 0, or the schedule has communication already.
    """
    if delay is not None and delay < 0:
        raise UserError(f"delay must be at least 0, found {delay}")
    if schedule.level is not Level.COMPUTE:
        raise UserError("backwards are split before sends and receives are added; start from a compute-only schedule")
    # I and W right behind each other free an input when the whole backward did, so the limit still holds.
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


@checked
def join_backward(row: Row) -> Row:
    """A row in which halves of a backward that follow each other are one whole backward."""
    after = row.take(slice(1, None))
    half, other = row.take(slice(None, -1)).is_kind(Kind.BACKWARD_INPUT), after.is_kind(Kind.BACKWARD_WEIGHT)
    same = (row.stage[:-1] == after.stage) & (row.microbatch[:-1] == after.microbatch)
    pairs = np.flatnonzero(half & other & same)
    kind = row.kind.copy()
    kind[pairs] = Kind.BACKWARD.code
    keeps = np.ones(len(row), np.bool_)
    keeps[pairs + 1] = False
    return Row(kind, *row.arrays[1:]).take(keeps)
