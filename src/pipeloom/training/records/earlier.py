"""Measurements of a run's steps, also read back from the run folder for a resumed run with no steps left."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeloom.checkpoint.checkpoint_folder import step_of
from pipeloom.config import RunConfig
from pipeloom.config.file import read_run_file
from pipeloom.config.paths import with_absolute_paths
from pipeloom.errors import UserError
from pipeloom.runs import run_folder
from pipeloom.runs.run_folder import RunFolder
from pipeloom.runs.traced_step import median_step, traced_candidates
from pipeloom.trace import Trace, from_chrome


@dataclass
class Measured:
    """Measurements of a run's steps: by this process, or by an earlier one if no steps are left.

    Attributes:
        loss: of the last step, nats per token; ``None`` where the metrics lack it.
        times_s: seconds of each step.
        traced_step: step whose trace is kept; ``None`` before it is chosen.
        trace: measured trace of that step, on rank 0.
        predicted: predicted trace, on rank 0.
        predicted_by_replica: the same of each replica; one where all run the same schedule, empty without a profile.
        predicted_s: predicted seconds of a step.
        exchange_s, live_bytes: as in ``RunSummary``.
        peak_stage_bytes: peak bytes of swapped stages on the device, over all steps.
        config: configuration of the earlier process; ``None`` if its settings differ or it ran in another folder. Then
            only ``loss`` is set.
    """

    loss: float | None = None
    times_s: list[float] = field(default_factory=list)
    traced_step: int | None = None
    trace: Trace | None = None
    predicted: Trace | None = None
    predicted_by_replica: Sequence[Trace] = ()
    predicted_s: float | None = None
    exchange_s: float | None = None
    live_bytes: tuple[int, ...] = ()
    peak_stage_bytes: int = 0
    config: RunConfig | None = None


def read_earlier(folder: RunFolder, config: RunConfig) -> Measured:
    """Read the measurements of an earlier process from the folder of a run that starts with all steps done."""
    steps, lines = config.training.known_steps, _metrics(folder)
    found = Measured(next((line["loss"] for line in lines if line["step"] == steps), None))
    before = _config_before(folder)
    if before is None or _measuring(before) != _measuring(config):
        return found
    first = _begun(before)
    if first is None:  # unknown first step: earlier lines may have other settings
        return found
    found.config = before
    times_s = {line["step"]: float(line["step_time_s"]) for line in lines if line["step"] > first}
    found.times_s = list(times_s.values())
    # A damaged trace is no reason to refuse a run whose steps are all done.
    found.trace, found.predicted = (_trace(folder, name) for name in (run_folder.TRACE, run_folder.PREDICTED_TRACE))
    if found.trace is not None:
        found.traced_step = median_step(traced_candidates(before, first), times_s)
    return found


def of_attempts(folder: RunFolder, config: RunConfig, since: int, done: int) -> Measured:
    """Measurements of earlier processes of a run that was started again: the seconds of its steps after ``since``.

    Args:
        folder: of the run.
        config: of the run.
        since: steps under other layouts.
        done: steps before this process.
    """
    begun = _begun(config)
    if begun is None:
        return Measured()
    lines = (line for line in _metrics(folder) if max(begun, since) < line["step"] <= done)
    return Measured(times_s=[float(line["step_time_s"]) for line in lines])


def _metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.read(run_folder.METRICS) or "").splitlines()]


def _begun(config: RunConfig) -> int | None:
    """Steps that a run did not do, but the one that wrote its checkpoint, perhaps on another machine.

    0 without a checkpoint; ``None`` if its name has no number.
    """
    resumed = config.checkpoint.resume
    return 0 if resumed is None else step_of(resumed)


def _config_before(folder: RunFolder) -> RunConfig | None:
    """Configuration of the earlier run in this folder; ``None`` without one."""
    # Not the draft's: that is the configuration of this run.
    file = folder.path / run_folder.CONFIG
    if not folder.is_starting or not file.exists():
        return None
    try:
        config, problems = read_run_file(file)
    except UserError:
        return None
    return None if problems else config


def _measuring(config: RunConfig) -> Any:
    """The settings that determine what a step does and how long it takes."""
    ends = RunConfig().training
    config = with_absolute_paths(config)  # as in a configuration read from a run folder
    # These settings affect what happens before, between and after the steps only.
    training = replace(
        config.training,
        validation_batches=ends.validation_batches,
        validate_every=ends.validate_every,
        sample_tokens=ends.sample_tokens,
        predict=ends.predict,
        stall_timeout_s=ends.stall_timeout_s,
    )
    return config.model, config.data.seq_len, config.layout, config.schedule, config.optimizer, config.adapter, training


def _trace(folder: RunFolder, name: str) -> Trace | None:
    try:
        return from_chrome((folder.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a UserError is a ValueError
        return None
