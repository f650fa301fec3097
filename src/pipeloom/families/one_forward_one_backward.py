"""1F1B, depth-first (interleaved 1F1B), and the hybrid of depth-first and breadth-first."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from pipeloom.errors import ScheduleError
from pipeloom.families.family import Request, Rows, StageInputs, family
from pipeloom.passes import sliced
from pipeloom.schedule import Kind, Row, Schedule


def inputs_in_turn(hops_back: int) -> StageInputs:
    """Closed form of stage inputs; none for placements that are not looped, which may need more warm-up.

    Args:
        hops_back: as for ``alternate``.
    """

    def inputs(request: Request) -> list[list[int]] | None:
        if request.num_slices > 1:
            return None
        if request.group_size == 1:
            return [[1] * request.loops]
        if not request.is_looped:
            return None
        sizes = [len(group) for group in _groups(request.num_microbatches, request.group_size)]
        return [_taken(sizes, request.loops, most) for most in _most_inputs(request, hops_back, 0)]

    return inputs


def _taken(group_sizes: Sequence[int], loops: int, number: int) -> list[int]:
    """For each local stage the number of those among a rank's first ``number`` forwards that run it."""
    held, left = [0] * loops, number
    # Forwards go through all local stages for a group before the next group, so that is the order of what is held.
    for size in group_sizes:
        for local in range(loops):
            held[local] += min(size, left)
            left -= min(size, left)
        if left == 0:
            break
    return held


