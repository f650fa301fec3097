"""The run folder: what a run leaves behind, in a form that survives its end at any moment."""

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeloom.checkpoint_folder import list_checkpoints, read_info, run_of
from pipeloom.config import RunConfig
from pipeloom.config_file import format_run
from pipeloom.errors import RunError, UserError
from pipeloom.layout import Coordinates

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

    The configuration leaves out the folder itself, so that it can be run again as it is.

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
        repeatable = replace(config, output=replace(config.output, folder=None))
        (path / CONFIG).write_text(format_run(repeatable), encoding="utf-8")
        if is_same:
            _forget_end(path)
        if resume is not None:
            _take_metrics(path, resume)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {path}: {error.strerror}; choose another --output.folder"
        ) from error
    return RunFolder(path)


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


def other_trace(place: Coordinates) -> str:
    """The file of the trace of the pipeline at a place of the data and tensor axes, but the first."""
    return f"trace-replica-{place.data:03}-tensor-{place.tensor}.json"
