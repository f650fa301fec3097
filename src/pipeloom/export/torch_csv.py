"""PyTorch's schedule CSV: one line for each rank, one cell for each action, which both name alike."""

import csv
import io

from pipeloom.errors import ScheduleTextError
from pipeloom.passes import add_reduce_grad
from pipeloom.schedule import Level, Schedule
from pipeloom.schedule.kinds import KINDS
from pipeloom.schedule.text import schedule_from_cells


def format_torch_csv(schedule: Schedule) -> str:
    """PyTorch's schedule CSV: one line for each rank, one cell for each action.

    A compute-level schedule is what ``_load_csv(format="compute_only")`` reads, a schedule with
    communication what ``format="compute_comms"`` reads (torch 2.13). The latter gets its ``REDUCE_GRAD``
    actions, because that is where PyTorch's runtime divides the gradients by the number of micro-batches.

    Raises:
        ScheduleTextError: the schedule cuts sequences or has kinds of actions that PyTorch's runtime lacks.
    """
    if schedule.num_slices > 1:
        raise ScheduleTextError("PyTorch's runtime takes whole sequences; write the schedule without token slices")
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
        ScheduleTextError: a cell is no action, or the rows name no placement.
        ScheduleError: the rows break a rule.
    """
    # PyTorch writes an empty cell where a rank is idle; here a row is an order without times.
    lines = [[cell for cell in cells if cell.strip()] for cells in csv.reader(io.StringIO(text))]
    return schedule_from_cells([cells for cells in lines if cells])
