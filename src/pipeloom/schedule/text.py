"""Schedules as text, one row a line.

Every action is named as PyTorch names it (``2F0``). Placement, counts and level are
read off the actions. What a schedule promises (``max_stage_inputs``, ``max_gathered``, ``gradient_buffers``,
``max_resident``) is not in them.
"""

from collections.abc import Sequence

from pipeloom.errors import ScheduleTextError
from pipeloom.schedule.action import COMPUTE_KINDS, Action, Kind
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule


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
        raise ScheduleTextError("\n".join(problems))
    return schedule_from_rows(rows)


def schedule_from_rows(rows: Sequence[Row]) -> Schedule:
    """A schedule whose placement, counts and level are read off its rows.

    Raises:
        ScheduleTextError: no row runs a forward, or some stage has none.
        ScheduleError: the rows break a rule.
    """
    actions = [action for row in rows for action in row]
    if not any(action.kind is Kind.FORWARD for action in actions):
        raise ScheduleTextError("expected rows of actions such as '0F0 0F1 0B0 0B1', found no forward at all")
    placement = _placement(rows)
    backward = {a.stage for a in actions if a.kind in COMPUTE_KINDS - {Kind.FORWARD, Kind.RECOMPUTE}}
    return Schedule(
        rows=tuple(rows),
        placement=placement,
        num_microbatches=1 + max(action.microbatch or 0 for action in actions),
        num_slices=1 + max(action.slice for action in actions),
        level=Level.COMPUTE if all(a.kind in COMPUTE_KINDS for a in actions) else Level.COMMUNICATION,
        first_backward_stage=min(backward, default=placement.num_stages),
    )


def _placement(rows: Sequence[Row]) -> Placement:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind is Kind.FORWARD:
                owner.setdefault(action.stage, rank)
    missing = [stage for stage in range(max(owner) + 1) if stage not in owner]
    if missing:
        raise ScheduleTextError(f"expected forwards of every stage 0..{max(owner)}, found none of {missing}")
    return Placement(tuple(owner[stage] for stage in range(len(owner))))
