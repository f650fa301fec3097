"""The value at the centre: what every pipeline rank does in one step, in order, without times."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Facts
from pipeloom.schedule.graph import Graph
from pipeloom.schedule.kinds import KINDS, Kind
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.verify import verify

Promise = int | tuple[int, ...] | None
"""What a schedule says of its rows beside them."""


class Level(StrEnum):
    """How much of the machine a schedule mentions."""

    COMPUTE = "compute"
    """Forward and backward only; tensors reach the next stage by themselves."""
    COMMUNICATION = "communication"
    """Every tensor that changes rank has its send and its receive; ready to run."""


@dataclass(frozen=True)
class Schedule:
    """One row of actions for each pipeline rank. A schedule that exists obeys every rule of its level.

    A rank issues its row from left to right. The row orders what runs on one lane; between lanes only
    dependencies order anything (see ``pipeloom.schedule.depend``).

    Attributes:
        rows: for each pipeline rank its actions; any sequences of actions become ``Row``s.
        placement: stage -> pipeline rank.
        num_microbatches: micro-batches of a step.
        num_slices: token slices of a micro-batch; 1 where sequences are whole.
        level: how much of the machine the rows mention.
        first_backward_stage: stages below it run no backward: 0 to train everything, ``num_stages`` to
            evaluate, in between when the first stages are frozen.
        max_stage_inputs: for each rank the most (stage, micro-batch) inputs that it may hold at once;
            ``None`` for no limit.
        max_gathered: the most stages that a rank may have gathered at once, those being gathered included;
            ``None`` for no limit.
        gradient_buffers: the most stages whose unreduced gradients a rank has room for: the first backward of a
            further one waits for a reduction to end. ``None`` for room for all.
        max_resident: the most of its swapped stages that a rank may have on the device at once, those on their way
            included, in units of ``stage_sizes``; ``None`` for no limit.
        stage_sizes: for each stage what it takes of ``max_resident``, such as bytes; ``None`` for one each.
        partners: for each rank the rank to which it evicts, and which evicts to it: pairs, so that
            ``partners[partners[r]] == r``. A rank without one names itself. What a partner does to accept and to give
            back is not in its row. ``None`` where nothing says, which then is fit for simulation only.

    Raises:
        ScheduleError: the rows break a rule.
    """

    rows: tuple[Row, ...]
    placement: Placement
    num_microbatches: int
    num_slices: int = 1
    level: Level = Level.COMPUTE
    first_backward_stage: int = 0
    max_stage_inputs: tuple[int, ...] | None = None
    max_gathered: int | None = None
    gradient_buffers: int | None = None
    max_resident: int | None = None
    stage_sizes: tuple[int, ...] | None = None
    partners: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Verify: there is no unverified schedule."""
        object.__setattr__(self, "rows", tuple(Row.of(row) for row in self.rows))
        verify(self)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        """Actions of all ranks."""
        return sum(map(len, self.rows))

    def with_rows(self, rows: Iterable[Iterable[Action]], level: Level, **promises: Promise) -> "Schedule":
        """The same step with other rows and other ``promises`` (attributes by name), verified at ``level``."""
        return replace(self, rows=tuple(Row.of(row) for row in rows), level=level, **promises)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its rank and slot, row by row."""
        for rank, row in enumerate(self.rows):
            for slot, action in enumerate(row):
                yield rank, slot, action

    @cached_property
    def facts(self) -> Facts:
        """The schedule in arrays."""
        shape = (self.num_stages, self.num_microbatches, self.num_slices)
        return Facts(self.rows, self.placement, shape, self.level is not Level.COMPUTE)

    @cached_property
    def graph(self) -> Graph:
        """The actions with what each waits for."""
        return Graph(self.facts, self.gradient_buffers, self.max_resident, self.stage_sizes)

    @cached_property
    def collectives(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each stage how often its weights are gathered in a step, and how often its gradients are reduced."""
        kind, stage = self.facts.columns[:2]
        gathers, reductions = (
            np.bincount(stage[kind == KINDS.index(one)], minlength=self.num_stages).tolist()
            for one in (Kind.UNSHARD, Kind.REDUCE_GRAD)
        )
        return tuple(gathers), tuple(reductions)

    def input_gradient(self, stage: int, microbatch: int, part: int = 0) -> Action:
        """The action that makes the gradient for a stage's input: the backward, or its first half."""
        is_split = self.facts.is_split[stage, microbatch, part]
        return Action(Kind.BACKWARD_INPUT if is_split else Kind.BACKWARD, stage, microbatch, part)

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """Stages with a backward that is split into its halves."""
        return frozenset(np.flatnonzero(self.facts.is_split.any(axis=(1, 2))).tolist())

    @cached_property
    def peak_stage_inputs(self) -> tuple[int, ...]:
        """For each rank the largest number of (stage, micro-batch) inputs held at once.

        An input is held from its forward to the end of its backward. Where no backward follows, it is
        gone with the forward, which counts as one. What is evicted or offloaded counts as held, since it leaves while
        the rank goes on, and what partners evict does not; ``pipeloom.schedule.held`` knows on a clock.
        """
        return tuple(int(self.held_inputs(row).max(initial=0)) for row in self.rows)

    def held_inputs(self, row: Row) -> NDArray[np.int64]:
        """Number of stage inputs held during each forward of ``row``, in token slices / slices each."""
        begins = row.is_kind(Kind.FORWARD)
        ends = row.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        change = (begins & (row.stage >= self.first_backward_stage)).astype(np.int64) - ends
        before = np.cumsum(change) - change
        return -(-(before[begins] + 1) // self.num_slices)
