"""How a run folder is read, at whatever point its run is: finished, going on, or ended before its end."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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


@dataclass(frozen=True)
class Run:
    """A run, as far as its folder shows it.

    Attributes:
        folder: where it is.
        config: its configuration.
        config_text: the same as written.
        schedule: what each rank did, in order; ``None`` before the ranks have started.
        trace: of one step, measured; of the first pipeline where there are several. ``None`` before that step.
        other_traces: the same of the others, by their names; empty without.
        predicted: the same as predicted; ``None`` without prediction.
        metrics: a dictionary for each step that is done, with at least ``step``, ``loss`` and ``step_time_s``.
        summary: the results; ``pipeloom.training.trainer.RunSummary`` describes the keys. ``None`` before the end.
        sample: text from the model; ``None`` without.
        checkpoints: the complete ones, oldest step first.
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
    sample: str | None
    checkpoints: tuple[Path, ...]


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        UserError: there is none, it lacks its configuration, or a file in it is broken; the message names it.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}; `pipeloom train` writes one and prints its path")
    if not (folder / CONFIG).is_file() and (folder / DRAFTS).is_dir():
        raise UserError(f"the run in {folder} has not done its first step, so there is nothing to show yet; try later")
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} is not the folder of a run: it lacks {CONFIG}, which `pipeloom train` writes after the "
            "first step; give the folder that `pipeloom train` names at its start"
        )
    config, problems = read_run_file(folder / CONFIG)
    if problems:
        raise ConfigError(problems, str(folder / CONFIG))
    summary = _read(folder / SUMMARY, lambda text: _with_names(json.loads(text), _SUMMARY_NAMES))
    metrics = _read(folder / METRICS, _parse_metrics) or ()
    # A summary without metrics is not a state that a run leaves behind, so a file was lost.
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
        sample=_read(folder / SAMPLE, str),
        checkpoints=tuple(list_checkpoints(folder)),
    )


def _name_of(file: Path) -> str:
    """What people call the pipeline of ``other_trace``."""
    _, _, data, _, tensor = file.stem.split("-")
    return f"replica {int(data)}, tensor rank {tensor}"


def _read(file: Path, parse: Callable[[str], _T]) -> _T | None:
    """What a file holds; ``None`` if there is no such file."""
    if not file.exists():
        return None
    # A trace of a long step has hundreds of megabytes, far more than a file of settings may have.
    text = read_text(file, most_bytes=MOST_RECORD_BYTES)
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:  # a UserError is a ValueError
        raise UserError(f"cannot read {file}: {reason_of(error)}") from error


def _parse_metrics(text: str) -> tuple[dict[str, Any], ...]:
    """A dictionary for each line; a last one without its end is being written, or was when the run ended."""
    *whole, last = text.split("\n")
    lines = [_with_names(json.loads(line), _METRIC_NAMES) for line in whole]
    try:
        return (*lines, _with_names(json.loads(last), _METRIC_NAMES))
    # Only the last line may be incomplete: lines are written whole or not at all before the next one.
    except json.JSONDecodeError:
        return tuple(lines)


def _with_names(values: Any, names: tuple[str, ...]) -> dict[str, Any]:
    missing = [name for name in names if not isinstance(values, dict) or name not in values]
    if missing:
        raise UserError(f"expected an object with {', '.join(names)}; it lacks {', '.join(missing)}")
    wrong = [name for name in names if not isinstance(values[name], int | float | None)]
    if wrong:
        raise UserError(f"expected numbers, found {', '.join(f'{name} {values[name]!r:.40}' for name in wrong)}")
    return values
