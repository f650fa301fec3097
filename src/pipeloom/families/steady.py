"""Lengthens timed rows by micro-batches in their steady state, without running the clock again.

Between its start-up and its drain a long pipeline repeats itself: each rank does for every micro-batch what it did for
the one before, the same time later. Rows of any length are then those of a short step with copies of one repetition in
its middle.
"""

import numpy as np

from pipeloom.families.weight_gradients import Floats, TimedRows
from pipeloom.schedule import Row

_ROUNDING = 1e-7
"""Difference of two times that is rounding, as a fraction of a repetition."""


def lengthened(timed: TimedRows, more: int) -> TimedRows | None:
    """The rows of a step with further micro-batches, if the step is steady in its middle.

    Steady: on every rank the actions of the two repetitions around the middle are equal but for the number of the
    micro-batch, and start as much later as a repetition takes. What follows depends on these alone, so running the
    clock on the longer step makes the same rows (``tests/families/test_steady.py``).

    Args:
        timed: rows of a step, each in the order of its starts.
        more: number of further micro-batches.

    Returns:
        ``None`` where the middle is not steady.
    """
    end_s = max(float(starts[-1]) for starts in timed.starts)
    entry = timed.rows[0]
    # A micro-batch enters the pipeline by the kind of action and the stage with which the first rank begins.
    enters = timed.starts[0][(entry.kind == entry.kind[0]) & (entry.stage == entry.stage[0])]
    middle = int(np.searchsorted(enters, end_s / 2))
    if not 0 < middle < len(enters) - 1:
        return None
    cut_s, repetition_s = enters[middle], enters[middle + 1] - enters[middle]
    edges = np.array([cut_s - repetition_s, cut_s, cut_s + repetition_s]) - _ROUNDING * repetition_s
    rows, starts = list[Row](), list[Floats]()
    for row, start_s in zip(timed.rows, timed.starts, strict=True):
        cut = _repetition(row, start_s, edges, repetition_s)
        if cut is None:
            return None
        longer, later_s = _with_copies(row, start_s, cut, more, repetition_s)
        rows.append(longer)
        starts.append(later_s)
    return TimedRows(tuple(rows), tuple(starts))


def _repetition(row: Row, starts: Floats, edges: Floats, repetition_s: float) -> slice | None:
    """The slots of the repetition before the middle; ``None`` if the next one differs."""
    first, last, behind = np.searchsorted(starts, edges)
    before, after = slice(first, last), slice(last, behind)
    is_steady = (
        0 < last - first == behind - last
        and np.array_equal(row.kind[before], row.kind[after])
        and np.array_equal(row.stage[before], row.stage[after])
        and np.array_equal(row.microbatch[before] + 1, row.microbatch[after])
        and bool((np.abs(starts[before] + repetition_s - starts[after]) <= _ROUNDING * repetition_s).all())
    )
    return before if is_steady else None


def _with_copies(row: Row, starts: Floats, cut: slice, more: int, repetition_s: float) -> tuple[Row, Floats]:
    """A row with ``more`` copies of a repetition behind it, each one micro-batch and one repetition later."""
    slots = np.arange(len(starts))
    taken = np.concatenate([slots[: cut.stop], np.tile(slots[cut], more), slots[cut.stop :]])
    each = np.repeat(np.arange(1, more + 1), cut.stop - cut.start)
    later = np.concatenate([np.zeros(cut.stop, np.int64), each, np.full(len(slots) - cut.stop, more)])
    longer = row.take(taken)
    microbatch = longer.microbatch + later.astype(longer.microbatch.dtype)
    return Row(longer.kind, longer.stage, microbatch, *longer.arrays[3:]), starts[taken] + later * repetition_s
