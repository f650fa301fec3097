"""A described run -> how long its step takes and how much memory it needs."""

from dataclasses import dataclass
from functools import lru_cache

from pipeloom.cost.analytic import StepTerms, drain_s, stage_costs, step_terms, with_own_layers
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.memory import Memory, rank_memory
from pipeloom.cost.ranks import rank_device_bytes
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.generate import make_schedule
from pipeloom.schedule import Schedule, lower
from pipeloom.simulate import simulate

FAMILY_OF = {"1f1b": "1f1b", "interleaved": "depth-first", "breadth-first": "breadth-first", "gpipe": "gpipe"}
"""Names in tables of measurements -> families."""


@lru_cache(maxsize=512)
def _schedule(family: str, pp: int, loops: int, num_microbatches: int, *, has_transfers: bool) -> Schedule:
    schedule = make_schedule(family, pp=pp, loops=loops, num_microbatches=num_microbatches)
    return lower(schedule) if has_transfers else schedule


def pipeline_s(family: str, pp: int, loops: int, num_microbatches: int, costs: StageCosts) -> float:
    """Seconds of a step's pipeline, from the simulator.

    With constant costs a long step repeats: from some number of micro-batches on, ``pp`` more cost the same each time.
    So a long step is simulated at three short lengths, ``pp`` apart, and continued if their differences agree;
    otherwise the lengths are doubled, up to the whole. A step takes the longest of paths that each grow evenly with its
    micro-batches, so the result is never too long. It is too short where a path that grows faster becomes the
    longest only beyond those lengths, which needs stages that are almost equally slow.
    """

    def simulated_s(count: int) -> float:
        return simulate(_schedule(family, pp, loops, count, has_transfers=costs.transfer_s > 0), costs).end_s

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
    run = with_own_layers(run, cluster, software)
    costs = stage_costs(run, cluster, software)
    backward_s = max(costs.backward_s)
    if run.pp == 1:
        step_s = run.num_microbatches * (sum(costs.forward_s) + sum(costs.backward_s))
    elif run.schedule in CLOSED:
        step_s = _zero_bubble_s(run, costs)
    elif run.schedule in FAMILY_OF:
        step_s = pipeline_s(FAMILY_OF[run.schedule], run.pp, run.loops, run.num_microbatches, costs)
    else:
        known = ", ".join([*FAMILY_OF, *CLOSED])
        raise UserError(f"no family makes the schedule '{run.schedule}'; known: {known}")
    step_s += drain_s(run, software, costs)
    terms = step_terms(run, cluster, software, backward_s)
    memory = tuple(rank_memory(run, software, rank, held) for rank, held in enumerate(in_flight(run)))
    return Prediction(step_s + terms.total_s, step_s, terms, costs, memory, rank_device_bytes(run, cluster))


def in_flight(run: Run) -> tuple[float, ...]:
    """Most stage inputs that each pipeline rank holds at once, from the rows of its schedule.

    In families that alternate, the peak does not grow any more once every rank has warmed up, so that a short
    step tells it. For zero-bubble schedules, which no family makes: as 1F1B, ``zb-2p`` and ``zb-h2`` twice as many,
    ``zb-v`` P on each of two half stages (arXiv 2401.10241, sections 2 and 6), and ``PENDING`` for the gradients that
    wait for their second half.
    """
    count = run.num_microbatches
    if run.pp == 1 and run.loops == 1:
        return (1,)
    if run.schedule in CLOSED:
        factor = 2 if run.schedule in ("zb-2p", "zb-h2") else 1
        most = [run.pp * run.loops] * run.pp if run.loops > 1 else [factor * (run.pp - r) for r in range(run.pp)]
        return tuple(float(min(value + PENDING, count * run.loops)) for value in most)
    family = FAMILY_OF.get(run.schedule, run.schedule)
    if family in ("1f1b", "depth-first"):
        count = min(count, 4 * run.pp + count % run.pp)
    return _schedule(family, run.pp, run.loops, count, has_transfers=False).peak_stage_inputs


PENDING = 0.6
"""Stage inputs' worth of memory that backwards hold whose gradients of weights wait, observed for arXiv 2401.10241."""

CLOSED = {"zb-h1": 1.0, "zb-1p": 1.0, "zb-h2": 0.0, "zb-2p": 0.0, "zb-v": 0.0}
"""Zero-bubble schedules, which no family makes: their bubble as a multiple of (P - 1) (T_F + T_B - T_W)."""


def _zero_bubble_s(run: Run, costs: StageCosts) -> float:
    """Closed form for the zero-bubble schedules (arXiv 2401.10241, table 2).

    With few micro-batches the way there and back is the longest path: the last stage has every forward and every
    gradient of an input in turn, and the first ends with a gradient of its weights.
    """
    forward, backward = sum(costs.forward_s) / run.pp, sum(costs.backward_s) / run.pp
    of_weights, count = backward * costs.weight_share, run.num_microbatches
    of_input = backward - of_weights
    slowest = max(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))
    if run.loops > 1:
        slowest = forward + backward
    bubble = CLOSED[run.schedule] * (run.pp - 1) * (forward + of_input - of_weights)
    there_and_back = (run.pp - 1 + count) * (forward + of_input) + of_weights
    return max(count * slowest + bubble, there_and_back)
