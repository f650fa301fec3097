"""Gradients of weights, woven into an order of forwards and gradients of inputs.

A zero-bubble schedule (arXiv 2401.10241) is two decisions: in which order a rank runs forwards and the first halves of
backwards, on which other ranks wait, and when it runs the second halves, on which nobody waits. A family here says the
first and how many stage inputs a rank may hold; the second follows: a second half runs where a rank would stand still,
and where it has no room for another input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Placement, Row
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.kernels.weave import weave as run
from pipeloom.schedule.row import Columns

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What stages take and keep; the defaults are those of the papers' figures.

    Attributes:
        seconds: [kind, stage] of forwards, gradients of inputs and gradients of weights.
        over_s: for each boundary between a stage and the next the seconds of moving a tensor over it; 0 on one rank.
        size: for each stage what a micro-batch keeps there from its forward to the end of its backward.
        patience: the least part of a gradient of weights for which a rank that would stand still runs one.
    """

    seconds: Floats
    over_s: Floats
    size: Floats
    patience: float = 1.0

    @classmethod
    def unit(cls, num_stages: int) -> "Clock":
        """Forward, gradient of the input and gradient of the weights take equally long, and messages no time."""
        return cls(seconds=np.ones((3, num_stages)), over_s=np.zeros(num_stages), size=np.ones(num_stages))


@dataclass(frozen=True)
class Woven:
    """Rows with their gradients of weights.

    Attributes:
        rows: for each rank.
        starts: for each rank when its actions start.
    """

    rows: tuple[Row, ...]
    starts: tuple[Floats, ...]


def weave(orders: Sequence[Row], placement: Placement, room: Sequence[float], clock: Clock | None = None) -> Woven:
    """Put the gradients of weights into an order of forwards and gradients of inputs.

    Args:
        orders: for each rank its forwards and gradients of inputs; together they must not deadlock.
        placement: stage -> rank.
        room: for each rank the most that it keeps, in the unit of the clock's sizes.
        clock: what stages take and keep; ``None`` for one of everything.

    Raises:
        ScheduleError: the orders wait for each other, or need more room.
    """
    clock = clock or Clock.unit(placement.num_stages)
    columns = Columns.of(orders)
    kind, stage, microbatch, starts = kernel(run, 2 * len(columns.kind))(
        *columns[:3],
        columns.first,
        np.array(placement.rank_by_stage, np.int32),
        int(columns.microbatch.max(initial=0)) + 1,
        clock.seconds,
        clock.over_s,
        clock.size,
        np.array(room, np.float64),
        clock.patience,
    )
    if (starts < 0).any():
        message = f"the order waits for itself, or needs more room than {list(room)}"
        raise ScheduleError("acyclic", message, rank=None, slot=None, window="")
    whole = Row(kind, stage, microbatch, np.zeros_like(kind))
    first = (columns.first + columns.first // 2).tolist()
    parts = [slice(begin, end) for begin, end in pairwise(first)]
    return Woven(tuple(whole.take(part) for part in parts), tuple(starts[part] for part in parts))
