"""The run folder: what a run leaves behind, in a form that survives its end at any moment; and how it is read."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pipeloom.checkpoint_folder import list_checkpoints, read_info, run_of
from pipeloom.config import RunConfig
from pipeloom.config_file import format_run, read_run_file
from pipeloom.errors import ConfigError, RunError, UserError, reason_of
from pipeloom.files import MOST_RECORD_BYTES, read_text
from pipeloom.layout import Coordinates
from pipeloom.schedule import Schedule, parse_schedule
from pipeloom.trace import Trace, from_chrome

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SCHEDULE = "schedule.txt"
TRACE = "trace.json"
OTHER_TRACES = "trace-*.json"
"""Of the other replicas, and of tensor-parallel ranks but the first; ``other_trace`` names them."""
PREDICTED_TRACE = "predicted_trace.json"
TIMELINE = "timeline"
SAMPLE = "sample.txt"
SUMMARY = "summary.json"
REPORT = "report.html"
WEIGHTS = "model.safetensors"
"""The weights at the end; where they are several files, ``WEIGHTS_INDEX`` says which parameter is in which."""
WEIGHTS_INDEX = f"{WEIGHTS}.index.json"

_T = TypeVar("_T")

_NEEDED = (CONFIG, METRICS, SCHEDULE, TRACE, SUMMARY)
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


class RunFolder:
    """Writes a run's files. A file is whole or not there; metrics are whole up to the last line.

    Args:
        path: an existing folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: Any = None

    def write(self, name: str, text: str) -> None:
        """Write a file under its name at once, so that nobody ever sees a part of it.

        Raises:
            RunError: the folder cannot be written to any more; so do the methods below.
        """
        draft = self.path / f".{name}.part"
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.path / name)
        except OSError as error:
            raise self._error(error) from None

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line to the metrics, on disk when the call returns."""
        try:
            if self._metrics is None:
                self._metrics = (self.path / METRICS).open("a", encoding="utf-8", buffering=1)
            self._metrics.write(json.dumps(metrics) + "\n")
            if not (self.path / METRICS).exists():
                raise FileNotFoundError(2, os.strerror(2))
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        """Close the metrics."""
        if self._metrics is not None:
            self._metrics.close()

    def _error(self, error: OSError) -> RunError:
        return RunError(f"cannot write to the run folder {self.path} any more: {error.strerror}")


def weight_files(folder: Path) -> list[Path]:
    """Files of weights in a folder, whole models and parts of them."""
    several = folder.glob(WEIGHTS.replace(".", "-?????-of-?????."))
    return [*several, *(file for file in (folder / WEIGHTS, folder / WEIGHTS_INDEX) if file.exists())]


def make_run_folder(config: RunConfig) -> RunFolder:
    """Make the folder and write the configuration into it; with a checkpoint, also the metrics until its step.

    Raises:
        UserError: the folder cannot be written to, or holds a run already.
    """
    path = config.output.folder
    try:
        path = _new_default_folder() if path is None else path
        resume = config.checkpoint.resume
        is_same = resume is not None and run_of(resume) == path.absolute()
        if not is_same and ((path / CONFIG).exists() or list_checkpoints(path) or weight_files(path)):
            raise UserError(f"{path} holds a run already; choose another --output.folder, or move it away")
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text(repeatable(config), encoding="utf-8")
        if is_same:
            _forget_end(path)
        if resume is not None:
            _take_metrics(path, resume)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {path}: {error.strerror}; choose another --output.folder"
        ) from error
    return RunFolder(path)


def repeatable(config: RunConfig) -> str:
    """The configuration as a run folder has it: without the folder itself, so that it can be run again as it is."""
    return format_run(replace(config, output=replace(config.output, folder=None)))


def _forget_end(path: Path) -> None:
    """Remove what a run wrote at its end, which is still to come now."""
    for name in (SCHEDULE, TRACE, PREDICTED_TRACE, SAMPLE, SUMMARY, REPORT, f"{TIMELINE}.png", f"{TIMELINE}.svg"):
        (path / name).unlink(missing_ok=True)
    for file in [*weight_files(path), *path.glob(OTHER_TRACES)]:
        file.unlink()


def _take_metrics(path: Path, checkpoint: Path) -> None:
    """Begin the metrics with those of a checkpoint's run until its step."""
    run = run_of(checkpoint)
    if run is None or not (run / METRICS).is_file():
        return
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
    step = read_info(checkpoint).step
    draft = path / f".{METRICS}.part"
    draft.write_text("".join(line for line in lines if _is_until(line, step)), encoding="utf-8")
    draft.replace(path / METRICS)


