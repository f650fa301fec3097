"""Gradients of weights, woven into an order of forwards and gradients of inputs.

A zero-bubble schedule (arXiv 2401.10241) is two decisions: in which order a rank runs forwards and the first halves of
backwards, on which other ranks wait, and when it runs the second halves, on which nobody waits. A family here says the
first and how many stage inputs a rank may hold; the second follows: a second half runs where a rank would stand still,
and where it has no room for another input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import ScheduleError
from pipeloom.families.family import Rows
from pipeloom.schedule import Kind, Placement, Row
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.kernels import clocked
from pipeloom.schedule.row import Columns

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What stages take and keep; the defaults are those of the papers' figures.

    Attributes:
        seconds: [kind, stage] of forwards, gradients of inputs and gradients of weights.
        over_s: for each boundary between a stage and the next the seconds of moving a tensor over it; 0 on one rank.
        kept: for each stage what a micro-batch keeps there from its forward to the end of the first half.
        pending: for each stage what it keeps from there to the end of the second half.
        patience: the least part of a gradient of weights for which a rank that would stand still runs one.
        pulls: whether a rank that would stand still runs the next forward of its first stage before its turn.
    """

    seconds: Floats
    over_s: Floats
    kept: Floats
    pending: Floats
    patience: float = 1.0
    pulls: bool = False

    @classmethod
    def unit(cls, num_stages: int) -> "Clock":
        """Forward, gradient of the input and gradient of the weights take equally long, and messages no time."""
        one = np.ones(num_stages)
        return cls(seconds=np.ones((3, num_stages)), over_s=0 * one, kept=one, pending=one)

    def world(self, placement: Placement, room: Sequence[float]) -> clocked.World:
        """With the ranks and their room."""
        stages = np.array([placement.stages_of(rank) for rank in range(placement.num_ranks)], np.int32)
        reserve = np.zeros(placement.num_stages)
        for own in stages:
            # What a rank's later stages need for one micro-batch: a forward that
            # left less could never be followed to its end.
            reserve[own] = np.cumsum(self.kept[own][::-1])[::-1] - self.kept[own]
        owner = np.array(placement.rank_by_stage, np.int32)
        limits = np.array(room, np.float64)
        return clocked.World(stages, owner, self.seconds, self.over_s, self.kept, self.pending, reserve, limits)

    def held_whole(self) -> "Clock":
        """As if all of a micro-batch were kept between the halves: second halves come sooner; itself if it is."""
        return self if bool((self.pending >= self.kept).all()) else replace(self, pending=self.kept)

    def changed(self, patience: float, *, pulls: bool) -> "Clock":
        """The same with another patience, with forwards before their turn or without."""
        return replace(self, patience=patience, pulls=pulls)


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
    state = clocked.begin(placement.num_ranks, placement.num_stages, int(columns.microbatch.max(initial=0)) + 1)
    is_done = np.zeros(len(columns.kind), np.bool_)
    order = clocked.Order(*columns[:3], columns.first, columns.first[:-1].copy(), is_done, columns.first[:-1].copy())
    run = kernel(clocked.weave, state.kind.size)
    run(clock.world(placement, room), state, order, clock.patience, clock.pulls)
    made = made_of(state)
    if made is None:
        message = f"the order waits for itself, or needs more room than {list(room)}"
        raise ScheduleError("acyclic", message, rank=None, slot=None, window="")
    return made


def made_of(state: clocked.State) -> Woven | None:
    """The rows that were run; ``None`` where a rank came to no end."""
    # The kernel writes a start for each action that it places, and stops where nothing can go on.
    if (state.starts < 0).any():
        return None
    columns = zip(state.kind, state.stage, state.microbatch, strict=True)
    rows = tuple(Row(kind, stage, microbatch, np.zeros_like(kind)) for kind, stage, microbatch in columns)
    return Woven(rows, tuple(state.starts))


def woven(placement: Placement, orders: Sequence[Row], most_inputs: Sequence[int], *, pulls: bool = False) -> Rows:
    """A family's answer: the orders with their gradients of weights, on the clock of the papers' figures.

    Args:
        placement: stage -> rank.
        orders: for each rank its forwards and gradients of inputs.
        most_inputs: for each rank how many stage inputs it may hold, which becomes the promise.
        pulls: whether a rank that would stand still runs the next forward of its first stage before its turn.
    """
    clock = replace(Clock.unit(placement.num_stages), pulls=pulls)
    return Rows(weave(orders, placement, most_inputs, clock).rows, most_inputs)


def of_inputs(row: Row) -> Row:
    """A row's forwards, and gradients of inputs in place of its backwards: an order to weave into."""
    kind = np.where(row.is_kind(Kind.BACKWARD), np.int32(Kind.BACKWARD_INPUT.code), row.kind)
    return Row(kind, *row.arrays[1:]).take(kind != Kind.BACKWARD_WEIGHT.code)
