"""The fastest of candidates that are listed one by one.

The paper's methods are narrower than what a search over layouts tries: loops that divide the layers, one group size,
every layer recomputed, and room for two stages of sharded weights. So they are listed, and the planner's bounds show
which of them need not be simulated; the answer is that of simulating all.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pipeloom.cost.placed import Placed
from pipeloom.planner.bounds import Bounds, Sharded
from pipeloom.planner.stages import Stages
from pipeloom.predict.step import SimulatedStep
from pipeloom.workload.axes import divisors
from reproduction.machine import Candidate


def loop_counts(layers: int, pp: int) -> list[int]:
    """Numbers of stages for each rank with which all stages have equally many layers."""
    return divisors(layers // pp) if layers % pp == 0 else []


@lru_cache(maxsize=8192)
def _bounds(placed: Placed) -> Bounds:
    return Bounds(placed, Stages(placed))


def bounds_of(candidate: Candidate) -> Sharded:
    """Its bounds; layouts that differ in what is sharded share most of them."""
    run = candidate.run
    return _bounds(candidate.placed.of(replace(run, shard="none", replicate=1))).sharded(run.shard)


def may_fit(candidate: Candidate) -> bool:
    """Whether the least that it holds fits a device."""
    inputs = candidate.knobs.choice.stage_inputs
    held = bounds_of(candidate).held_bytes(None if inputs is None else np.array(inputs, np.float64))
    return float(held.max()) <= candidate.placed.cluster.device.memory_bytes


def fastest(candidates: Iterable[Candidate]) -> SimulatedStep | None:
    """The step that is simulated fastest among those that fit; ``None`` if none does."""
    open_ones = [candidate for candidate in candidates if may_fit(candidate)]
    bounds_s = [bounds_of(candidate).step_s for candidate in open_ones]
    best: SimulatedStep | None = None
    for bound_s, number in sorted(zip(bounds_s, range(len(open_ones)), strict=True)):
        if best is not None and bound_s >= best.prediction.step_time_s:
            break
        step = open_ones[number].simulate()
        is_faster = best is None or step.prediction.step_time_s < best.prediction.step_time_s
        if step.prediction.fits and is_faster:
            best = step
    return best
