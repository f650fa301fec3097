"""Whether all forwards of each stage precede its first backward, as a loss of the whole batch needs."""

from pipeloom.schedule.kinds import GOES_BACK, GOES_FORTH
from pipeloom.schedule.schedule import Schedule

WHOLE_BATCH = (
    "model.balance batch needs the loads of experts in the whole batch before the first backward, but a backward of "
    "stage {} precedes one of its forwards; use schedule.family breadth-first, or model.balance microbatch"
)


def interleaved_stage(schedule: Schedule) -> int | None:
    """The first stage with a backward before one of its forwards in its row; ``None`` if there is none."""
    found: list[int] = []
    for row in schedule.rows:
        is_backward = row.is_kind(*GOES_BACK).tolist()
        is_forward = row.is_kind(*GOES_FORTH).tolist()
        begun: set[int] = set()
        for stage, goes_back, goes_forth in zip(row.stage.tolist(), is_backward, is_forward, strict=True):
            if goes_back:
                begun.add(stage)
            elif goes_forth and stage in begun:
                found.append(stage)
    return min(found, default=None)