def _most_inputs(request: Request, hops_back: int, extra: int) -> list[int]:
    """For each rank its most stage inputs: warm-up forwards and one more, in micro-batches, rounded up."""
    most, among = request.num_microbatches * request.loops, request.num_slices
    # Plus the forward right before the first backward, which is the first that frees an input.
    return [min(-(-(number + 1) // among), most) for number in _warmups(request, hops_back, extra)]


@family("1f1b", is_looped=False, instead="depth-first", stage_inputs=inputs_in_turn(hops_back=1), slices_itself=True)
def one_forward_one_backward(request: Request) -> Rows:
    """Forward and backward in turn, one stage on each rank (arXiv 1806.03377; arXiv 2104.04473, section 2.2.1).

    Rank ``r`` of ``P`` begins with ``min(P - r - 1, M)`` forwards. With K token slices it takes turns by the slice,
    after ``K - 1`` forwards more: the first backward is that of the first micro-batch's last slice (Seq1F1B, arXiv
    2406.03488).
    """
    return alternate(request, hops_back=1)


def _of_few_microbatches(request: Request) -> str | None:
    """With one loop and at most two micro-batches the longer warm-up never ends, so the rows are those of 1F1B."""
    return "1f1b" if request.loops == 1 and request.num_microbatches <= 2 else None


def _of_one_group(request: Request) -> str | None:
    """The hybrid equals depth-first with one loop, and where both have equally many groups."""
    # Groups depend on the size only through their number (`_groups`).
    sizes = (request.group_size, request.placement.num_ranks)
    groups = {max(1, request.num_microbatches // size) for size in sizes}  # the remainder is distributed
    return "depth-first" if request.loops == 1 or len(groups) == 1 else None


@family(
    "depth-first",
    is_looped=True,
    stage_inputs=inputs_in_turn(hops_back=2),
    slices_itself=True,
    same_as=_of_few_microbatches,
)
def depth_first(request: Request) -> Rows:
    """Groups of P micro-batches (a remainder is spread) through all local stages (interleaved 1F1B, arXiv 2104.04473).

    The hybrid with group size P. With one rank it is depth-first gradient accumulation: a micro-batch goes forward
    and back before the next. With one loop it is 1F1B with twice the warm-up. With token slices groups are of as many
    micro-batches as have P slices.
    """
    return alternate(request, hops_back=2)


@family(
    "hybrid",
    is_looped=True,
    is_grouped=True,
    stage_inputs=inputs_in_turn(hops_back=2),
    slices_itself=True,
    same_as=_of_one_group,
)
def hybrid(request: Request) -> Rows:
    """Groups of N micro-batches through all local stages, P <= N <= M (arXiv 2407.21783, section 3.3.2).

    N = P is depth-first. N = M has breadth-first's forward order, and its last local stage begins its backward early.
    """
    return alternate(request, hops_back=2)


def in_turn(forwards: Row, backwards: Row, num_warmup: int) -> Row:
    """``num_warmup`` forwards, then forward and backward in turn, then the rest of the backwards."""
    rest = forwards[num_warmup:]
    return forwards[:num_warmup] + rest.alternate(backwards[: len(rest)]) + backwards[len(rest) :]


def alternate(request: Request, hops_back: int) -> Rows:
    """Warm-up forwards, then forward and backward in turn, then the rest of the backwards.

    The warm-up of a rank lasts until its first gradient can arrive: ``hops_back`` times the number of stages behind
    its last one, plus the first group on all its earlier stages, plus all slices but one of a micro-batch. On a
    looped placement that is exact. On others it may deadlock; then every rank gets the same number of further warm-up
    forwards, the fewest that do not deadlock, found by bisection.

    Args:
        request: sizes.
        hops_back: forwards of warm-up for each stage between a rank's last stage and the model's last.
    """
    # One rank waits for no other: no warm-up at all holds the least.
    if request.group_size == request.placement.num_ranks == 1:
        return _one_by_one(request)
    if request.is_looped:
        return _with_warmup(request, hops_back, 0)
    extras = range(request.num_microbatches * request.loops)  # with as many, all forwards come first

    def is_free(extra: int) -> bool:
        return not _deadlocks(request, _with_warmup(request, hops_back, extra))

    return _with_warmup(request, hops_back, bisect_left(extras, True, key=is_free))


def _one_by_one(request: Request) -> Rows:
    """Groups of one, which only a single rank can have: each micro-batch goes forward and back before the next."""
    stages = request.local_stages(0)
    parts: list[Row] = []
    for microbatch in range(request.num_microbatches):
        parts += [
            Row.grid(Kind.FORWARD, stages, [microbatch]),
            Row.grid(Kind.BACKWARD, stages[::-1], [microbatch]),
        ]
    return Rows([sliced(Row.join(parts), request.num_slices)], [request.loops])


def _deadlocks(request: Request, answer: Rows) -> bool:
    try:
        Schedule(tuple(map(Row.of, answer.rows)), request.placement, request.num_microbatches)
    except ScheduleError as error:
        # Any other rule is broken by a bug of this function, which more warm-up must not hide.
        if error.rule != "acyclic":
            raise
        return True
    return False


def _with_warmup(request: Request, hops_back: int, extra: int) -> Rows:
    groups = _groups(request.num_microbatches, request.group_size)
    rows: list[Row] = []
    for rank, num_warmup in enumerate(_warmups(request, hops_back, extra)):
        stages = request.local_stages(rank)
        forwards = Row.join([Row.grid(Kind.FORWARD, stages, group) for group in groups])
        backwards = Row.join([Row.grid(Kind.BACKWARD, stages[::-1], group) for group in groups])
        among = request.num_slices
        rows.append(in_turn(sliced(forwards, among), sliced(backwards, among), num_warmup))
    return Rows(rows, _most_inputs(request, hops_back, extra))


def _warmups(request: Request, hops_back: int, extra: int) -> list[int]:
    """For each rank its warm-up forwards, in slices; one more forward follows before the first backward."""
    placement, among = request.placement, request.num_slices
    most = request.num_microbatches * request.loops * among
    first_group = _groups(request.num_microbatches, request.group_size)[0]
    to_end = [placement.num_stages - 1 - request.local_stages(rank)[-1] for rank in range(placement.num_ranks)]
    # The last local stage is reached after all earlier ones ran the whole first group; among - 1: a backward begins
    # with the last slice of a micro-batch.
    rounds = (request.loops - 1) * len(first_group) * among + among - 1
    return [min(hops_back * hops + rounds + extra, most) for hops in to_end]


def _groups(num_microbatches: int, group_size: int) -> list[range]:
    """Micro-batches in groups of at least ``group_size``, as even as possible, larger ones first.

    A group of fewer than P slices would deadlock, so a remainder is spread over the groups. Fewer micro-batches than
    ``group_size`` make one group.
    """
    num_groups = max(1, num_microbatches // group_size)
    # Rounded up, so that larger groups come first: the warm-up is the first group's, and a larger one needs more.
    bounds = [-(-num_microbatches * i // num_groups) for i in range(num_groups + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]
