"""The run folder: what a run leaves behind, in a form that survives its end at any moment."""

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeloom.config import RunConfig
from pipeloom.config_file import format_run
from pipeloom.errors import RunError, UserError

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SCHEDULE = "schedule.txt"
TRACE = "trace.json"
PREDICTED_TRACE = "predicted_trace.json"
TIMELINE = "timeline"
SAMPLE = "sample.txt"
SUMMARY = "summary.json"


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


def make_run_folder(config: RunConfig) -> RunFolder:
    """Make the folder and write the configuration into it.

    The configuration leaves out the folder itself, so that it can be run again as it is.

    Raises:
        UserError: the folder cannot be written to, or holds a run already.
    """
    path = config.output.folder
    try:
        path = _new_default_folder() if path is None else path
        if (path / CONFIG).exists():
            raise UserError(f"{path} holds a run already; choose another --output.folder, or move it away")
        path.mkdir(parents=True, exist_ok=True)
        repeatable = replace(config, output=replace(config.output, folder=None))
        (path / CONFIG).write_text(format_run(repeatable), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {path}: {error.strerror}; choose another --output.folder"
        ) from error
    return RunFolder(path)


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
