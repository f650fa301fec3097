"""PyTorch's schedule CSV: a line for each rank, a cell for each action; both use the same names of actions."""

import csv
import io

from pipeloom.errors import ScheduleTextError
from pipeloom.passes import add_reduce_grad
from pipeloom.schedule import Level, Schedule
from pipeloom.schedule.kinds import KINDS
from pipeloom.schedule.text import schedule_from_cells


def format_torch_csv(schedule: Schedule) -> str:
    """The schedule as PyTorch's CSV.

    A schedule of compute actions is for ``_load_csv(format="compute_only")``, one with communication for
    ``format="compute_comms"`` (torch 2.13). The latter gets ``REDUCE_GRAD`` actions, because PyTorch's runtime divides
    gradients by the number of micro-batches in these.

    Raises:
        ScheduleTextError: the schedule has token slices, or kinds of actions that PyTorch's runtime lacks.
    """
    if schedule.num_slices > 1:
        raise ScheduleTextError("PyTorch's runtime runs whole sequences only; write the schedule without token slices")
    missing = [kind for kind in KINDS if not kind.in_torch and any(row.is_kind(kind).any() for row in schedule.rows)]
    if missing:
        letters, words = (", ".join(names) for names in (missing, [kind.words for kind in missing]))
        raise ScheduleTextError(
            f"PyTorch's runtime has no {letters} ({words}); write the schedule before they are added"
        )
    if schedule.level is Level.COMMUNICATION:
        schedule = add_reduce_grad(schedule)
    text = io.StringIO()
    # The csv module ends lines with \r\n unless it is set.
    csv.writer(text, lineterminator="\n").writerows([[str(action) for action in row] for row in schedule.rows])
    return text.getvalue()


def parse_torch_csv(text: str) -> Schedule:
    """Read PyTorch's schedule CSV, compute-only or with communication. Empty cells (idle slots) and lines are dropped.

    Raises:
        ScheduleTextError: a cell is not an action, or the rows do not determine a placement.
        ScheduleError: the rows break a rule.
    """
    # PyTorch writes empty cells for idle times; here a row has no times.
    lines = [[cell for cell in cells if cell.strip()] for cells in csv.reader(io.StringIO(text))]
    return schedule_from_cells([cells for cells in lines if cells])