def _is_until(line: str, step: int) -> bool:
    """Whether a line of metrics is whole and of a step that a checkpoint has seen."""
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def _new_default_folder() -> Path:
    """``outputs/`` and the time, made; two runs that start in the same second get two folders."""
    name = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    for number in range(100):
        path = Path("outputs") / (f"{name}-{number}" if number else name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise UserError(f"cannot find a free name below outputs/ for {name}; give one as --output.folder")


@dataclass(frozen=True)
class Run:
    """A finished run, as its folder tells it.

    Attributes:
        folder: where it is.
        config: what it was told.
        config_text: the same as written.
        schedule: what each rank did, in order.
        trace: of one step, measured; of the first pipeline where there are several.
        other_traces: the same of the others, by their names; empty without.
        predicted: the same as predicted; ``None`` without prediction.
        metrics: a dictionary for each step, with at least ``step``, ``loss`` and ``step_time_s``.
        summary: what the run came to; ``pipeloom.train.trainer.RunSummary`` describes the keys.
        sample: text from the model; ``None`` without.
    """

    folder: Path
    config: RunConfig
    config_text: str
    schedule: Schedule
    trace: Trace
    other_traces: dict[str, Trace]
    predicted: Trace | None
    metrics: tuple[dict[str, Any], ...]
    summary: dict[str, Any]
    sample: str | None


def read_run(folder: Path) -> Run:
    """Read the folder of a finished run.

    Raises:
        UserError: there is none, or it is not finished; says which files are missing or broken.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}; `pipeloom train` writes one and says where")
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} is not the folder of a finished run: it lacks {', '.join(missing)}; "
            "a run that ended early, or is still going, cannot be reported"
        )
    config, problems = read_run_file(folder / CONFIG)
    if problems:
        raise ConfigError(problems, str(folder / CONFIG))
    has_prediction, has_sample = (folder / PREDICTED_TRACE).exists(), (folder / SAMPLE).exists()
    return Run(
        folder=folder,
        config=config,
        config_text=_read(folder / CONFIG, str),
        schedule=_read(folder / SCHEDULE, parse_schedule),
        trace=_read(folder / TRACE, from_chrome),
        other_traces={_name_of(file): _read(file, from_chrome) for file in sorted(folder.glob(OTHER_TRACES))},
        predicted=_read(folder / PREDICTED_TRACE, from_chrome) if has_prediction else None,
        metrics=_read(folder / METRICS, _parse_metrics),
        summary=_read(folder / SUMMARY, lambda text: _with_names(json.loads(text), _SUMMARY_NAMES)),
        sample=_read(folder / SAMPLE, str) if has_sample else None,
    )


def other_trace(place: Coordinates) -> str:
    """The file of the trace of the pipeline at a place of the data and tensor axes, but the first."""
    return f"trace-replica-{place.data:03}-tensor-{place.tensor}.json"


def _name_of(file: Path) -> str:
    """What people call that pipeline."""
    _, _, data, _, tensor = file.stem.split("-")
    return f"replica {int(data)}, tensor rank {tensor}"


def _read(file: Path, parse: Callable[[str], _T]) -> _T:
    text = read_text(file, most_bytes=MOST_RECORD_BYTES)
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:  # a UserError is a ValueError
        raise UserError(f"cannot read {file}: {reason_of(error)}") from error


def _parse_metrics(text: str) -> tuple[dict[str, Any], ...]:
    if not text.strip():
        raise UserError("expected a line for each step, found none")
    return tuple(_with_names(json.loads(line), _METRIC_NAMES) for line in text.splitlines())


def _with_names(values: Any, names: tuple[str, ...]) -> dict[str, Any]:
    missing = [name for name in names if not isinstance(values, dict) or name not in values]
    if missing:
        raise UserError(f"expected an object with {', '.join(names)}; it lacks {', '.join(missing)}")
    return values
