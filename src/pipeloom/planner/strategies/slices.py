"""Token slices in the search: where there are few micro-batches, sequences are cut, so that ranks begin sooner.

There is no bound for slices, since they fill a device less well; an estimate is what a step takes at least if they
took no longer together. A search tries the few layouts that come first by it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pipeloom.planner.candidate import Candidate
from pipeloom.planner.settle import settle
from pipeloom.planner.slice_lengths import best_slices, default_unit
from pipeloom.planner.slice_plan import modelled_table
from pipeloom.planner.space import Leaf
from pipeloom.planner.strategies.strategy import STRATEGIES, Left, Strategy
from pipeloom.predict.step import SimulatedStep

NUMBERS = (2, 4, 8)
"""Even slices that are tried."""
FEW = 2
"""Sequences are cut where there are fewer micro-batches than this times the pipeline ranks."""
MOST_ACTIONS = 40_000
"""Of a schedule of slices; more take longer than they are worth, for long steps have small bubbles."""
_MOST_UNITS = 128


@dataclass(frozen=True, eq=False)
class Sliced:
    """A leaf whose sequences are cut.

    Attributes:
        leaf: with whole sequences; its way is ``slices``.
    """

    leaf: Leaf

    @property
    def _numbers(self) -> tuple[int, ...]:
        run = self.leaf.cut.run
        actions = 2 * run.num_stages * run.num_microbatches
        return tuple(n for n in NUMBERS if n * run.tp <= run.seq and n * actions <= MOST_ACTIONS)

    @cached_property
    def estimate_s(self) -> float:
        """Seconds of the step, about."""
        sharding, numbers = self.leaf.sharding, self._numbers
        time = self.leaf.cut.time.sharded(sharding.levels[0], sharding.replicate)
        return time.sliced_s(max(numbers)) if numbers else float("inf")

    def build(self) -> Candidate | None:
        """The leaf with everything decided, in the number of even slices that is fastest; ``None`` if none fits."""
        whole = settle(replace(self.leaf, way="none"))
        if whole is None:
            return None
        cut = [_cut(whole, number) for number in self._numbers]
        return _fastest(cut)


def _cut(whole: Candidate, number: int) -> Candidate:
    return replace(whole, order=replace(whole.order, choice=replace(whole.order.choice, num_slices=number)))


def _fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest of those that fit."""
    steps = [(chosen.simulate(), chosen) for chosen in candidates]
    fitting = [(step.prediction.step_time_s, number) for number, (step, _) in enumerate(steps) if step.prediction.fits]
    # Of equal times the fewer slices: pairs compare their number next.
    return steps[min(fitting)[1]][1] if fitting else None


def _cut_by_programme(chosen: Candidate) -> Iterator[SimulatedStep]:
    """The step with slices whose lengths TeraPipe's dynamic programme finds, if it fits.

    For a few candidates: the programme takes longer than a simulation.
    """
    run = chosen.run
    unit = default_unit(run.seq, run.tp, _MOST_UNITS)
    table = modelled_table(chosen.placed, unit)
    lengths = best_slices(table, run.pp, run.num_microbatches * run.loops).lengths
    # One slice is the whole sequence, which is simulated already.
    if len(lengths) < 2 or 2 * run.num_stages * run.num_microbatches * len(lengths) > MOST_ACTIONS:
        return
    step = _cut(chosen.of(replace(run, slices=lengths)), len(lengths)).simulate()
    if step.prediction.fits:
        yield step


def _sliceable(left: Left) -> Iterator[Sliced]:
    """Leaves whose sequences may be cut, of which nothing rules out that they are fast enough then."""
    for arrangement in left.arrangements:
        run = arrangement.run
        is_short = run.pp > 1 and run.num_microbatches < FEW * run.pp
        if is_short and not arrangement.splits and arrangement.kept != "some" and arrangement.busy_s <= left.limit_s:
            for cut in arrangement.cuts():
                yield from (Sliced(replace(leaf, way="slices")) for leaf in cut.leaves())


STRATEGIES.add(
    "slices",
    Strategy(
        summary="cut sequences into token slices, where there are few micro-batches",
        without="whole sequences",
        attempts=_sliceable,
        is_in=lambda step: step.order.choice.num_slices > 1,
        refine=_cut_by_programme,
    ),
)
