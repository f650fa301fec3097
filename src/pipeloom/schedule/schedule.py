"""The value at the centre: what every pipeline rank does in one step, in order, without times."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from pipeloom.schedule.action import Action, Kind
from pipeloom.schedule.depend import Graph
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.verify import verify

Row = tuple[Action, ...]


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
        rows: for each pipeline rank its actions.
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

    def __post_init__(self) -> None:
        """Verify: there is no unverified schedule."""
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        verify(self)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.placement.num_stages

    def with_rows(self, rows: Iterable[Iterable[Action]], level: Level, **promises: int | None) -> "Schedule":
        """The same step with other rows and other ``promises`` (attributes by name), verified at ``level``."""
        return replace(self, rows=tuple(tuple(row) for row in rows), level=level, **promises)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its rank and slot, row by row."""
        for rank, row in enumerate(self.rows):
            for slot, action in enumerate(row):
                yield rank, slot, action

    @cached_property
    def graph(self) -> Graph:
        """The actions with what each waits for."""
        return Graph(self)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int | None, int]]:
        """(stage, micro-batch, slice) whose backward is split into input and weight halves."""
        return frozenset(action[1:] for _, _, action in self.actions() if action.kind is Kind.BACKWARD_INPUT)

    def input_gradient(self, stage: int, microbatch: int | None, part: int = 0) -> Action:
        """The action that makes the gradient for a stage's input: the backward, or its first half."""
        is_split = (stage, microbatch, part) in self.split_backwards
        return Action(Kind.BACKWARD_INPUT if is_split else Kind.BACKWARD, stage, microbatch, part)

    @cached_property
    def peak_stage_inputs(self) -> tuple[int, ...]:
        """For each rank the largest number of (stage, micro-batch) inputs held at once.

        An input is held from its forward to the end of its backward. Where no backward follows, it is
        gone with the forward, which counts as one.
        """
        return tuple(max(counts, default=0) for counts in map(self.held_inputs, self.rows))

    def held_inputs(self, row: Row) -> Iterator[int]:
        """Number of stage inputs held during each compute action of ``row``, in token slices / slices each."""
        held = 0
        done = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        for action in row:
            if action.kind is Kind.FORWARD:
                yield -(-(held + 1) // self.num_slices)
                held += action.stage >= self.first_backward_stage
            elif action.kind in done:
                held -= 1
