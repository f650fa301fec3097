"""The run folder: the files that a run writes, which are consistent whenever the run ends."""

import errno
import io
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from re import compile as pattern
from typing import Any

from pipeloom.checkpoint.checkpoint_folder import (
    ACTIONS,
    DRAFTS,
    FOLDER,
    RUN_FILE,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from pipeloom.config import RunConfig
from pipeloom.config.file import format_run
from pipeloom.errors import RunError, UserError
from pipeloom.system.files import parse_json, read_text, strict_json
from pipeloom.system.room import FULL
from pipeloom.terminal.guard import print_warning
from pipeloom.workload.layout import Coordinates

CONFIG = RUN_FILE
METRICS = "metrics.jsonl"
WARNINGS = "warnings.txt"
"""A line for each thing that went wrong without ending the run; most runs have no such file."""
SLOW_RANKS = "slow_ranks.json"
"""Ranks that compute for much longer than the others, at the step that named them."""
SCHEDULE = "schedule.txt"
TRACE = "trace.json"
OTHER_TRACES = "trace-replica-*-tensor-*.json"
"""Traces of other replicas and tensor-parallel ranks than the first; ``other_trace`` names them."""
PREDICTED_TRACE = "predicted_trace.json"
TIMELINE = "timeline"
SAMPLE = "sample.txt"
SUMMARY = "summary.json"
REPORT = "report.html"
WEIGHTS = "model.safetensors"
"""The final weights; if they are several files, ``WEIGHTS_INDEX`` maps parameters to files."""
WEIGHTS_INDEX = f"{WEIGHTS}.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""Exported adapters, as PEFT names them."""
PROFILES = "profile"
"""Folder of torch.profiler's traces, one for each profiled step and rank."""
INTERRUPTION = "interruption.txt"
"""File in it of a run that was interrupted: by what."""
FAILURE = "failure.json"
"""File in it of a run that failed: which rank is the reason, and which processes were ended then."""
DRAWN = (f"{TIMELINE}.png", f"{TIMELINE}.svg")
_REPLACED = frozenset(
    {
        *(METRICS, SLOW_RANKS, SCHEDULE, TRACE, PREDICTED_TRACE, *DRAWN, SAMPLE, SUMMARY, REPORT),
        *(TOKENIZER, TOKENIZER_CONFIG, ACTIONS, DRAFTS),
    }
)
_DRAFT = pattern(r"\.(.+)\.part(\.[a-z]+)?")
_RANDOM = pattern(r"[0-9a-f]{16}")
"""Name of a draft of ``files.replaced``."""
_OTHER_TRACE = pattern(r"trace-replica-\d+-tensor-\d+\.json")


@dataclass(frozen=True)
class Failed:
    """Which rank made a run fail, as the process that started the ranks found it.

    Attributes:
        rank: the reason; ``None`` where it is not known, such as when all others waited for one.
        ended: ranks that the run killed because of it.
    """

    rank: int | None = None
    ended: tuple[int, ...] = ()


def read_failure(actions: Path) -> Failed:
    """What ``RunFolder.note_failure`` wrote to the folder of what ranks did last.

    Raises:
        UserError: the file cannot be read.
    """
    file = actions / FAILURE
    if not file.is_file():
        return Failed()
    found = parse_json(read_text(file))
    try:
        return Failed(None if found["rank"] is None else int(found["rank"]), tuple(map(int, found["ended"])))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is no file of a run that failed: {error}") from None


class RunFolder:
    """Writes the files of a run. Files are written atomically; of metrics, only the last line may be incomplete.

    Until ``begin``, new files go to the drafts of a run that starts (``pipeloom.runs.run_start``), and the files of an
    earlier run in the folder do not change.

    Args:
        path: an existing folder.
        damaged: names of checkpoints that ``begin`` renames.
        lost: which metrics of the run that this one continues are lost, in words; empty for none.
    """

    def __init__(self, path: Path, damaged: tuple[str, ...] = (), lost: str = "") -> None:
        self.path = path
        self.damaged, self.lost = damaged, lost
        self._metrics: io.FileIO | None = None
        self._unwritten = b""

    @property
    def is_starting(self) -> bool:
        """Whether the first step of the run has not ended."""
        return (self.path / DRAFTS).is_dir()

    def write(self, name: str, text: str, *, is_needed: bool = True) -> None:
        """Write a file atomically, so that no reader sees a part of it.

        Args:
            name: of the file.
            text: its content.
            is_needed: otherwise a full disk is a warning after the first step, and an older file stays.

        Raises:
            RunError: the folder cannot be written to any more; also raised by the methods below.
            UserError: the disk is full before the first step; also raised by the methods below.
        """
        # In the same folder: a rename is atomic only within one file system.
        draft = self.path / f".{name}.part"
        try:
            draft.write_text(text, encoding="utf-8")
            if is_needed:
                # Without this, a file that was renamed may be empty after a loss of power.
                with draft.open("rb") as written:
                    os.fsync(written.fileno())
            draft.replace((self.path / DRAFTS if self.is_starting else self.path) / name)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            if is_needed or error.errno not in FULL or self.is_starting:
                raise self._error(error) from None
            self.warn(f"cannot write {self.path / name}: {error.strerror}; the run continues without it")

    def make_actions(self) -> Path | None:
        """Make the empty folder of what ranks did last; ``None`` if the disk refuses, since no run needs it."""
        folder = (self.path / DRAFTS if self.is_starting else self.path).absolute() / ACTIONS
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        except OSError:
            return None
        return folder

    def read(self, name: str) -> str | None:
        """Text of a file of the run, or of its draft if there is one; ``None`` if there is neither."""
        for file in (self.path / DRAFTS / name, self.path / name):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return None

    def write_config(self, config: RunConfig, *, is_needed: bool = True) -> None:
        """Write the configuration without the run folder, so that it can be run again unchanged; see ``write``."""
        # With the folder, a second run would be refused, since the folder contains a run.
        text = format_run(replace(config, output=replace(config.output, folder=None)))
        self.write(CONFIG, text, is_needed=is_needed)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line to the metrics, without buffering. The first line calls ``begin``.

        While the disk is full, lines are kept in memory.
        """
        self._unwritten += strict_json(metrics).encode() + b"\n"
        self._write_metrics()

    def take_unwritten(self) -> str:
        """Lines of metrics, or the rest of a line, that the disk had no room for; they are kept no longer."""
        text, self._unwritten = self._unwritten.decode(), b""
        return text

    def _write_metrics(self) -> None:
        try:
            if self._metrics is None:
                self.begin()
                # Without a buffer, so that a killed process loses no line.
                self._metrics = (self.path / METRICS).open("ab", buffering=0)
            while self._unwritten:
                # A full disk may accept a part of a line; the rest is written later, so that lines stay whole.
                self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]
            # Writes to an open file succeed even if its folder was removed.
            if not (self.path / METRICS).exists():
                raise FileNotFoundError(2, os.strerror(2))
        except OSError as error:
            # Space may be freed while the run continues; other errors are permanent.
            if error.errno not in FULL:
                raise self._error(error) from None

    def warn(self, text: str) -> None:
        """Print a warning, and append it to the warnings."""
        print_warning(text)
        self.add_warning(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}  {text}")

    def add_warning(self, line: str) -> None:
        """Append one line to the warnings; errors are ignored."""
        # Most warnings are about a full disk, and must not end the run.
        with suppress(OSError), (self.path / WARNINGS).open("a", encoding="utf-8") as warnings:
            warnings.write(line + "\n")

    def note_interruption(self, text: str) -> None:
        """Write what interrupted the run, such as the name of a signal; errors are ignored."""
        with suppress(OSError):
            (self.path / ACTIONS / INTERRUPTION).write_text(text + "\n", encoding="utf-8")

    def note_failure(self, failed: Failed) -> None:
        """Write which rank made the run fail; errors are ignored."""
        actions = (self.path / DRAFTS if self.is_starting else self.path) / ACTIONS
        with suppress(OSError):
            (actions / FAILURE).write_text(strict_json(asdict(failed)) + "\n", encoding="utf-8")

    def begin(self, *, keeps_measured: bool = False) -> None:
        """Replace the files of an earlier run with the drafts; without drafts, do nothing.

        If the process is killed meanwhile, the folder is that of an unfinished run: the summary is removed first, and a
        configuration is never together with metrics or a schedule of another run.

        Args:
            keeps_measured: keep schedule, traces and timelines: the run has no steps left, and its settings are the
                same.
        """
        if not self.is_starting:
            return
        try:
            drafts = self.path / DRAFTS
            # First what was written at the end: a folder with a summary counts as a finished run.
            for file in _ends(self.path):
                file.unlink()
            for file in [] if keeps_measured else _measured(self.path):
                file.unlink()
            shutil.rmtree(self.path / ACTIONS, ignore_errors=True)
            names = {file.name for file in drafts.iterdir()}
            # Metrics first: a configuration must never be together with the metrics of another run.
            for name in [METRICS, CONFIG, *sorted(names - {METRICS, CONFIG})]:
                (drafts / name).replace(self.path / name)
            for name in self.damaged:
                put_aside(self.path / FOLDER / name)
            # Last, since this folder marks a run that has not begun (is_starting).
            drafts.rmdir()
        except OSError as error:
            raise self._error(error) from None

    def forget_measured(self) -> None:
        """Remove schedule, traces and timelines: the run continues with another layout."""
        try:
            for file in _measured(self.path / DRAFTS if self.is_starting else self.path):
                file.unlink()
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        """Close the metrics, with what the disk has room for now; a further line opens them again."""
        if self._metrics is not None:
            if self._unwritten:
                self._write_metrics()
            if lines := self._unwritten.count(b"\n"):
                self.warn(f"{self.path / METRICS} lacks its last lines ({lines}): {os.strerror(errno.ENOSPC)}")
            self._metrics.close()
            self._metrics = None

    def _error(self, error: OSError) -> RunError | UserError:
        if error.errno in FULL and self.is_starting:
            return UserError(
                f"cannot write the first files of a run to {self.path}: {error.strerror}; free some space, or choose "
                "another --output.folder"
            )
        return RunError(f"cannot write to the run folder {self.path} any more: {error.strerror}")


def _ends(path: Path) -> list[Path]:
    """The files that a run wrote at its end, the summary first."""
    files = [path / name for name in (SUMMARY, REPORT, SAMPLE)]
    return [*(file for file in files if file.exists()), *reversed(weight_files(path))]


def _measured(path: Path) -> list[Path]:
    """Schedule, measured and predicted traces, and timelines of a run."""
    others = [file for file in path.glob(OTHER_TRACES) if _OTHER_TRACE.fullmatch(file.name)]
    return [*others, *(path / name for name in (TRACE, PREDICTED_TRACE, *DRAWN, SCHEDULE) if (path / name).exists())]


def replaced_by_run(path: Path) -> list[str]:
    """Names in a folder without a run that a run would replace or remove, in order."""
    # Drafts are of a run that did not begin: their own folder has them, and at the last moment its metrics beside it.
    drafts = path / DRAFTS
    own = {DRAFTS} if drafts.is_dir() and all(_is_of_run(one.name) for one in drafts.iterdir()) else set[str]()
    own |= {METRICS} if own and (drafts / CONFIG).exists() else set()
    return sorted(one.name for one in path.iterdir() if _is_replaced(one.name) and one.name not in own)


def is_draft(name: str) -> bool:
    """Whether a name is that of an incomplete file of a run, of its pictures and pages, or of its weights."""
    found = _DRAFT.fullmatch(name)
    return found is not None and (found[1] == "weights" or _is_of_run(found[1]) or bool(_RANDOM.fullmatch(found[1])))


def _is_of_run(name: str) -> bool:
    return name in (CONFIG, WARNINGS) or _is_replaced(name)


def _is_replaced(name: str) -> bool:
    return name in _REPLACED or _OTHER_TRACE.fullmatch(name) is not None


def put_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint, so that neither runs nor the limit on old checkpoints count it."""
    for number in count():
        target = checkpoint.with_name(f"{checkpoint.name}.damaged{f'-{number}' if number else ''}")
        if not target.exists():
            checkpoint.rename(target)
            return


def weight_files(folder: Path) -> list[Path]:
    """Files of weights in a folder: a single file, or several with their index."""
    # The names of several files are those of Hugging Face's libraries.
    several = folder.glob(WEIGHTS.replace(".", "-?????-of-?????."))
    return [*several, *(file for file in (folder / WEIGHTS, folder / WEIGHTS_INDEX) if file.exists())]


def other_trace(place: Coordinates) -> str:
    """Name of the trace of the pipeline with these coordinates on the data and tensor axes, except the first."""
    return f"trace-replica-{place.data:03}-tensor-{place.tensor}.json"
