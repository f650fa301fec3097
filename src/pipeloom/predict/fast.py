"""A described run -> how long its step takes and how much memory it needs."""

from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median_high
from typing import NamedTuple

from pipeloom.analysis.summary import longest_rank_s
from pipeloom.cost.analytic import StepTerms, drain_s, stage_costs, step_terms, with_own_layers
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.memory import Memory, kept_bytes, layer_pending_bytes, rank_memory
from pipeloom.cost.ranks import placement_of, rank_device_bytes
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.families.greedy import INPUTS_BY_RANKS, Aim, Found, Task, best_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Placement, Schedule
from pipeloom.schedule.held import KeptBytes, most_in_row
from pipeloom.simulate import simulate

FAMILY_OF = {"1f1b": "1f1b", "interleaved": "depth-first", "breadth-first": "breadth-first", "gpipe": "gpipe"} | {
    name: name for name, known in FAMILIES.items() if known.splits_backward
}
"""Names in tables of measurements -> families."""
SEARCHED = INPUTS_BY_RANKS | {"zb-v": 1}
"""Schedules whose authors search for the order by the seconds of the stages, with what ranks may hold in it: so many
times the stage inputs of one micro-batch on each of the stages of the model (arXiv 2401.10241, sections 3.1 and 6)."""


@lru_cache(maxsize=512)
def _schedule(family: str, pp: int, loops: int, num_microbatches: int, *, has_transfers: bool) -> Schedule:
    schedule = make_schedule(family, pp=pp, loops=loops, num_microbatches=num_microbatches)
    return lower(schedule) if has_transfers else schedule


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
    github.com/sail-sg/zero-bubble-pipeline-parallelism), so that the order knows nothing of a longer last stage.

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


def pipeline_s(
    family: str, pp: int, loops: int, num_microbatches: int, costs: StageCosts, *, aim: Aim = "step"
) -> float:
    """Seconds of a step's pipeline, from the simulator.

    With constant costs a long step repeats: from some number of micro-batches on, ``pp`` more cost the same each time.
    So a long step is simulated at three short lengths, ``pp`` apart, and continued if their differences agree;
    otherwise the lengths are doubled, up to the whole. It is too short where a path that grows faster becomes the
    longest only beyond those lengths, which needs stages that are almost equally slow; and too long where paths take
    turns in being the longest, and differences agree before the next one is smaller. Of 61,819 random steps with costs
    of a few values 63 came out too long, by 1.2 % at most; the shortest was 1.5 % too short.

    Args:
        family: its name.
        pp: pipeline ranks.
        loops: stages of each.
        num_microbatches: of the step.
        costs: seconds.
        aim: of what: of the whole, or from the first to the last action of the rank that takes longest, which is how
            fast steps follow each other where no rank waits for others between them.
    """

    def simulated_s(count: int) -> float:
        trace = simulate(_schedule(family, pp, loops, count, has_transfers=costs.transfer_s > 0), costs)
        return trace.end_s if aim == "step" else longest_rank_s(trace)

    length = 8 * pp + num_microbatches % pp
    while length + 2 * pp < num_microbatches:
        first, second, third = (simulated_s(length + extra * pp) for extra in range(3))
        if abs((third - second) - (second - first)) <= 1e-9 * third:
            return third + (num_microbatches - length - 2 * pp) // pp * (third - second)
        length += length // pp * pp
    return simulated_s(num_microbatches)


@dataclass(frozen=True)
class Prediction:
    """What is expected of a run.

    Attributes:
        step_time_s: seconds of a step.
        pipeline_s: seconds from the first forward to the last backward.
        terms: what follows.
        costs: seconds of each stage.
        memory_by_rank: of a device of each pipeline rank.
        device_bytes: what a device of each pipeline rank can hold.
    """

    step_time_s: float
    pipeline_s: float
    terms: StepTerms
    costs: StageCosts
    memory_by_rank: tuple[Memory, ...]
    device_bytes: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether every rank has room on its devices."""
        return self.memory.total_bytes <= self.device_bytes[self.fullest_rank]

    @property
    def memory(self) -> Memory:
        """Of the fullest device."""
        return self.memory_by_rank[self.fullest_rank]

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank whose devices have the least room left."""
        over = [memory.total_bytes - room for memory, room in zip(self.memory_by_rank, self.device_bytes, strict=True)]
        return over.index(max(over))


