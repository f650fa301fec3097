"""Schedules as text: one row a line, and PyTorch's schedule CSV.

Both name every action as PyTorch does (``2F0``), so that files interchange. Placement, counts and level are
read off the actions. What a schedule promises (``max_stage_inputs``, ``max_gathered``, ``gradient_buffers``,
``max_resident``) is not in them.
"""

import csv
import io
from collections.abc import Sequence

from pipeloom.errors import ScheduleTextError
from pipeloom.schedule.action import COMPUTE_KINDS, MOVE_KINDS, STAGE_SWAP_KINDS, TIED_KINDS, Action, Kind
from pipeloom.schedule.lower_sharding import add_reduce_grad
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
    return _schedule_from_cells(lines)


def format_torch_csv(schedule: Schedule) -> str:
    """PyTorch's schedule CSV: one line for each rank, one cell for each action.

    A compute-level schedule is what ``_load_csv(format="compute_only")`` reads, a schedule with
    communication what ``format="compute_comms"`` reads (torch 2.13). The latter gets its ``REDUCE_GRAD``
    actions, because that is where PyTorch's runtime divides the gradients by the number of micro-batches.

    Raises:
        ScheduleTextError: the schedule swaps, recomputes or cuts sequences, or sends a tied matrix, which PyTorch's
            runtime does not.
    """
    if schedule.num_slices > 1:
        raise ScheduleTextError("PyTorch's runtime takes whole sequences; write the schedule without token slices")
    if any(row.is_kind(*MOVE_KINDS, *STAGE_SWAP_KINDS).any() for row in schedule.rows):
        raise ScheduleTextError(
            "PyTorch's runtime swaps neither activations nor stages; write the schedule before anything is swapped"
        )
    if any(row.is_kind(Kind.RECOMPUTE).any() for row in schedule.rows):
        raise ScheduleTextError("PyTorch's runtime has no R; write the schedule before it recomputes anything")
    if any(row.is_kind(*TIED_KINDS).any() for row in schedule.rows):
        raise ScheduleTextError(
            "PyTorch's runtime has no messages about a tied matrix; write the schedule before they are added"
        )
    if schedule.level is Level.COMMUNICATION:
        schedule = add_reduce_grad(schedule)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[str(action) for action in row] for row in schedule.rows])
    return text.getvalue()


def parse_torch_csv(text: str) -> Schedule:
    """Read PyTorch's schedule CSV, compute-only or with communication. Empty cells (idle slots) and lines are dropped.

    Raises:
        ScheduleTextError: a cell is no action, or the rows name no placement.
        ScheduleError: the rows break a rule.
    """
    lines = [[cell for cell in cells if cell.strip()] for cells in csv.reader(io.StringIO(text))]
    return _schedule_from_cells([cells for cells in lines if cells])


def _schedule_from_cells(lines: Sequence[Sequence[str]]) -> Schedule:
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
