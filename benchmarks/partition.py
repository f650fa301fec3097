"""What a partition by seconds gains over equal numbers of layers: the table of docs/plan.md, computed anew.

    python benchmarks/partition.py

Each line is a run on a cluster of the catalog, as `pipeloom simulate` sees it: the seconds of one micro-batch on the
slowest pipeline rank, and the whole step. "even" gives every stage the same number of layers, the first ones the
remainder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import process_time
from timeit import timeit

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.partition import SAME, Uneven, fastest_partition
from pipeloom.cost.placed import Placed
from pipeloom.cost.stages import layers_of_stages
from pipeloom.families import Choice
from pipeloom.predict.step import simulate_step
from pipeloom.recipe import Knobs
from pipeloom.schedule import PLACEMENTS, Placement
from pipeloom.workload.run import Run

CLUSTER, PROGRAM = load_cluster("dgx-a100"), load_software("pipeloom")
SMALL_CASES = 500


@dataclass(frozen=True)
class Case:
    """A line of the table.

    Attributes:
        model: of the catalog.
        pp, loops, tp: axes.
        recomputed: share of the layers that recompute, from the first one on; the first ranks keep most micro-batches.
        placement: of the stages.
    """

    model: str
    pp: int
    loops: int = 1
    tp: int = 1
    recomputed: float = 0.0
    placement: str = "looped"

    def even(self) -> Run:
        """With equal numbers of layers."""
        shape = load_model(self.model)
        first = round(self.recomputed * shape.layers)
        return Run(
            shape=shape,
            seq=4096,
            tp=self.tp,
            pp=self.pp,
            loops=self.loops,
            global_batch=4 * self.pp,
            sequence_parallel=self.tp > 1,
            recompute_layers=("full",) * first + ("none",) * (shape.layers - first),
            layers_by_stage=layers_of_stages(shape, self.pp * self.loops, "even")[0],
            placement=self.placement,
        )


CASES = (
    Case("llama-3-8b", 4),
    Case("llama-3-8b", 8),
    Case("llama-3-8b", 4, 4),
    Case("llama-3-8b", 8, 2),
    Case("llama-3-8b", 8, 2, placement="v"),
    Case("llama-3-8b", 4, 2, recomputed=0.5),
    Case("llama-3-8b", 6, 2),
    Case("llama-13b", 4, recomputed=0.5),
    Case("llama-13b", 4, 3),
    Case("llama-13b", 8, 1, recomputed=0.25),
    Case("llama-13b", 8, 2, recomputed=0.5),
    Case("llama-13b", 4, 4, recomputed=0.25),
    Case("llama-3-70b", 8, 2, 8),
    Case("llama-3-70b", 16, 1, 8),
    Case("llama-3-405b", 16, 4, 8),
    Case("gpt-175b", 12, 3, 8, recomputed=1.0),
    Case("gpt-175b", 16, 1, 8, recomputed=0.5),
    Case("gpt-1t", 64, 2, 8, recomputed=1.0),
)


HEADER = ("model", "pp", "loops", "recomputed", "rank, even", "by seconds", "gain", "step, even", "by seconds", "gain")


def slowest_rank_s(run: Run) -> float:
    """Seconds of a micro-batch on the slowest pipeline rank."""
    costs = Placed(run, CLUSTER, PROGRAM).costs
    held = [0.0] * run.pp
    owner = PLACEMENTS[run.placement](run.pp, run.loops).rank_by_stage
    for rank, forward_s, backward_s in zip(owner, costs.forward_s, costs.backward_s, strict=True):
        held[rank] += forward_s + backward_s
    return max(held)


def step_s(run: Run) -> float:
    """Seconds of the simulated step: breadth-first, or 1F1B where ranks have one stage."""
    family = "breadth-first" if run.loops > 1 else "1f1b"
    choice = Choice(
        family=family,
        pp=run.pp,
        num_microbatches=run.num_microbatches,
        loops=run.loops,
        placement=run.placement,
    )
    return simulate_step(Placed(run, CLUSTER, PROGRAM), Knobs(choice=choice)).prediction.step_time_s


def lines() -> list[list[str]]:
    """Every line of the table."""
    found = []
    for case in CASES:
        even = case.even()
        fastest = Placed(even, CLUSTER, PROGRAM).with_fastest_layers().run
        assert fastest.layers_by_stage is not None
        ranks = [slowest_rank_s(run) for run in (even, fastest)]
        steps = [step_s(run) for run in (even, fastest)]
        stages = str(case.loops) if case.placement == "looped" else f"{case.loops}, {case.placement}"
        found.append(
            [
                case.model,
                f"{case.pp}",
                stages,
                f"{case.recomputed:.0%}",
                *(f"{value * 1e3:,.1f}" for value in ranks),
                f"{ranks[0] / ranks[1] - 1:.1%}",
                *(f"{value * 1e3:,.0f}" for value in steps),
                f"{steps[0] / steps[1] - 1:.1%}",
            ]
        )
    return found


def found_best() -> tuple[int, int, float]:
    """The search for uneven pieces on small cases, where all cuts can be tried too.

    Returns:
        Cases, those whose rounds it made as fast as can be, and by how much the worst of the others is slower.
    """
    draw, best, worst = Random(0), 0, 0.0
    for _ in range(SMALL_CASES):
        pp, loops = draw.choice([(2, 2), (2, 3), (3, 2), (4, 2)])
        owner = draw.choice([Placement.looped, Placement.v])(pp, loops).rank_by_stage
        layers = draw.randint(pp * loops, 14)
        seconds = [draw.random(), *(draw.choice([3.0, 4.0]) for _ in range(layers)), 3 * draw.random()]
        if draw.random() < 0.5:
            seconds = [draw.random() for _ in seconds]
        question = Uneven(seconds, owner, (1.0,) * pp)
        found, least = (
            float(question.judged(np.add.reduceat(seconds, cuts[:-1])[None])[0][0])
            for cuts in (question.searched(), question.tried())
        )
        best += found <= least * (1 + SAME)
        worst = max(worst, found / least - 1)
    return SMALL_CASES, best, worst


def processor_s(question: Callable[[], object], repetitions: int) -> float:
    """Seconds of the processor, the least of a few times ``repetitions``."""
    return min(timeit(question, number=repetitions, timer=process_time) for _ in range(5)) / repetitions


def main() -> None:
    """Print the tables."""
    table = Table(*HEADER)
    for line in lines():
        table.add_row(*line)
    console = Console(width=140)
    console.print(table)
    cases, best, worst = found_best()
    console.print(
        f"uneven pieces, {cases} small cases: best found in {best}, the worst {worst:.1%} slower than the best"
    )
    table = Table("pieces", "ranks", "loops", "processor time")
    for pp, loops in ((8, 1), (16, 8), (64, 2), (128, 1)):
        seconds, placement = [0.3, *[1.7] * 128, 2.9], Placement.looped(pp, loops)
        each_s = processor_s(lambda: fastest_partition(seconds, placement), 200)  # noqa: B023
        table.add_row("embedding, 128 equal layers, head", str(pp), str(loops), f"{each_s * 1e3:.2f} ms")
    for pp, loops in ((64, 1), (32, 2), (16, 4), (8, 8)):
        draw, placement = Random(0), Placement.looped(pp, loops)
        for name, values in (("128, layers of two kinds", (3.0, 4.0)), ("128, all different", None)):
            seconds = [draw.choice(values) if values else draw.random() for _ in range(128)]
            each_s = processor_s(lambda: fastest_partition(seconds, placement), 1)  # noqa: B023
            table.add_row(name, str(pp), str(loops), f"{each_s * 1e3:.0f} ms")
    console.print(table)


if __name__ == "__main__":
    main()
