"""Orders from which families are built."""

from collections.abc import Sequence

import numpy as np

from pipeloom.schedule import Kind, Row
from pipeloom.schedule.row import CODE


def in_turn(forwards: Row, backwards: Row, num_warmup: int) -> Row:
    """Some forwards, then forward and backward in turn, then the rest of the backwards."""
    rest = forwards[num_warmup:]
    return forwards[:num_warmup] + rest.alternate(backwards[: len(rest)]) + backwards[len(rest) :]


def runs(kind: Kind, stages: Sequence[int]) -> Row:
    """One kind of action on some stages in this order; each stage takes its micro-batches in ascending order."""
    stage = np.asarray(stages, np.int32)
    microbatch = np.zeros_like(stage)
    for one in set(stages):
        here = stage == one
        microbatch[here] = np.arange(int(here.sum()))
    return Row(np.full_like(stage, CODE[kind]), stage, microbatch, np.zeros_like(stage))


def up_to(rows: Sequence[Row], num_microbatches: int) -> list[Row]:
    """A schedule for more micro-batches without those that are too many, which is a schedule, too."""
    return [row.take(row.microbatch < num_microbatches) for row in rows]
