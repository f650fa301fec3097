"""Which layout of a run is fastest: what can be chosen, and the fastest of it that fits.

A step is simulated only if a bound that costs next to nothing says that it may beat the best one so far. The bound is
never above the simulated time, so that the answer is that of simulating everything.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeloom.cost.analytic import rank_parameters, stage_costs, stage_layers, stage_parameters, step_terms
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.data_parallel import reduce_s
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.memory import kept_bytes, state_bytes, working_bytes
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software
from pipeloom.predict.step import Order, SimulatedStep, simulate_step


@dataclass(frozen=True)
class Candidate:
    """One thing that may be chosen.

    Attributes:
        run: what is trained, and how it is laid out.
        software: with what.
        order: in which schedule.
    """

    run: Run
    software: Software
    order: Order


def divisors(number: int) -> list[int]:
    """Everything that divides a number, ascending."""
    return [part for part in range(1, number + 1) if number % part == 0]


def axes(num_devices: int, most_tp: int) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, dp) whose product is the number of devices.

    Args:
        num_devices: of the whole run.
        most_tp: largest tensor axis, such as the devices of a node.
    """
    for tp in divisors(num_devices):
        if tp <= most_tp:
            for pp in divisors(num_devices // tp):
                yield tp, pp, num_devices // tp // pp


def loop_counts(layers: int, pp: int) -> list[int]:
    """Numbers of stages for each rank with which all stages have equally many layers."""
    return divisors(layers // pp) if layers % pp == 0 else []


def least_step_s(candidate: Candidate, cluster: Cluster) -> float:
    """Seconds that the step takes at least, whatever its schedule.

    Micro-batches come to a stage through all stages before it, and their gradients go back the same way. So a rank
    begins when the first micro-batch has come to its first stage, then has all its work to do, and the last gradient
    still goes back to the first rank. The same holds for each stage alone. The reductions of a rank follow each other.
    """
    run, software = candidate.run, candidate.software
    costs = stage_costs(run, cluster, software)
    pipeline_s = max(_least_pipeline_s(run, costs), _least_reductions_s(run, cluster, software))
    return pipeline_s + step_terms(run, cluster, software, max(costs.backward_s)).total_s


def _least_pipeline_s(run: Run, costs: StageCosts) -> float:
    both = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    hop_s = 2 * costs.transfer_s if run.pp > 1 else 0.0
    way_s = [0.0, *accumulate(work_s + hop_s for work_s in both)]
    by_rank = [way_s[rank] + run.num_microbatches * sum(both[rank :: run.pp]) for rank in range(run.pp)]
    by_stage = [way_s[stage] + run.num_microbatches * work_s for stage, work_s in enumerate(both)]
    return max(*by_rank, *by_stage)


def _least_reductions_s(run: Run, cluster: Cluster, software: Software) -> float:
    if not software.has_reduction_lane or run.dp == 1:
        return 0.0
    seconds = [reduce_s(run, cluster, software, held) for held in stage_parameters(run, software)]
    return max(sum(seconds[rank :: run.pp]) for rank in range(run.pp))


KEEPS_EVERY_INPUT = frozenset({"gpipe", "breadth-first"})
"""Families that run all forwards before the first backward."""


def least_bytes(candidate: Candidate) -> float:
    """Bytes that a device of the fullest rank holds at least.

    Weights, gradients, optimizer state and reserve; the largest stage's weights where a rank holds only shards; the
    layer that is being recomputed; in families that keep every stage input, those of the rank with the fewest layers.
    """
    run, software = candidate.run, candidate.software
    state = state_bytes(run, max(rank_parameters(run, software)), software)
    gathered = 0.0
    if run.shard == "full" and run.dp > 1:
        largest = max(stage_parameters(run, software))
        gathered = state_bytes(replace(run, shard="none"), largest, software).weights_bytes
    kept = working_bytes(run, software)
    if candidate.order.choice.family in KEEPS_EVERY_INPUT:
        counts, _ = stage_layers(run, software)
        layers = min(sum(counts[rank :: run.pp]) for rank in range(run.pp))
        kept += run.num_microbatches * layers * kept_bytes(run, software)
    return state.total_bytes + gathered + kept * (1 + software.fragmentation) + software.reserve_bytes


def fastest(candidates: Iterable[Candidate], cluster: Cluster) -> SimulatedStep | None:
    """The step that is simulated fastest among those that fit; ``None`` if none does.

    Args:
        candidates: on looped placements.
        cluster: where.
    """
    open_ones = [candidate for candidate in candidates if least_bytes(candidate) < cluster.device.memory_bytes]
    bounds_s = [least_step_s(candidate, cluster) for candidate in open_ones]
    best: SimulatedStep | None = None
    for bound_s, number in sorted(zip(bounds_s, range(len(open_ones)), strict=True)):
        if best is not None and bound_s >= best.prediction.step_time_s:
            break
        chosen = open_ones[number]
        step = simulate_step(chosen.run, cluster, chosen.software, chosen.order)
        is_faster = best is None or step.prediction.step_time_s < best.prediction.step_time_s
        if step.prediction.fits and is_faster:
            best = step
    return best
