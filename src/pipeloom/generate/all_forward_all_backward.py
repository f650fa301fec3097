"""All forwards, then all backwards: GPipe, breadth-first, and forward-only for evaluation."""

from pipeloom.generate.family import Request, Rows, backward, family, forward


@family("gpipe", is_looped=False, instead="breadth-first")
def gpipe(request: Request) -> Rows:
    """All forwards, then all backwards, one stage on each rank (arXiv 1811.06965)."""
    return breadth_first(request)


@family("breadth-first", is_looped=True)
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
        forwards = [forward(stage, microbatch) for stage in stages for microbatch in microbatches]
        backwards = [backward(stage, microbatch) for stage in reversed(stages) for microbatch in microbatches]
        rows.append(forwards + backwards)
    return Rows(rows, [request.num_microbatches * request.loops] * len(rows))


@family("forward-only", is_looped=True, has_backward=False)
def forward_only(request: Request) -> Rows:
    """Forwards only, breadth-first: evaluation and generation."""
    microbatches = range(request.num_microbatches)
    rows = [
        [forward(stage, microbatch) for stage in request.local_stages(rank) for microbatch in microbatches]
        for rank in range(request.placement.num_ranks)
    ]
    return Rows(rows, [1] * len(rows))
