"""Inserts weight gradients into an order of forwards and input gradients.

A zero-bubble schedule (arXiv 2401.10241) takes two decisions: in which order a rank runs forwards and input gradients,
which other ranks wait for, and when it runs weight gradients, which no other rank waits for. A family here makes the
first decision and sets how many stage inputs a rank may hold. The second follows: a weight gradient runs where a rank
would be idle, or where it has no memory for another input.
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
class StageProfile:
    """Seconds and memory of stages; ``patience`` and ``pulls`` default to the setting of the papers' figures.

    Attributes:
        seconds: [kind, stage] of forwards, input gradients and weight gradients.
        over_s: for each boundary between a stage and the next the seconds of a message; 0 where both are on one rank.
        kept: for each stage the memory that a micro-batch takes from its forward to the end of the input gradient.
        pending: for each stage the memory that it takes from there to the end of the weight gradient.
        patience: an idle rank runs a weight gradient if it would be idle for at least this fraction of it.
        pulls: whether an idle rank runs the next forward of its first stage out of turn.
    """

    seconds: Floats
    over_s: Floats
    kept: Floats
    pending: Floats
    patience: float = 1.0
    pulls: bool = False

    @classmethod
    def unit(cls, num_stages: int) -> "StageProfile":
        """Forward, input gradient and weight gradient take 1 each, messages nothing; a micro-batch keeps 1."""
        one = np.ones(num_stages)
        return cls(seconds=np.ones((3, num_stages)), over_s=0 * one, kept=one, pending=one)

    def world(self, placement: Placement, room: Sequence[float]) -> clocked.World:
        """The input of the kernels: with the ranks and their memory limits."""
        stages = np.array([placement.stages_of(rank) for rank in range(placement.num_ranks)], np.int32)
        reserve = np.zeros(placement.num_stages)
        for own in stages:
            # What a rank's later stages need for one micro-batch: a forward that
            # left less could never reach its backward.
            reserve[own] = np.cumsum(self.kept[own][::-1])[::-1] - self.kept[own]
        owner = np.array(placement.rank_by_stage, np.int32)
        limits = np.array(room, np.float64)
        return clocked.World(stages, owner, self.seconds, self.over_s, self.kept, self.pending, reserve, limits)

    def keeping_all(self) -> "StageProfile":
        """The same with ``pending`` as large as ``kept``, which makes weight gradients run sooner."""
        return self if bool((self.pending >= self.kept).all()) else replace(self, pending=self.kept)

    def with_patience(self, patience: float, *, pulls: bool) -> "StageProfile":
        """The same with other values of ``patience`` and ``pulls``."""
        return replace(self, patience=patience, pulls=pulls)


@dataclass(frozen=True)
class TimedRows:
    """Rows that include weight gradients, with times.

    Attributes:
        rows: one for each rank.
        starts: for each rank the start times of its actions.
    """

    rows: tuple[Row, ...]
    starts: tuple[Floats, ...]


def insert_weight_gradients(
    orders: Sequence[Row], placement: Placement, room: Sequence[float], clock: StageProfile | None = None
) -> TimedRows:
    """Insert the weight gradients into an order of forwards and input gradients.

    Args:
        orders: for each rank its forwards and input gradients; together they must not deadlock.
        placement: stage -> rank.
        room: for each rank its memory limit, in the unit of the clock's sizes.
        clock: seconds and memory of stages; ``None`` for ``StageProfile.unit``.

    Raises:
        ScheduleError: the orders deadlock, or need more memory.
    """
    clock = clock or StageProfile.unit(placement.num_stages)
    columns = Columns.of(orders)
    state = clocked.begin(placement.num_ranks, placement.num_stages, int(columns.microbatch.max(initial=0)) + 1)
    is_done = np.zeros(len(columns.kind), np.bool_)
    order = clocked.Order(*columns[:3], columns.first, columns.first[:-1].copy(), is_done, columns.first[:-1].copy())
    run = kernel(clocked.insert_weight_gradients, state.kind.size)
    run(clock.world(placement, room), state, order, clock.patience, clock.pulls)
    made = timed_rows(state)
    if made is None:
        message = f"the order deadlocks, or needs more memory than {list(room)}"
        raise ScheduleError("acyclic", message, rank=None, slot=None, window="")
    return made


def timed_rows(state: clocked.State) -> TimedRows | None:
    """Rows of a finished kernel; ``None`` if a rank could not finish its row."""
    # The kernel writes a start for each action that it places, and stops where nothing can continue.
    if (state.starts < 0).any():
        return None
    columns = zip(state.kind, state.stage, state.microbatch, strict=True)
    rows = tuple(Row(kind, stage, microbatch, np.zeros_like(kind)) for kind, stage, microbatch in columns)
    return TimedRows(rows, tuple(state.starts))


def rows_with_weight_gradients(
    placement: Placement, orders: Sequence[Row], most_inputs: Sequence[int], *, pulls: bool = False
) -> Rows:
    """What a family returns: the orders with weight gradients inserted, for unit costs as in the papers' figures.

    Args:
        placement: stage -> rank.
        orders: for each rank its forwards and input gradients.
        most_inputs: for each rank the most stage inputs; becomes ``max_stage_inputs``.
        pulls: see ``StageProfile``.
    """
    clock = replace(StageProfile.unit(placement.num_stages), pulls=pulls)
    return Rows(insert_weight_gradients(orders, placement, most_inputs, clock).rows, most_inputs)


def without_weight_gradients(row: Row) -> Row:
    """A row's forwards, and input gradients in place of its backwards: the input of ``insert_weight_gradients``."""
    kind = np.where(row.is_kind(Kind.BACKWARD), np.int32(Kind.BACKWARD_INPUT.code), row.kind)
    return Row(kind, *row.arrays[1:]).take(kind != Kind.BACKWARD_WEIGHT.code)


def with_whole_backwards(row: Row) -> Row:
    """A row with a whole backward in place of each first half, and without second halves."""
    order = without_weight_gradients(row)
    is_half = order.is_kind(Kind.BACKWARD_INPUT)
    return Row(np.where(is_half, np.int32(Kind.BACKWARD.code), order.kind), *order.arrays[1:])
