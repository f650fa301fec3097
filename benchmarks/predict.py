"""Predicted and measured step times on this machine, for several layouts. Run by ``make predict``.

Each row is a run of its own: the stages are profiled, the step is simulated, then a few steps are trained and
their median is taken. Nothing is carried over from one row to the next. Compute is the predicted time of all compute
actions / that of the traced step: where the cores change their speed after the profile, it is as far off as the step.
The bubble is the predicted one and that of the traced step.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeloom.config import RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.data.text import Data
from pipeloom.execute.processes.world import World
from pipeloom.runs.run_folder import RunFolder
from pipeloom.trace import Trace
from pipeloom.training.session import run_on_all_ranks
from pipeloom.training.trainer import RunResult, Trainer
from pipeloom.workload.layout import Layout

LAYOUTS = [
    ("breadth-first", Layout(pp=4, loops=2, num_microbatches=8)),
    ("breadth-first", Layout(pp=2, loops=4, num_microbatches=8)),
    ("hybrid", Layout(pp=4, loops=2, num_microbatches=8)),
    ("depth-first", Layout(pp=2, loops=2, num_microbatches=8)),
    ("1f1b", Layout(pp=4, loops=1, num_microbatches=8)),
    ("gpipe", Layout(pp=2, loops=1, num_microbatches=8)),
]
STEPS = 16


def _train(folder: Path, config: RunConfig, world: World, data: Data) -> RunResult:
    return Trainer(config, world, data, RunFolder(folder)).run()


def trained(config: RunConfig) -> RunResult:
    """Predict and train a run, in a folder that is removed behind it."""
    training = TrainingConfig(steps=STEPS, validation_batches=0, sample_tokens=0)
    with tempfile.TemporaryDirectory() as folder:
        output = replace(config.output, folder=Path(folder))
        return run_on_all_ranks(replace(config, training=training, output=output), partial(_train, Path(folder)))


def _compute_s(trace: Trace | None) -> float:
    assert trace is not None, "the run has a prediction and a traced step"
    return sum(float(trace.compute(rank).duration_s.sum()) for rank in range(trace.num_ranks))


def main() -> None:
    """Run every layout and print the table."""
    table = Table("schedule", "ranks", "loops", "predicted ms", "measured ms", "step", "compute", "bubble")
    table.caption = "step, compute: predicted / measured; bubble: both"
    for family, layout in LAYOUTS:
        result = trained(RunConfig(layout=layout, schedule=ScheduleConfig(family=family)))
        summary, compute = result.summary, _compute_s(result.predicted) / _compute_s(result.measured)
        predicted, measured = summary.predicted_step_time_s, summary.step_time_s
        cells = [family, layout.pp, layout.num_loops, f"{predicted * 1e3:.0f}", f"{measured * 1e3:.0f}"]
        bubbles = f"{summary.predicted_bubble_fraction:.0%} / {summary.bubble_fraction:.0%}"
        table.add_row(*map(str, cells), f"{predicted / measured:.2f}", f"{compute:.2f}", bubbles)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