def predict(run: Run, cluster: Cluster, software: Software) -> Prediction:
    """Seconds of one step of ``run``, and bytes of its devices.

    Collectives that share the step with the pipeline are left out: ``pipeloom.predict.step`` simulates them.

    Raises:
        UserError: no family makes the run's schedule, or the cluster has not so many devices.
    """
    software = as_it_exchanges(software, FAMILY_OF.get(run.schedule, ""))
    run = with_own_layers(_placed(run), cluster, software)
    costs = stage_costs(run, cluster, software)
    backward_s = max(costs.backward_s)
    if run.pp == 1:
        step_s = run.num_microbatches * (sum(costs.forward_s) + sum(costs.backward_s))
    elif run.schedule in FAMILY_OF:
        aim: Aim = "rank" if software.overlaps_steps else "step"
        step_s = _step_pipeline_s(run, software, costs, aim)
    else:
        raise UserError(f"no family makes the schedule '{run.schedule}'; known: {', '.join(FAMILY_OF)}")
    step_s += drain_s(run, software, costs)
    terms = step_terms(run, cluster, software, backward_s)
    stages = placement_of(run).stages_of
    held = in_flight(run, software, costs)
    memory = tuple(rank_memory(run, software, rank, most, stages(rank)) for rank, most in enumerate(held))
    return Prediction(step_s + terms.total_s, step_s, terms, costs, memory, rank_device_bytes(run, cluster))


def as_it_exchanges(software: Software, family: str) -> Software:
    """The program as it sends and receives in a family's schedules."""
    is_free = family in FAMILIES and FAMILIES[family].splits_backward and not software.blocks_split
    return replace(software, is_blocking=False) if is_free else software


def _placed(run: Run) -> Run:
    """The run with the placement that its family runs on."""
    known = FAMILIES.get(FAMILY_OF.get(run.schedule, ""))
    return replace(run, placement=known.placement) if known and known.placement else run


def _step_pipeline_s(run: Run, software: Software, costs: StageCosts, aim: Aim) -> float:
    family = FAMILY_OF[run.schedule]
    if family in SEARCHED:
        trace = simulate(_found_order(run, software, costs, has_transfers=costs.transfer_s > 0), costs)
        return trace.end_s if aim == "step" else longest_rank_s(trace)
    return pipeline_s(family, run.pp, run.loops, run.num_microbatches, costs, aim=aim)


def _found_order(run: Run, software: Software, costs: StageCosts, *, has_transfers: bool) -> Schedule:
    family, share = FAMILY_OF[run.schedule], pending_share(run, software)
    found = found_schedule(family, placement_of(run), run.num_microbatches, Ratios.of(costs), share)
    return lower(found.schedule) if has_transfers else found.schedule


def pending_share(run: Run, software: Software) -> float:
    """Of what a layer keeps of a micro-batch, the part that it keeps between the halves of its backward."""
    return layer_pending_bytes(run) / kept_bytes(run, software)


def in_flight(run: Run, software: Software, costs: StageCosts | None = None) -> tuple[float, ...]:
    """Most stage inputs that each pipeline rank holds at once, from the rows of its schedule.

    In families that alternate, the peak does not grow any more once every rank has warmed up, so that a short
    step tells it. Between the halves of a split backward only a part of an input is held.

    Args:
        run: with its schedule.
        software: with what.
        costs: seconds of its stages, for families that search by them; ``None`` for stages that are alike.
    """
    count = run.num_microbatches
    if run.pp == 1 and run.loops == 1:
        return (1,)
    family = FAMILY_OF.get(run.schedule, run.schedule)
    known = FAMILIES[family]
    if family in ("1f1b", "depth-first"):
        count = min(count, 4 * run.pp + count % run.pp)
    if costs is not None and family in SEARCHED:
        schedule = _found_order(run, software, costs, has_transfers=False)
    else:
        schedule = _schedule(family, run.pp, run.loops, count, has_transfers=False)
    if not known.splits_backward:
        return schedule.peak_stage_inputs
    kept = KeptBytes(pending=[pending_share(run, software)] * schedule.num_stages)
    return tuple(most_in_row(schedule, rank, kept) for rank in range(schedule.num_ranks))
