"""Schedules as text, one row a line.

Every action is named as PyTorch names it (``2F0``). Placement, counts and level are
read off the actions. What a schedule promises (``max_stage_inputs``, ``max_gathered``, ``gradient_buffers``,
``max_resident``) is not in them.
"""

import math
from collections.abc import Sequence

from pipeloom.errors import ScheduleTextError
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import COMPUTE_KINDS, Kind
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.terminal.words import count

_MOST_PROBLEMS = 20
_MOST_MISSING = 100_000
"""Forwards that may be missing where the rules, which have room for each, say so."""


def format_schedule(schedule: Schedule) -> str:
    """One line for each pipeline rank, actions separated by spaces."""
    return "".join(" ".join(map(str, row)) + "\n" for row in schedule.rows)


def parse_schedule(text: str) -> Schedule:
    """Read what ``format_schedule`` writes. Lines that begin with ``#`` are comments.

    Raises:
        ScheduleTextError: a line has something that is no action, or the rows name no placement.
        ScheduleError: the rows break a rule.
    """
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return schedule_from_cells(lines)


def schedule_from_cells(lines: Sequence[Sequence[str]]) -> Schedule:
    """A schedule from the text of its actions, row by row.

    Raises:
        ScheduleTextError: a cell is no action, or the rows name no placement.
        ScheduleError: the rows break a rule.
    """
    problems: list[str] = []
    rows: list[Row] = []
    for rank, cells in enumerate(lines):
        row: list[Action] = []
        for slot, cell in enumerate(cells):
            try:
                row.append(Action.parse(cell))
            except ScheduleTextError as error:
                problems.append(f"row {rank}, cell {slot}: {error}")
        rows.append(Row.of(row))
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise ScheduleTextError("\n".join(problems[:_MOST_PROBLEMS] + more))
    return schedule_from_rows(rows)


def schedule_from_rows(rows: Sequence[Row]) -> Schedule:
    """A schedule whose placement, counts and level are read off its rows.

    Raises:
        ScheduleTextError: no row runs a forward, or some stage has none.
        ScheduleError: the rows break a rule.
    """
    all_rows = Row.join(rows) if rows else Row.of([])
    is_forward = all_rows.is_kind(Kind.FORWARD)
    if not is_forward.any():
        raise ScheduleTextError("expected rows of actions such as '0F0 0F1 0B0 0B1', found no forward at all")
    sizes = [1 + int(numbers.max()) for numbers in (all_rows.stage, all_rows.microbatch, all_rows.slice)]
    _check_sizes(sizes, int(is_forward.sum()))
    placement = _placement(rows)
    backward = all_rows.stage[all_rows.is_kind(*COMPUTE_KINDS - {Kind.FORWARD, Kind.RECOMPUTE})]
    return Schedule(
        rows=tuple(rows),
        placement=placement,
        num_microbatches=sizes[1],
        num_slices=sizes[2],
        level=Level.COMPUTE if all_rows.is_kind(*COMPUTE_KINDS).all() else Level.COMMUNICATION,
        first_backward_stage=int(backward.min(initial=placement.num_stages)),
    )


def _check_sizes(sizes: Sequence[int], num_forwards: int) -> None:
    """Refuse rows that lack most of the forwards that their numbers ask for, before anything has room for each.

    Every stage runs each micro-batch, slice by slice. Where few are missing, the rules say which and show the place.
    """
    for what, size in zip(("stages", "micro-batches", "token slices"), sizes, strict=True):
        if size - num_forwards > _MOST_MISSING:
            found = f"number {size - 1} in rows of {count(num_forwards, 'forward')}"
            raise ScheduleTextError(f"expected {what} that count up from 0, found {found}")
    wanted = math.prod(sizes)
    if wanted - num_forwards > _MOST_MISSING:
        numbers = " x ".join(f"{size:,}" for size in sizes)
        raise ScheduleTextError(
            f"expected a forward of every stage for every micro-batch and token slice, which is {numbers} = "
            f"{wanted:,}, found {num_forwards:,}"
        )


def _placement(rows: Sequence[Row]) -> Placement:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for stage in dict.fromkeys(row.stage[row.is_kind(Kind.FORWARD)].tolist()):
            owner.setdefault(stage, rank)
    missing = [stage for stage in range(max(owner) + 1) if stage not in owner]
    if missing:
        raise ScheduleTextError(f"expected forwards of every stage 0..{max(owner)}, found none of {missing}")
    return Placement(tuple(owner[stage] for stage in range(len(owner))))
