"""Token slices in the search: where there are few micro-batches, sequences are cut, so that ranks begin sooner.

There is no bound for slices, since they fill a device less well; an estimate is what a step takes at least if they
took no longer together. A search tries the few layouts that come first by it.
"""

from collections.abc import Iterator
from dataclasses import replace

from pipeloom.planner.settle import Candidate, settle
from pipeloom.planner.slice_lengths import best_slices, modelled_table
from pipeloom.planner.space import Leaf
from pipeloom.planner.strategies.strategy import STRATEGIES, Left, Strategy
from pipeloom.predict.step import SimulatedStep

NUMBERS = (2, 4, 8)
"""Even slices that are tried."""
FEW = 2
"""Sequences are cut where there are fewer micro-batches than this times the pipeline ranks."""
MOST_ACTIONS = 40_000
"""Of a schedule of slices; more take longer than they are worth, for long steps have small bubbles."""


def _numbers(leaf: Leaf) -> list[int]:
    run = leaf.cut.run
    actions = 2 * run.num_stages * run.num_microbatches
    return [number for number in NUMBERS if number * run.tp <= run.seq and number * actions <= MOST_ACTIONS]


def _estimate_s(leaf: Leaf) -> float:
    sharding, numbers = leaf.sharding, _numbers(leaf)
    time = leaf.cut.time.sharded(sharding.levels[0], sharding.replicate)
    return time.sliced_s(max(numbers)) if numbers else float("inf")


def _build(leaf: Leaf) -> Candidate | None:
    """The leaf with everything decided, in the number of even slices that is fastest; ``None`` if none fits."""
    whole = settle(leaf)
    if whole is None:
        return None
    steps = [(chosen.simulate().prediction, chosen) for chosen in (_cut(whole, number) for number in _numbers(leaf))]
    fitting = [(prediction.step_time_s, chosen) for prediction, chosen in steps if prediction.fits]
    # Of equal times the fewer slices, which come first.
    return min(fitting, key=lambda one: one[0])[1] if fitting else None


def _cut(whole: Candidate, number: int) -> Candidate:
    return replace(whole, knobs=replace(whole.knobs, choice=replace(whole.knobs.choice, num_slices=number)))


def _cut_by_programme(chosen: Candidate) -> Iterator[SimulatedStep]:
    """The step with slices whose lengths TeraPipe's dynamic programme finds, if it fits.

    For a few candidates: the programme takes longer than a simulation.
    """
    run = chosen.run
    lengths = best_slices(modelled_table(chosen.placed), run.pp, run.num_microbatches * run.loops).lengths
    # One slice is the whole sequence, which is simulated already.
    if len(lengths) < 2 or 2 * run.num_stages * run.num_microbatches * len(lengths) > MOST_ACTIONS:
        return
    step = _cut(chosen.of(replace(run, slices=lengths)), len(lengths)).simulate()
    if step.prediction.fits:
        yield step


def _few_microbatches(left: Left) -> Iterator[Leaf]:
    """Leaves whose sequences may be cut, of which nothing rules out that they are fast enough then."""
    for arrangement in left.arrangements:
        run = arrangement.run
        is_short = run.pp > 1 and run.num_microbatches < FEW * run.pp
        if is_short and not arrangement.splits and arrangement.kept != "some" and arrangement.busy_s <= left.limit_s:
            yield from (leaf for cut in arrangement.cuts for leaf in cut.leaves())


STRATEGIES.add(
    "slices",
    Strategy(
        summary="cut sequences into token slices, where there are few micro-batches",
        without="whole sequences",
        applies=_few_microbatches,
        estimate=_estimate_s,
        build=_build,
        is_in=lambda step: step.knobs.choice.num_slices > 1,
        refine=_cut_by_programme,
    ),
)
