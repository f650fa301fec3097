"""A finished run's folder without a run: both traces simulated, the numbers invented."""

import math
from pathlib import Path
from typing import Any

from pipeloom.config import OutputConfig, RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.config.file import format_run
from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.runs import run_folder
from pipeloom.runs.traced_step import BEGINS
from pipeloom.schedule import format_schedule
from pipeloom.simulation import simulate
from pipeloom.system.files import strict_json
from pipeloom.trace import to_chrome
from pipeloom.workload.layout import Layout


def write_run(
    folder: Path,
    *,
    family: str = "breadth-first",
    pp: int = 2,
    loops: int = 2,
    num_microbatches: int = 4,
    predicted: bool = True,
    validation_loss: float | None = 2.25,
    sample: str | None = "def f():\n    return 1 < 2 & 3\n",
    loss: float = 3.0,
    steps: int = 5,
) -> Path:
    """Write a run folder as ``pipeloom train`` leaves it; the measured step takes twice as long as predicted."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = Layout(pp=pp, loops=loops, num_microbatches=num_microbatches, microbatch_size=2)
    config = RunConfig(
        layout=layout,
        schedule=ScheduleConfig(family=family),
        training=TrainingConfig(steps=steps, validation_batches=0 if validation_loss is None else 8),
        output=OutputConfig(trace_step=3),
    )
    (folder / run_folder.CONFIG).write_text(format_run(config))
    schedule = make_schedule(family, pp=pp, loops=loops, num_microbatches=num_microbatches)
    schedule = lower(schedule) if pp > 1 else schedule
    (folder / run_folder.SCHEDULE).write_text(format_schedule(schedule))
    measured = simulate(schedule, Costs(0.002, 0.004, 0.001))
    (folder / run_folder.TRACE).write_text(to_chrome(measured, "measured"))
    if predicted:
        trace = simulate(schedule, Costs(0.001, 0.002, 0.0005))
        (folder / run_folder.PREDICTED_TRACE).write_text(to_chrome(trace, "predicted"))
    tokens = layout.batch_size * config.data.seq_len
    lines = [_metrics(step, loss, tokens) | {"memory_bytes": [312e6] * pp} for step in range(1, steps + 1)]
    lines[0][BEGINS] = True
    (folder / run_folder.METRICS).write_text("".join(strict_json(line) + "\n" for line in lines))
    if sample is not None:
        (folder / run_folder.SAMPLE).write_text(sample, encoding="utf-8")
    summary = {
        "num_parameters": 3640896,
        "steps": steps,
        "train_loss": loss - steps / 8,
        "validation_loss": validation_loss,
        "unigram_loss": 3.0957 if math.isfinite(loss) else loss,
        "step_time_s": 0.12,
        "predicted_step_time_s": 0.09 if predicted else None,
        "tokens_per_s": 12345.6,
        "tokens": steps * layout.batch_size * config.data.seq_len,
        "traced_step": min(3, steps),
    }
    (folder / run_folder.SUMMARY).write_text(strict_json(summary))
    return folder


def _metrics(step: int, loss: float, tokens: int) -> dict[str, Any]:
    step_time_s = 0.1 + step / 100
    line = {"step": step, "loss": loss - step / 8, "grad_norm": 1.5 / step, "lr": 1e-3 * step}
    return line | {"tokens_per_s": tokens / step_time_s, "step_time_s": step_time_s}


def without_its_end(run: Path, *names: str, steps: int | None = None) -> Path:
    """Take from a folder what a run writes at its end, then other files, and the metrics behind so many steps."""
    for name in (run_folder.SUMMARY, run_folder.SAMPLE, *names):
        (run / name).unlink()
    if steps is not None:
        lines = (run / run_folder.METRICS).read_text().splitlines(keepends=True)
        (run / run_folder.METRICS).write_text("".join(lines[:steps]))
    return run
