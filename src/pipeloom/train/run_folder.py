"""The run folder: what a run leaves behind, in a form that survives its end at any moment."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeloom.config import RunConfig
from pipeloom.config_file import format_run
from pipeloom.errors import UserError

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SCHEDULE = "schedule.txt"
TRACE = "trace.json"
PREDICTED_TRACE = "predicted_trace.json"
TIMELINE = "timeline"
SAMPLE = "sample.txt"
SUMMARY = "summary.json"


def make_run_folder(config: RunConfig) -> Path:
    """Make the folder and write the configuration into it.

    Raises:
        UserError: the folder cannot be written to, or holds a run already.
    """
    folder = config.output.folder or Path("outputs") / datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    if (folder / CONFIG).exists():
        raise UserError(f"{folder} holds a run already; choose another --output.folder, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(format_run(config), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {folder}: {error.strerror}; choose another --output.folder"
        ) from error
    return folder


class MetricsFile:
    """``metrics.jsonl``: a line for each step, on disk as soon as the step is done."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / METRICS).open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(metrics) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
