"""The strategy ``slices``: with few micro-batches, sequences are cut into token slices, so that ranks start earlier.

Slices have a lower arithmetic efficiency, which no bound covers. The estimate is the bound of a step whose slices take
as long together as whole sequences; the search tries the few layouts with the lowest estimates.
"""

from collections.abc import Iterator
from dataclasses import replace

from pipeloom.planner.candidate import Candidate, complete
from pipeloom.planner.slice_lengths import best_slices, modelled_table
from pipeloom.planner.space import Leaf
from pipeloom.planner.strategies.strategy import STRATEGIES, SearchState, Strategy, one_rank_limit
from pipeloom.predict.step import SimulatedStep

NUMBERS = (2, 4, 8)
"""Numbers of even slices to try."""
FEW = 2
"""Sequences are cut if there are fewer micro-batches than this times the pipeline ranks."""
MOST_ACTIONS = 40_000
"""Actions of a schedule of slices; longer schedules take long to make, and their bubbles are small."""


def _numbers(leaf: Leaf) -> list[int]:
    run = leaf.cut.run
    actions = 2 * run.num_stages * run.num_microbatches
    return [number for number in NUMBERS if number * run.tp <= run.seq and number * actions <= MOST_ACTIONS]


def _estimate_s(leaf: Leaf) -> float:
    sharding, numbers = leaf.sharding, _numbers(leaf)
    time = leaf.cut.time.sharded(sharding.levels[0], sharding.replicate)
    return time.sliced_s(max(numbers)) if numbers else float("inf")


def _build(leaf: Leaf) -> Candidate | None:
    """The candidate with the fastest number of even slices; ``None`` if none fits."""
    whole = complete(leaf)
    if whole is None:
        return None
    sliced = [_with_slices(whole, number) for number in _numbers(leaf)]
    steps = [(one.simulate().prediction, one) for one in sliced]
    fitting = [(prediction.step_time_s, one) for prediction, one in steps if one.has_room_for(prediction)]
    # Of equal times the fewest slices, which come first.
    return min(fitting, key=lambda one: one[0])[1] if fitting else None


def _with_slices(whole: Candidate, number: int) -> Candidate:
    return replace(whole, knobs=replace(whole.knobs, choice=replace(whole.knobs.choice, num_slices=number)))


def _with_programmed_lengths(chosen: Candidate) -> Iterator[SimulatedStep]:
    """The step with the slice lengths of TeraPipe's dynamic program, if it fits.

    Used for a few candidates only, since the dynamic program takes longer than a simulation.
    """
    run = chosen.run
    lengths = best_slices(modelled_table(chosen.placed), run.pp, run.num_microbatches * run.loops).lengths
    # One slice is the whole sequence, which is simulated already.
    if len(lengths) < 2 or 2 * run.num_stages * run.num_microbatches * len(lengths) > MOST_ACTIONS:
        return
    sliced = _with_slices(chosen.of(replace(run, slices=lengths)), len(lengths))
    step = sliced.simulate()
    if sliced.has_room_for(step.prediction):
        yield step


def _few_microbatches(state: SearchState) -> Iterator[Leaf]:
    """Leaves with few micro-batches and whole backwards that may be faster than the fastest so far."""
    for arrangement in state.arrangements:
        run = arrangement.run
        is_short = run.pp > 1 and run.num_microbatches < FEW * run.pp
        is_plain = not (arrangement.splits or arrangement.recomputed == "some" or run.ep_overlap)
        if is_short and is_plain and arrangement.time.busy_s <= state.fastest_s:
            names = arrangement.question.families_of_parts
            yield from (leaf for cut in arrangement.cuts for leaf in cut.leaves() if leaf.choice.family in names)


STRATEGIES.add(
    "slices",
    Strategy(
        summary="cut sequences into token slices, where there are few micro-batches",
        without="whole sequences",
        applies=_few_microbatches,
        estimate=_estimate_s,
        least=lambda leaf: leaf.cut.arrangement.time.busy_s,
        build=_build,
        is_in=lambda step: step.knobs.choice.num_slices > 1,
        refine=_with_programmed_lengths,
        limit=one_rank_limit,
    ),
)
