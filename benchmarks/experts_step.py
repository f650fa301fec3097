"""Measured step times of runs that share experts, beside simulated ones. Run by ``make experts-step``.

python benchmarks/experts_step.py [ROUNDS]     # 3 rounds by default

Each round profiles, simulates and trains every layout once, as ``make predict`` does. Ranks are processes on this
machine's cores. Its load, the mean number of processes that want to run, has those of a round in it behind that round.
"""

import os
import sys
from statistics import median

from rich.console import Console
from rich.table import Table

from pipeloom.config import ModelConfig, RunConfig
from pipeloom.training.trainer import RunSummary
from pipeloom.workload.layout import Layout
from predict import trained

MODEL = ModelConfig(num_layers=4, experts=4)
LAYOUTS = [
    Layout(pp=1, dp=2, ep=2, loops=1, num_microbatches=4),
    Layout(pp=2, dp=2, ep=2, loops=1, num_microbatches=4),
    Layout(pp=1, dp=4, ep=4, loops=1, num_microbatches=4),
]
WITHIN = 0.15
"""The error that is looked for."""


def row_of(layout: Layout, rounds: list[RunSummary]) -> list[str]:
    """Axes, ranges of the times in ms, median and range of their ratio, in how many rounds that is within the error."""
    predicted = [1e3 * one.predicted_step_time_s for one in rounds]
    measured = [1e3 * one.step_time_s for one in rounds]
    ratios = [own / other for own, other in zip(measured, predicted, strict=True)]
    number = sum(abs(one - 1) <= WITHIN for one in ratios)
    every = ((predicted, ".0f"), (measured, ".0f"), (ratios, ".2f"))
    ranges = [f"{min(values):{form}} to {max(values):{form}}" for values, form in every]
    ranges[-1] = f"{median(ratios):.2f} ({ranges[-1]})"
    return [*map(str, (layout.ep, layout.pp, layout.dp)), *ranges, f"{number} of {len(rounds)}"]


def main() -> None:
    """Run all layouts in turns, and print the table."""
    number, rounds, loads = int(sys.argv[1]) if len(sys.argv) > 1 else 3, [], [os.getloadavg()[0]]
    for _ in range(number):
        rounds.append([trained(RunConfig(model=MODEL, layout=layout)) for layout in LAYOUTS])
        loads.append(os.getloadavg()[0])
    table = Table("ep", "pp", "dp", "simulated ms", "measured ms", "measured / simulated", f"within {WITHIN:.0%}")
    for layout, *every in zip(LAYOUTS, *rounds, strict=True):
        table.add_row(*row_of(layout, every))
    console, (before, *behind) = Console(width=100), [f"{one:.1f}" for one in loads]
    console.print(table)
    console.print(f"load of {os.cpu_count()} cores: {before} before, {', '.join(behind)} behind each round")


if __name__ == "__main__":
    main()
