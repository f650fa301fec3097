"""Measurements of a run's steps, also read back from the run folder for a resumed run with no steps left."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeloom.analysis.summary import communication
from pipeloom.config import RunConfig
from pipeloom.config.file import read_run_file
from pipeloom.config.paths import with_absolute_paths
from pipeloom.errors import UserError
from pipeloom.runs import run_folder
from pipeloom.runs.run_folder import RunFolder
from pipeloom.runs.traced_step import median_step, steps_before, traced_candidates
from pipeloom.schedule.lanes import FROM_HOST_LANE, TO_HOST_LANE
from pipeloom.trace import Trace, from_chrome, step_s_of


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

    def read_prediction(self, folder: RunFolder) -> None:
        """Take the prediction by an earlier process, which a change of the layout removes."""
        self.predicted, self.predicted_s = _trace(folder, run_folder.PREDICTED_TRACE)

    def swapping(self) -> dict[str, Any]:
        """Fields of the summary about swapped stages; empty without a trace."""
        if self.trace is None:
            return {}
        uses = [use for use in communication(self.trace) if use.lane in (FROM_HOST_LANE, TO_HOST_LANE)]
        return {
            "peak_stage_bytes": self.peak_stage_bytes or None,
            "swap_s": sum(use.busy_s for use in uses),
            "swap_hidden_s": sum(use.hidden_s for use in uses),
        }


def read_earlier(folder: RunFolder, config: RunConfig) -> Measured:
    """Read the measurements of an earlier process from the folder of a run that starts with all steps done."""
    steps, lines = config.training.known_steps, _metrics(folder)
    found = Measured(next((line["loss"] for line in lines if line["step"] == steps), None))
    before, first = _config_before(folder), steps_before(lines)
    # Before an unknown first step, lines may have other settings.
    if before is None or _measuring(before) != _measuring(config) or first is None:
        return found
    found.config = before
    times_s = {line["step"]: float(line["step_time_s"]) for line in lines if line["step"] > first}
    found.times_s = list(times_s.values())
    # A damaged trace is no reason to refuse a run whose steps are all done.
    found.trace, _ = _trace(folder, run_folder.TRACE)
    found.read_prediction(folder)
    if found.trace is not None:
        found.traced_step = median_step(traced_candidates(before, first), times_s)
    return found


def of_attempts(folder: RunFolder, since: int, done: int) -> Measured:
    """Measurements by earlier processes of a run that was started again: the seconds of its steps with this layout.

    Args:
        folder: of the run.
        since: steps before the first one with this layout.
        done: steps before this process.
    """
    lines = (line for line in _metrics(folder) if since < line["step"] <= done)
    return Measured(times_s=[float(line["step_time_s"]) for line in lines])


def _metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.read(run_folder.METRICS) or "").splitlines()]


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


def _trace(folder: RunFolder, name: str) -> tuple[Trace | None, float | None]:
    """A trace of the run, and the seconds of the whole step if it has them; ``None`` for what cannot be read."""
    try:
        text = (folder.path / name).read_text(encoding="utf-8")
        return from_chrome(text), step_s_of(text)
    except (OSError, ValueError):  # a UserError is a ValueError
        return None, None
