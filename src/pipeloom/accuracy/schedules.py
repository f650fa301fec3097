"""The step that a row of a table describes: its family by the table's name, or the order that its authors searched."""

from dataclasses import replace
from functools import lru_cache
from statistics import median_high
from typing import NamedTuple

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.foreign import layer_pending_bytes
from pipeloom.cost.memory import kept_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES, Choice
from pipeloom.families.greedy import INPUTS_BY_RANKS, Found, Task, best_schedule
from pipeloom.predict.step import SimulatedStep, placed_in, simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import Placement
from pipeloom.workload.run import Run

FAMILY_OF = {"1f1b": "1f1b", "interleaved": "depth-first", "breadth-first": "breadth-first", "gpipe": "gpipe"} | {
    name: name for name, known in FAMILIES.items() if known.splits_backward
}
"""Names in tables of measurements -> families."""
SEARCHED = INPUTS_BY_RANKS | {"zb-v": 1}
"""Schedules whose authors search for the order by the seconds of the stages, with what ranks may hold in it: so many
times the stage inputs of one micro-batch on each of the stages of the model (arXiv 2401.10241, sections 3.1 and 6)."""


class Ratios(NamedTuple):
    """Seconds of the median stage, as parts of all that it takes for a micro-batch, in hundredths.

    Attributes:
        forward, input, weight: of a forward and of the halves of a backward.
        message: of a tensor that moves to the next stage.
    """

    forward: float
    input: float
    weight: float
    message: float

    @classmethod
    def of(cls, costs: StageCosts) -> "Ratios":
        """Rounded, so that runs whose seconds hardly differ have one order."""
        stages = range(len(costs.forward_s))
        weights_s = [costs.half_s(stage) for stage in stages]
        inputs_s = [whole_s - half_s for whole_s, half_s in zip(costs.backward_s, weights_s, strict=True)]
        forward_s, input_s, weight_s = map(median_high, (costs.forward_s, inputs_s, weights_s))
        message_s = median_high(costs.over_s(stage) for stage in stages[:-1])
        each = (forward_s, input_s, weight_s, message_s)
        return cls(*(round(100 * seconds / (forward_s + input_s + weight_s)) for seconds in each))


@lru_cache(maxsize=512)
def found_schedule(family: str, placement: Placement, num_microbatches: int, ratios: Ratios, pending: float) -> Found:
    """The schedule of a family that searches, as its authors find it: as fast as steps can follow each other.

    They search with the seconds of the median stage for all (``update_schedule`` in
    github.com/sail-sg/zero-bubble-pipeline-parallelism), so a longer last stage does not change the order.

    Args:
        family: its name.
        placement: stage -> rank.
        num_microbatches: of the step.
        ratios: of a stage's seconds.
        pending: of what a micro-batch keeps on a stage, the part that it keeps between the halves of its backward.
    """
    num_stages = placement.num_stages
    most = float(SEARCHED[family] * num_stages)
    task = Task(
        placement=placement,
        num_microbatches=num_microbatches,
        forward_s=[ratios.forward] * num_stages,
        input_s=[ratios.input] * num_stages,
        weight_s=[ratios.weight] * num_stages,
        boundary_s=[ratios.message] * (num_stages - 1),
        budgets=[most] * placement.num_ranks,
        pending=[pending] * num_stages,
    )
    return best_schedule(task, "rank", tries=0)


def pending_share(run: Run, software: Software) -> float:
    """Of what a layer keeps of a micro-batch, the part that it keeps between the halves of its backward."""
    return layer_pending_bytes(run) / kept_bytes(run, software)


def choice_of(run: Run, schedule: str) -> Choice:
    """The family and sizes that a table's name of a schedule stands for.

    Raises:
        UserError: no family makes it.
    """
    if run.num_stages == 1:
        schedule = "1f1b"  # any order takes as long, and 1F1B holds one micro-batch
    if schedule not in FAMILY_OF:
        raise UserError(f"no family makes the schedule '{schedule}'; known: {', '.join(FAMILY_OF)}")
    return Choice(family=FAMILY_OF[schedule], pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)


def predict(placed: Placed, schedule: str) -> SimulatedStep:
    """The step of a run in a schedule that a table names.

    Raises:
        UserError: no family makes the schedule, or not in this size, or the cluster has not so many devices.
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
