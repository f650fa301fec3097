"""PyTorch's orders as schedules of ours."""

from functools import cache

from torch.distributed.pipelining import _schedule_visualizer as visualizer

from pipeloom.families import FAMILIES, make_schedule
from pipeloom.schedule import Schedule, parse_schedule
from side_by_side.case import ONE_STAGE, Case, Contender


@cache
def pytorch_order(name: str, pp: int, loops: int, num_microbatches: int) -> Schedule:
    """The compute actions of one of PyTorch's schedules.

    Pairs that its runtime runs as one action are written one after the other. Its 1F1B describes itself wrongly on the
    last rank and runs what ours is, so ours is taken.
    """
    if name == "1F1B":
        return make_schedule("1f1b", pp=pp, loops=1, num_microbatches=num_microbatches)
    rows = visualizer.get_schedule_ops(name, pp, num_microbatches, None if name in ONE_STAGE else loops)
    lines = []
    for row in rows:
        actions = [part for action in row if action is not None for part in (action.sub_actions or (action,))]
        lines.append(" ".join(str(action) for action in actions if action.is_compute_op))
    return parse_schedule("\n".join(lines) + "\n")


def compute_order(case: Case, contender: Contender) -> Schedule:
    """What the ranks of a contender compute, in order."""
    if contender.given is not None:
        return contender.given
    if contender.order in FAMILIES:
        return make_schedule(contender.order, pp=case.pp, loops=contender.loops, num_microbatches=case.num_microbatches)
    return pytorch_order(contender.order, case.pp, contender.loops, case.num_microbatches)
