"""The value at the centre: what every pipeline rank does in one step, in order, without times."""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Facts, Graph, Promises
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.rules import verify
from pipeloom.terminal.notebook import Pictured
from pipeloom.terminal.words import count

Promise = int | tuple[int, ...] | None
"""A limit that a schedule promises for its rows, or an assignment of ranks."""


class Level(StrEnum):
    """How much of the machine a schedule mentions."""

    COMPUTE = "compute"
    """Forward and backward only; tensors reach the next stage by themselves."""
    COMMUNICATION = "communication"
    """Every tensor that changes rank has its send and its receive; ready to run."""


@dataclass(frozen=True, repr=False)
class Schedule(Pictured, Promises):
    """One row of actions for each pipeline rank. A schedule that exists obeys every rule of its level.

    A rank issues its row from left to right. The row orders what runs on one lane; between lanes only
    dependencies order anything (see ``pipeloom.schedule.facts``). A notebook shows its timeline.

    Examples:
        >>> from pipeloom import make_schedule
        >>> schedule = make_schedule("breadth-first", pp=4, loops=2, num_microbatches=8)
        >>> schedule
        Schedule(8 stages on 4 ranks, 8 micro-batches, 128 actions, level compute)
        >>> schedule.rows[0][0], schedule.peak_stage_inputs
        (Action(kind=<Kind.FORWARD: 'F'>, stage=0, microbatch=0, slice=0), (16, 16, 16, 16))

    Attributes:
        rows: for each pipeline rank its actions; any sequences of actions become ``Row``s.
        placement: stage -> pipeline rank.
        num_microbatches: micro-batches of a step.
        num_slices: token slices of a micro-batch; 1 where sequences are whole.
        level: how much of the machine the rows mention.
        first_backward_stage: stages below it run no backward: 0 to train everything, ``num_stages`` to
            evaluate, in between when the first stages are frozen.

    What it promises is in ``Promises``.

    Raises:
        ScheduleError: the rows break a rule.
    """

    rows: tuple[Row, ...]
    placement: Placement
    num_microbatches: int
    num_slices: int = 1
    level: Level = Level.COMPUTE
    first_backward_stage: int = 0

    def __post_init__(self) -> None:
        """Verify: there is no unverified schedule."""
        # The class is frozen: this is the one place at which a field may still change.
        object.__setattr__(self, "rows", tuple(Row.of(row) for row in self.rows))
        verify(self.facts)

    def __repr__(self) -> str:
        """Sizes; ``format_schedule`` has the rows."""
        slices = f", {count(self.num_slices, 'token slice')}" if self.num_slices > 1 else ""
        return (
            f"Schedule({count(self.num_stages, 'stage')} on {count(self.num_ranks, 'rank')}, "
            f"{count(self.num_microbatches, 'micro-batch')}{slices}, {count(self.num_actions, 'action')}, "
            f"level {self.level.value})"
        )

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
        promises = Promises(**{field.name: getattr(self, field.name) for field in fields(Promises)})
        return Facts(
            self.rows, self.placement, shape, self.level is not Level.COMPUTE, self.first_backward_stage, promises
        )

    @property
    def graph(self) -> Graph:
        """The actions with what each waits for."""
        return self.facts.graph

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """Stages with a backward that is split into its halves."""
        return frozenset(np.flatnonzero(self.facts.is_split.any(axis=(1, 2))).tolist())

    def promising_its_peak(self) -> "Schedule":
        """The same with the stage inputs that its ranks hold as ``max_stage_inputs``."""
        promising = copy(self)
        # True by definition, so the rows, which are verified, are not verified again.
        object.__setattr__(promising, "max_stage_inputs", self.peak_stage_inputs)
        promising.__dict__.pop("facts", None)  # which contain the promises
        return promising

    @property
    def peak_stage_inputs(self) -> tuple[int, ...]:
        """For each rank the largest number of (stage, micro-batch) inputs held at once, see ``Facts``."""
        return self.facts.peak_stage_inputs
