"""Prediction of a row's step, with the family of its schedule or, for zero-bubble schedules, the order of a search."""

from dataclasses import replace
from functools import lru_cache
from math import ceil
from statistics import median_high
from typing import NamedTuple

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.foreign import layer_pending_bytes
from pipeloom.cost.memory import kept_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES, Choice
from pipeloom.families.greedy import INPUTS_BY_RANKS, Found, Task, Way, best_schedule, best_ways
from pipeloom.predict.step import SimulatedStep, placed_in, simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import Placement
from pipeloom.workload.run import Run

FAMILY_OF = {"1f1b": "1f1b", "interleaved": "depth-first", "breadth-first": "breadth-first", "gpipe": "gpipe"} | {
    name: name for name, known in FAMILIES.items() if known.splits_backward
}
"""Schedule in tables of measurements -> family."""
SEARCHED = INPUTS_BY_RANKS | {"zb-v": 1}
"""Families whose authors search for the order by the stages' seconds -> memory limit of a rank, as a multiple of the
stage inputs of one micro-batch on all stages of the model (arXiv 2401.10241, sections 3.1 and 6)."""


class Ratios(NamedTuple):
    """Seconds of the median stage in percent of its forward and backward, rounded.

    Attributes:
        forward, input, weight: of a forward, and of the halves of a backward.
        message: of a message to the next stage.
    """

    forward: float
    input: float
    weight: float
    message: float

    @classmethod
    def of(cls, costs: StageCosts) -> "Ratios":
        """Ratios of costs; rounded, so that runs with nearly equal costs get the same order."""
        stages = range(len(costs.forward_s))
        weights_s = [costs.half_s(stage) for stage in stages]
        inputs_s = [whole_s - half_s for whole_s, half_s in zip(costs.backward_s, weights_s, strict=True)]
        forward_s, input_s, weight_s = map(median_high, (costs.forward_s, inputs_s, weights_s))
        message_s = median_high(costs.over_s(stage) for stage in stages[:-1])
        each = (forward_s, input_s, weight_s, message_s)
        return cls(*(round(100 * seconds / (forward_s + input_s + weight_s)) for seconds in each))


SKETCH_RANKS, SKETCH_ROUNDS = 8, 3
"""Size of the small pipeline on which ways to schedule are ranked, and its micro-batches per rank."""
SKETCH_PERCENT = 4
"""Rounding of the ratios there, in percent, so that runs share a search."""
SKETCH_RULES = ((0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 1, 0), (2, 0, 1, 1))
"""Priorities of list scheduling that are tried there on a V, beside the orders of the families."""
NUM_WAYS = 2
"""Number of ways of the small pipeline that are tried on the real one. On 1,200 drawn runs on 8 to 32 ranks these and
``SKETCH_RULES`` make the same prediction as all rules and six ways, but for three runs, at most 0.9 %."""


@lru_cache(maxsize=512)
def found_schedule(family: str, placement: Placement, num_microbatches: int, ratios: Ratios, pending: float) -> Found:
    """The best schedule of a family in ``SEARCHED``, by a search like its authors', for consecutive steps that overlap.

    They use the seconds of the median stage for all stages (``update_schedule`` in
    github.com/sail-sg/zero-bubble-pipeline-parallelism), so a longer last stage does not change the order. All stages
    are equal then: which rules are good is found on a small pipeline of the same proportions, and only those are tried
    on the real one.

    Args:
        family: a key of ``SEARCHED``.
        placement: stage -> pipeline rank.
        num_microbatches: of the step.
        ratios: of a stage's seconds.
        pending: ``pending_share``.
    """
    task, ranks = _task(family, placement, num_microbatches, ratios, pending), placement.num_ranks
    small, is_straight = min(ranks, SKETCH_RANKS), ranks == placement.num_stages
    rounds = min(SKETCH_ROUNDS, ceil(num_microbatches / ranks))
    # A straight pipeline has few rules; what is small anyway is searched whole.
    if is_straight and ranks == small and num_microbatches <= rounds * small:
        return best_schedule(task, "rank", tries=0)
    forward, first, second = (SKETCH_PERCENT * round(each / SKETCH_PERCENT) or 1 for each in ratios[:3])
    coarse = Ratios(forward, first, second, ratios.message)
    share = round(pending, 1) or 0.1
    sketch = Placement.looped(small, 1) if is_straight else Placement.v(small, 2)
    return best_schedule(task, "rank", tries=0, ways=_ways(family, sketch, rounds * small, coarse, share))


@lru_cache(maxsize=512)
def _ways(family: str, placement: Placement, num_microbatches: int, ratios: Ratios, pending: float) -> tuple[Way, ...]:
    is_straight = placement.num_ranks == placement.num_stages  # which has few rules
    rules = None if is_straight else SKETCH_RULES
    return best_ways(_task(family, placement, num_microbatches, ratios, pending), NUM_WAYS, rules)


def _task(family: str, placement: Placement, num_microbatches: int, ratios: Ratios, pending: float) -> Task:
    num_stages = placement.num_stages
    most = float(SEARCHED[family] * num_stages)
    return Task(
        placement=placement,
        num_microbatches=num_microbatches,
        forward_s=[ratios.forward] * num_stages,
        input_s=[ratios.input] * num_stages,
        weight_s=[ratios.weight] * num_stages,
        boundary_s=[ratios.message] * (num_stages - 1),
        budgets=[most] * placement.num_ranks,
        pending=[pending] * num_stages,
    )


def pending_share(run: Run, software: Software) -> float:
    """Bytes that a layer keeps between the halves of its backward / bytes that it keeps from its forward on."""
    return layer_pending_bytes(run) / kept_bytes(run, software)


def choice_of(run: Run, schedule: str) -> Choice:
    """Family and sizes of a schedule in a table.

    Raises:
        UserError: no family makes the schedule.
    """
    if run.num_stages == 1:
        schedule = "1f1b"  # every order takes the same time, and 1F1B holds one micro-batch
    if schedule not in FAMILY_OF:
        raise UserError(f"no family makes the schedule '{schedule}'; known: {', '.join(FAMILY_OF)}")
    return Choice(family=FAMILY_OF[schedule], pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)


def predict(placed: Placed, schedule: str) -> SimulatedStep:
    """Predict the step of a run with a schedule in a table.

    Raises:
        UserError: no family makes the schedule with these sizes, or the cluster has too few devices.
    """
    run = placed.run
    choice = choice_of(run, schedule)
    knobs = Knobs(choice=choice)
    if choice.family in SEARCHED:
        placed = placed_in(placed, choice)
        ratios, pending = Ratios.of(placed.costs), pending_share(run, placed.software)
        found = found_schedule(choice.family, placed.placement, run.num_microbatches, ratios, pending)
        knobs = replace(knobs, found=found.schedule)
    return simulate_step(placed, knobs)
