"""What steps measured, and what an earlier process left of that for a run that has no step left to do."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from pipeloom.checkpoint.checkpoint_folder import step_of
from pipeloom.config import RunConfig
from pipeloom.config.file import read_run_file
from pipeloom.config.paths import with_absolute_paths
from pipeloom.errors import UserError
from pipeloom.runs import run_folder
from pipeloom.runs.run_folder import RunFolder
from pipeloom.trace import Trace, from_chrome


@dataclass
class Measured:
    """What the steps of a run measured: in this process, or in the earlier one where none is left to do.

    Attributes:
        loss: of the last step; ``None`` where the metrics do not contain it.
        times_s: of the steps.
        traced_step: step whose trace is kept.
        trace: its trace, on rank 0.
        predicted: the same as predicted.
        predicted_s: seconds of a step as predicted.
        exchange_s, live_bytes: as in ``RunSummary``.
        peak_stage_bytes: the most bytes of swapped stages on the device in any step.
        config: what the earlier process ran with; ``None`` for other settings, or another folder. Then nothing but
            the loss is known of it.
    """

    loss: float | None = None
    times_s: list[float] = field(default_factory=list)
    traced_step: int | None = None
    trace: Trace | None = None
    predicted: Trace | None = None
    predicted_s: float | None = None
    exchange_s: float | None = None
    live_bytes: tuple[int, ...] = ()
    peak_stage_bytes: int = 0
    config: RunConfig | None = None


def read_earlier(folder: RunFolder, config: RunConfig) -> Measured:
    """Read what the folder of a run that starts, with all steps done, has of an earlier process."""
    steps = config.training.known_steps
    lines = [json.loads(line) for line in (folder.read(run_folder.METRICS) or "").splitlines()]
    found = Measured(next((float(line["loss"]) for line in lines if line["step"] == steps), None))
    before = _config_before(folder)
    if before is None or _measuring(before) != _measuring(config):
        return found
    resumed = before.checkpoint.resume
    # Lines before it are of the process that made the checkpoint, perhaps on another machine.
    first = 0 if resumed is None else step_of(resumed)
    if first is None:  # nothing shows which lines are of these settings
        return found
    found.config = before
    found.times_s = [float(line["step_time_s"]) for line in lines if line["step"] > first]
    # A damaged trace is no reason to refuse a run whose steps are all done.
    found.trace, found.predicted = (_trace(folder, name) for name in (run_folder.TRACE, run_folder.PREDICTED_TRACE))
    found.traced_step = None if found.trace is None else min(first + before.output.trace_step, steps)
    return found


def _config_before(folder: RunFolder) -> RunConfig | None:
    """The configuration of the run whose files the drafts will replace."""
    # Not the draft's: that is this run's own.
    file = folder.path / run_folder.CONFIG
    if not folder.is_starting or not file.exists():
        return None
    try:
        config, problems = read_run_file(file)
    except UserError:
        return None
    return None if problems else config


def _measuring(config: RunConfig) -> Any:
    """The settings that decide what a step does and how long it takes."""
    ends = RunConfig().training
    config = with_absolute_paths(config)  # as those that are read
    # These change what a run does around its steps and nothing in them.
    training = replace(
        config.training,
        validation_batches=ends.validation_batches,
        sample_tokens=ends.sample_tokens,
        predict=ends.predict,
        stall_timeout_s=ends.stall_timeout_s,
    )
    return config.model, config.data.seq_len, config.layout, config.schedule, config.optimizer, training


def _trace(folder: RunFolder, name: str) -> Trace | None:
    try:
        return from_chrome((folder.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a UserError is a ValueError
        return None
