"""The run folder: what a run leaves behind, in a form that survives its end at any moment; and how it is read."""

import errno
import io
import json
import os
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from pipeloom.checkpoint.checkpoint_folder import FOLDER
from pipeloom.config import RunConfig
from pipeloom.config.file import format_run
from pipeloom.errors import RunError
from pipeloom.workload.layout import Coordinates

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
WARNINGS = "warnings.txt"
"""Checkpoints that could not be written, a line each; not there in most runs."""
SCHEDULE = "schedule.txt"
TRACE = "trace.json"
OTHER_TRACES = "trace-replica-*.json"
"""Of the other replicas, and of tensor-parallel ranks but the first; ``other_trace`` names them."""
PREDICTED_TRACE = "predicted_trace.json"
TIMELINE = "timeline"
SAMPLE = "sample.txt"
SUMMARY = "summary.json"
REPORT = "report.html"
WEIGHTS = "model.safetensors"
"""The weights at the end; where they are several files, ``WEIGHTS_INDEX`` maps parameters to files."""
WEIGHTS_INDEX = f"{WEIGHTS}.index.json"
DRAFTS = ".starting"
"""Folder in a run folder with the files of a run that has not done its first step."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a user's full share of it."""


class RunFolder:
    """Writes a run's files. A file is whole or not there; metrics are whole up to the last line.

    Where the folder contains drafts of a run that starts (``pipeloom.runs.run_start``), new files go to them, and the
    files of an earlier run stay as they are until ``begin``.

    Args:
        path: an existing folder.
        damaged: names of checkpoints that ``begin`` puts aside.
    """

    def __init__(self, path: Path, damaged: tuple[str, ...] = ()) -> None:
        self.path = path
        self.damaged = damaged
        self._metrics: io.FileIO | None = None
        self._unwritten = b""

    @property
    def is_starting(self) -> bool:
        """Whether no step of the run is done yet."""
        return (self.path / DRAFTS).is_dir()

    def write(self, name: str, text: str) -> None:
        """Write a file under its name at once, so that no reader finds a part of it.

        Raises:
            RunError: the folder cannot be written to any more; so do the methods below.
        """
        # In the same folder: a rename replaces a file at once only within one file system.
        draft = self.path / f".{name}.part"
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace((self.path / DRAFTS if self.is_starting else self.path) / name)
        except OSError as error:
            raise self._error(error) from None

    def read(self, name: str) -> str | None:
        """A file of the run, its draft if there is one; ``None`` if there is neither."""
        for file in (self.path / DRAFTS / name, self.path / name):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return None

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration without the folder itself, so that it can be run again as it is."""
        # With its folder in it, a second run of the configuration would be refused: the folder holds a run.
        self.write(CONFIG, format_run(replace(config, output=replace(config.output, folder=None))))

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line to the metrics, on disk when the call returns. The first line begins the run.

        While the disk is full, lines wait in memory for room.
        """
        self._unwritten += json.dumps(metrics).encode() + b"\n"
        try:
            if self._metrics is None:
                self.begin()
                # Without a buffer, so that a killed process loses no line that it has reported.
                self._metrics = (self.path / METRICS).open("ab", buffering=0)
            while self._unwritten:
                # A write to a full disk may take a part of a line; the rest waits, so that lines stay whole.
                self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]
            # An open file outlives its folder: without this check a run would go on writing into nothing.
            if not (self.path / METRICS).exists():
                raise FileNotFoundError(2, os.strerror(2))
        except OSError as error:
            # A full disk may be emptied while the run goes on; anything else does not pass.
            if error.errno not in _FULL:
                raise self._error(error) from None

    def add_warning(self, line: str) -> None:
        """Append one line to the warnings, if there is room for it."""
        # The warning is mostly about a full disk, and must not end the run.
        with suppress(OSError), (self.path / WARNINGS).open("a", encoding="utf-8") as warnings:
            warnings.write(line + "\n")

    def begin(self, *, keeps_measured: bool = False) -> None:
        """Replace the files of an earlier run with the drafts. Without drafts nothing happens.

        A process that is killed in the middle leaves a folder of a run without its end: the summary goes first, and
        each configuration is only ever there with metrics and a schedule of its own, or with none.

        Args:
            keeps_measured: leave what was measured and predicted. The run does no step, and its settings are the same.
        """
        if not self.is_starting:
            return
        try:
            drafts = self.path / DRAFTS
            # The end first: a folder with a summary is read as a finished run.
            for file in _ends(self.path):
                file.unlink()
            for file in [] if keeps_measured else _measured(self.path):
                file.unlink()
            names = {file.name for file in drafts.iterdir()}
            # Metrics first: a configuration must never be there with the metrics of another run.
            for name in [METRICS, CONFIG, *sorted(names - {METRICS, CONFIG})]:
                (drafts / name).replace(self.path / name)
            for name in self.damaged:
                _put_aside(self.path / FOLDER / name)
            # Last: the folder is what marks a run that has not begun (is_starting).
            drafts.rmdir()
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        """Close the metrics."""
        if self._metrics is not None:
            self._metrics.close()

    def _error(self, error: OSError) -> RunError:
        return RunError(f"cannot write to the run folder {self.path} any more: {error.strerror}")


def _ends(path: Path) -> list[Path]:
    """What a run wrote at its end, the summary first."""
    files = [path / name for name in (SUMMARY, REPORT, SAMPLE)]
    return [*(file for file in files if file.exists()), *reversed(weight_files(path))]


def _measured(path: Path) -> list[Path]:
    """The schedule that a run executed, and what was measured and predicted of a step of it."""
    names = (TRACE, PREDICTED_TRACE, f"{TIMELINE}.png", f"{TIMELINE}.svg", SCHEDULE)
    return [*path.glob(OTHER_TRACES), *(path / name for name in names if (path / name).exists())]


def _put_aside(checkpoint: Path) -> None:
    """Give a damaged checkpoint a name under which neither a run nor the limit on old checkpoints takes it for one."""
    for number in count():
        target = checkpoint.with_name(f"{checkpoint.name}.damaged{f'-{number}' if number else ''}")
        if not target.exists():
            checkpoint.rename(target)
            return


def weight_files(folder: Path) -> list[Path]:
    """Files of weights in a folder, whole models and parts of them."""
    # The names that Hugging Face's libraries give to the parts.
    several = folder.glob(WEIGHTS.replace(".", "-?????-of-?????."))
    return [*several, *(file for file in (folder / WEIGHTS, folder / WEIGHTS_INDEX) if file.exists())]


def other_trace(place: Coordinates) -> str:
    """The file of the trace of the pipeline at a place of the data and tensor axes, but the first."""
    return f"trace-replica-{place.data:03}-tensor-{place.tensor}.json"
