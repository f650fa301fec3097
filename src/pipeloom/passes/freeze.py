"""The pass that removes the backwards of stages whose weights are not trained."""

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.schedule.kinds import COMPUTE_KINDS, Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule

_BACK = tuple(COMPUTE_KINDS - {Kind.FORWARD})


@checked
def freeze(schedule: Schedule, num_stages: int) -> Schedule:
    """Remove the backwards of the first stages, which train nothing.

    The first stage that trains computes no gradient of its input. Stages below it keep no activations; their forwards
    stay in their places.

    Args:
        schedule: compute-only, with a backward of each stage.
        num_stages: stages from the first on; 0 returns the schedule itself.

    Raises:
        UserError: no stage would train, or the schedule has communication already.
    """
    if not num_stages:
        return schedule
    if not 0 < num_stages < schedule.num_stages:
        raise UserError(f"expected at least one of {schedule.num_stages} stages that trains, found {num_stages} frozen")
    if schedule.level is not Level.COMPUTE:
        raise UserError("stages are frozen before sends and receives are added; start from a compute-only schedule")

    def trained(row: Row) -> Row:
        return row.take(~row.is_kind(*_BACK) | (row.stage >= num_stages))

    rows = [trained(row) for row in schedule.rows]
    return schedule.with_rows(rows, schedule.level, first_backward_stage=num_stages)
