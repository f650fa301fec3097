"""All forwards, then all backwards: GPipe, breadth-first, and forward-only for evaluation."""

from pipeloom.families.family import Request, Rows, family
from pipeloom.schedule import Kind, Placement, Row, Schedule


def _all_inputs(request: Request) -> list[list[int]]:
    return [[request.num_microbatches] * request.loops] * request.placement.num_ranks


def _without_loops(request: Request) -> str | None:
    """Breadth-first with one loop is GPipe; with one micro-batch all orders of whole backwards are the same."""
    return "gpipe" if request.loops == 1 else "depth-first" if request.num_microbatches == 1 else None


def _of_one_microbatch(request: Request) -> str | None:
    return "1f1b" if request.num_microbatches == 1 else None


@family("gpipe", is_looped=False, instead="breadth-first", stage_inputs=_all_inputs, same_as=_of_one_microbatch)
def gpipe(request: Request) -> Rows:
    """All forwards, then all backwards, one stage on each rank (arXiv 1811.06965)."""
    return breadth_first(request)


@family("breadth-first", is_looped=True, stage_inputs=_all_inputs, same_as=_without_loops)
def breadth_first(request: Request) -> Rows:
    """Each local stage for all micro-batches before the next stage (arXiv 2211.05953, section 4).

    Backward takes the stages in reverse and the micro-batches in ascending order, as the forward does, so
    that every directed edge and every stored input is first in, first out; see
    ``docs/decisions/0003-backward-in-ascending-order.md``. With one rank it is breadth-first gradient accumulation.
    """
    microbatches = range(request.num_microbatches)
    rows = []
    for rank in range(request.placement.num_ranks):
        stages = request.local_stages(rank)
        forwards = Row.grid(Kind.FORWARD, stages, microbatches)
        # Ascending micro-batches, not the reverse: then every edge and every
        # stored input is first in, first out (decision 3).
        backwards = Row.grid(Kind.BACKWARD, stages[::-1], microbatches)
        rows.append(forwards + backwards)
    return Rows(rows, [sum(held) for held in _all_inputs(request)])


@family("forward-only", is_looped=True, has_backward=False)
def forward_only(request: Request) -> Rows:
    """Forwards only, breadth-first: evaluation and generation."""
    microbatches = range(request.num_microbatches)
    ranks = range(request.placement.num_ranks)
    rows = [Row.grid(Kind.FORWARD, request.local_stages(rank), microbatches) for rank in ranks]
    # A forward without a backward keeps nothing: one input at a time is enough.
    return Rows(rows, [1] * len(rows))


def forwards_in_turn(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards of one rank, each micro-batch through all stages before the next one, which may depend on it.

    It is no family: training never runs micro-batches that depend on each other.
    """
    row = Row.join([Row.grid(Kind.FORWARD, range(num_stages), [number]) for number in range(num_microbatches)])
    return Schedule((row,), Placement.linear(1, num_stages), num_microbatches, first_backward_stage=num_stages)
