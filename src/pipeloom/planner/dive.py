"""Layouts that are likely to be good, found without looking at all of them: an answer for whoever has little time."""

from collections.abc import Callable, Iterator, Sequence

from pipeloom.planner.candidate import Candidate
from pipeloom.planner.settle import settle
from pipeloom.planner.space import Arrangement, Cut, Leaf

MOST_ON_RANKS = 2000
"""Micro-batches times pipeline ranks of what is looked at first: longer schedules take seconds to make."""
MOST_ON_STAGES = 4000
"""The same with stages in place of ranks, of a cut."""
ALONE = 24
"""Promising ones that are looked at before the first lean one."""
MOST_TRIED = 4
"""Leaves of an arrangement that are settled, which takes as long as making their schedules."""


def likely(arrangements: Sequence[Arrangement], is_found: Callable[[], bool]) -> Iterator[Arrangement]:
    """Arrangements in an order in which an answer is found soon, and good ones after it.

    Those with short schedules first, the most promising before the others. Where none of the first fits, each is
    followed by one that needs little memory, until one fits.

    Args:
        arrangements: in any order.
        is_found: whether there is an answer.
    """
    short = sorted((one for one in arrangements if _on_ranks(one) <= MOST_ON_RANKS), key=_estimate_s)
    # What fits with some layers recomputed fits with all of them, too, which needs less.
    lean = iter(sorted((one for one in short if one.kept != "some"), key=lambda one: one.missing_bytes))
    for number, one in enumerate(short):
        yield one
        # What promises most recomputes and shares least, so where memory is short none of the first many may fit.
        small = None if is_found() or number < ALONE else next(lean, None)
        if small is not None:
            yield small
    yield from sorted((one for one in arrangements if _on_ranks(one) > MOST_ON_RANKS), key=_on_ranks)


def _estimate_s(arrangement: Arrangement) -> float:
    """Seconds of the step, about: the bound, which has no bubble, with that of as many loops as there may be."""
    run = arrangement.run
    loops = max(1, run.shape.layers // run.pp)
    # The bubble of the interleaved schedule: (P - 1) / (M V) of the ideal time (arXiv 2104.04473, section 2.2).
    return arrangement.bound_s * (1 + (run.pp - 1) / (run.num_microbatches * loops))


def _on_ranks(arrangement: Arrangement) -> int:
    return arrangement.run.num_microbatches * arrangement.run.pp


def _is_short(cut: Cut) -> bool:
    """Whether its schedules are made soon; where none is, the cut with the fewest stages counts as such."""
    run = cut.run
    return run.num_microbatches * run.num_stages <= MOST_ON_STAGES or run.loops == 1


def first_of(arrangement: Arrangement, limit_s: float) -> tuple[Leaf, Candidate] | None:
    """The first of an arrangement's leaves, in the order of their bounds, that fits; ``None`` if none of a few does.

    Args:
        arrangement: what is looked at.
        limit_s: seconds of a step that are too many.
    """
    leaves = [
        narrowed
        for cut in arrangement.cuts()
        # Cheap questions first: leaves are many, and each has bounds of its own to compute.
        if _is_short(cut) and cut.bound_s <= limit_s and cut.missing_bytes <= 0
        for leaf in cut.leaves()
        if (narrowed := leaf.narrowed()) is not None
    ]
    for leaf in sorted(leaves, key=lambda leaf: leaf.bound_s)[:MOST_TRIED]:
        # The first that fits is taken: by their bounds the others promise less, and the proof looks at them.
        chosen = settle(leaf) if leaf.bound_s <= limit_s else None
        if chosen is not None:
            return leaf, chosen
    return None
