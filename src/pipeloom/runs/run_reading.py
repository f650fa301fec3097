"""Reading of a run folder, whether its run has finished, is running, or ended early."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pipeloom.analysis.bubble import BubbleAccount, account_bubble
from pipeloom.checkpoint.checkpoint_folder import list_checkpoints
from pipeloom.config import RunConfig
from pipeloom.config.file import read_run_file
from pipeloom.errors import ConfigError, UserError, reason_of
from pipeloom.runs.run_folder import (
    CONFIG,
    DRAFTS,
    METRICS,
    OTHER_TRACES,
    PREDICTED_TRACE,
    SAMPLE,
    SCHEDULE,
    SUMMARY,
    TRACE,
)
from pipeloom.runs.sample import Sample, parse_sample
from pipeloom.runs.traced_step import steps_before
from pipeloom.schedule import Schedule, parse_schedule
from pipeloom.system.files import MOST_RECORD_BYTES, read_text
from pipeloom.trace import Trace, from_chrome

_T = TypeVar("_T")

_METRIC_NAMES = ("step", "loss", "step_time_s")
_SUMMARY_NAMES = (
    "num_parameters",
    "steps",
    "train_loss",
    "validation_loss",
    "unigram_loss",
    "step_time_s",
    "predicted_step_time_s",
    "tokens_per_s",
    "tokens",
    "traced_step",
)

FIRST_PIPELINE = "replica 0, tensor rank 0"
"""Name of the pipeline whose trace is ``TRACE``."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder.

    Attributes:
        folder: its path.
        config: the configuration.
        config_text: text of the configuration's file.
        schedule: the executed schedule; ``None`` before the ranks have started.
        trace: measured trace of one step, of the first pipeline if there are several; ``None`` before that step.
        other_traces: name of another pipeline -> its trace of that step.
        predicted: predicted trace; ``None`` without a prediction.
        metrics: a dictionary for each completed step, with at least ``step``, ``loss`` and ``step_time_s``.
        summary: the results (``pipeloom.training.trainer.RunSummary`` describes the keys); ``None`` before the end.
        sample: a prompt, and the text that the model wrote behind it; ``None`` without.
        checkpoints: complete checkpoints, oldest step first.
    """

    folder: Path
    config: RunConfig
    config_text: str
    schedule: Schedule | None
    trace: Trace | None
    other_traces: dict[str, Trace]
    predicted: Trace | None
    metrics: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None
    sample: Sample | None
    checkpoints: tuple[Path, ...]

    @cached_property
    def begun(self) -> int | None:
        """Steps before those of this run with its layout, which may be of another one; ``None`` if unknown."""
        return steps_before(self.metrics)

    @property
    def traces(self) -> dict[str, Trace]:
        """The traces of the first pipeline, as far as there are any: ``measured`` and ``predicted``."""
        found = {"measured": self.trace, "predicted": self.predicted}
        return {name: trace for name, trace in found.items() if trace is not None}

    @cached_property
    def accounts(self) -> dict[str, tuple[BubbleAccount, ...]]:
        """Name of a trace -> bubble account of each rank; empty without a schedule.

        Raises:
            UserError: a trace does not belong to the schedule.
        """
        if self.schedule is None:
            return {}
        return {name: account_bubble(self.schedule, trace) for name, trace in self.traces.items()}

    @cached_property
    def other_accounts(self) -> dict[str, tuple[BubbleAccount, ...]]:
        """Name of another pipeline -> the same of its ranks, as measured; empty where replicas have other schedules."""
        if self.schedule is None or len(set(self.config.layout.microbatches_by_replica)) > 1:
            return {}
        return {name: account_bubble(self.schedule, trace) for name, trace in self.other_traces.items()}


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        UserError: there is no such folder, it is not that of a run, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}; `pipeloom train` writes one and prints its path")
    if not (folder / CONFIG).is_file() and (folder / DRAFTS).is_dir():
        raise UserError(f"the run in {folder} has not completed its first step, so there is nothing to show; try later")
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} is not the folder of a run: it has no {CONFIG}, which `pipeloom train` writes after the "
            "first step; use the folder that `pipeloom train` prints at its start"
        )
    config, problems = read_run_file(folder / CONFIG)
    if problems:
        raise ConfigError(problems, str(folder / CONFIG))
    summary = _read(folder / SUMMARY, lambda text: _with_names(json.loads(text), _SUMMARY_NAMES))
    metrics = _read(folder / METRICS, _parse_metrics) or ()
    # No run writes a summary without metrics, so a file was lost.
    if summary is not None and summary["train_loss"] is not None and not metrics:
        raise UserError(f"cannot read {folder / METRICS}: expected a line for each step, found none")
    return Run(
        folder=folder,
        config=config,
        config_text=(folder / CONFIG).read_text(encoding="utf-8"),
        schedule=_read(folder / SCHEDULE, parse_schedule),
        trace=_read(folder / TRACE, from_chrome),
        other_traces={
            _name_of(file): trace
            for file in sorted(folder.glob(OTHER_TRACES))
            if (trace := _read(file, from_chrome)) is not None
        },
        predicted=_read(folder / PREDICTED_TRACE, from_chrome),
        metrics=metrics,
        summary=summary,
        sample=_read(folder / SAMPLE, parse_sample),
        checkpoints=tuple(list_checkpoints(folder)),
    )


def _name_of(file: Path) -> str:
    """Name of the pipeline of an ``other_trace``, in words."""
    _, _, data, _, tensor = file.stem.split("-")
    return f"replica {int(data)}, tensor rank {tensor}"


def _read(file: Path, parse: Callable[[str], _T]) -> _T | None:
    """The parsed content of a file; ``None`` if there is no such file."""
    if not file.exists():
        return None
    # A trace of a long step may have hundreds of megabytes.
    text = read_text(file, most_bytes=MOST_RECORD_BYTES)
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:  # a UserError is a ValueError
        raise UserError(f"cannot read {file}: {reason_of(error)}") from error


def _parse_metrics(text: str) -> tuple[dict[str, Any], ...]:
    """A dictionary for each line, except a last one that is incomplete."""
    *whole, last = text.split("\n")
    lines = [_line_of_metrics(number, line) for number, line in enumerate(whole, start=1)]
    try:
        return (*lines, _with_names(json.loads(last), _METRIC_NAMES))
    # A run that was killed, or that still writes, leaves only the last line incomplete.
    except json.JSONDecodeError:
        return tuple(lines)


def _line_of_metrics(number: int, line: str) -> dict[str, Any]:
    try:
        return _with_names(json.loads(line), _METRIC_NAMES)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else reason_of(error)
        advice = "remove the line to read the other steps"
        raise UserError(f"line {number:,}: {reason}; {advice}") from error


def _with_names(values: Any, names: tuple[str, ...]) -> dict[str, Any]:
    missing = [name for name in names if not isinstance(values, dict) or name not in values]
    if missing:
        raise UserError(f"expected an object with {', '.join(names)}; it lacks {', '.join(missing)}")
    wrong = [name for name in names if not isinstance(values[name], int | float | None)]
    if wrong:
        raise UserError(f"expected numbers, found {', '.join(f'{name} {values[name]!r:.40}' for name in wrong)}")
    return values
