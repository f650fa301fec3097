"""Start of a run in its folder: lock it, remove drafts of killed runs, draft its first files.

Until the first step has ended (``RunFolder.begin``), the files of an earlier run do not change, and a new folder
contains only drafts.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pipeloom.checkpoint.checkpoint_choice import goes_on_in, later_checkpoints
from pipeloom.checkpoint.checkpoint_folder import FOLDER, among_checkpoints, list_checkpoints, read_info, run_of
from pipeloom.config import RunConfig
from pipeloom.errors import RunError, UserError, reason_of
from pipeloom.runs.run_folder import (
    CONFIG,
    DRAFTS,
    METRICS,
    RunFolder,
    is_draft,
    replaced_by_run,
    weight_files,
)
from pipeloom.system.files import missing_folders, remove_empty
from pipeloom.system.folder_lock import FolderLock, lock_folder
from pipeloom.terminal.words import quoted

_OUTPUTS = Path("outputs")
"""Parent of run folders whose name is not set, in the current folder."""


@contextmanager
def take_run_folder(config: RunConfig) -> Iterator[FolderLock]:
    """Create the folder of a run and hold its lock. If the run has not begun at the end, its files are removed.

    Args:
        config: with the folder and, for a run that continues in the same folder, the checkpoint.

    Raises:
        UserError: the folder cannot be written to, is in use, or contains another run.
    """
    path = config.output.folder
    if path is not None and (reason := among_checkpoints(path)) is not None:
        raise UserError(f"output.folder {reason}")
    made: list[Path] = []
    try:
        if path is None:
            has_parent = _OUTPUTS.exists()
            path = _new_default_folder()
            # Folders that this run creates are removed if it never begins.
            made = [path] if has_parent else [path, _OUTPUTS]
        else:
            made = missing_folders(path)
            path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path)
    except OSError as error:
        remove_empty(made)
        raise UserError(
            f"cannot write the run folder {path or 'outputs'}: {reason_of(error)}; choose another --output.folder"
        ) from error
    try:
        # After locking: another run may have begun here while this one waited.
        _refuse_other_files(path, config.checkpoint.resume)
        _remove_drafts(path)
        try:
            yield lock
        finally:
            # Before the lock is released, since afterwards the drafts may be another run's.
            if (path / DRAFTS).is_dir():
                _remove_drafts(path)
    finally:
        lock.release()
        remove_empty(made)


def _refuse_other_files(path: Path, resume: Path | None) -> None:
    """Refuse a folder with another run than the one that resumes, or with files that a run would replace."""
    if (path / CONFIG).exists() or list_checkpoints(path) or weight_files(path):
        if resume is not None and goes_on_in(resume, path):
            return
        raise UserError(
            f"{path} contains a run already; choose another --output.folder, move it away, or add "
            f"--checkpoint.resume {quoted(path)} to resume it"
        )
    if others := replaced_by_run(path):
        raise UserError(
            f"{path} contains {', '.join(others)}, which a run replaces or removes; choose another --output.folder"
        )


def draft_start(path: Path, config: RunConfig) -> RunFolder:
    """Draft the first files of a run: its configuration and, with a checkpoint, the metrics up to its step.

    Args:
        path: the run folder, locked.
        config: resolved. If its checkpoint is in this folder, it is the newest complete one.

    Raises:
        UserError: the folder cannot be written to.
    """
    resume = config.checkpoint.resume
    later: list[Path] = [] if resume is None else later_checkpoints(resume, path)
    lines, lost = (list[str](), "") if resume is None else _metrics_until(resume)
    folder = RunFolder(path, damaged=tuple(one.name for one in later), lost=lost)
    try:
        (path / DRAFTS).mkdir()
        folder.write_config(config)
        # Steps after the checkpoint are repeated, and would be in the metrics twice.
        folder.write(METRICS, "".join(lines))
    except (OSError, RunError) as error:
        raise UserError(
            f"cannot write the run folder {path}: {reason_of(error)}; choose another --output.folder"
        ) from None
    return folder


def go_back(folder: RunFolder, step: int) -> None:
    """Drop the metrics of the steps after ``step``, which are done again.

    Raises:
        RunError: the folder cannot be written to any more.
    """
    lines = ((folder.read(METRICS) or "") + folder.take_unwritten()).splitlines(keepends=True)
    folder.close()  # a further line goes to the new file
    folder.write(METRICS, "".join(line for line in lines if _is_until(line, step)))


def _metrics_until(checkpoint: Path) -> tuple[list[str], str]:
    """The metrics of a checkpoint's run up to its step, a line each, and which of them are lost, in words."""
    run, step = run_of(checkpoint), read_info(checkpoint).step
    if run is None:
        return [], ""
    file = run / METRICS
    if not file.is_file():
        return [], f"{file} is missing, so the metrics of this run lack all steps up to {step:,}" if step else ""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if _is_until(line, step)], _lost(file, lines, step)


def _lost(file: Path, lines: Sequence[str], last: int) -> str:
    """Which steps up to ``last`` the lines of a file of metrics lack, in words; empty for none."""
    steps = [_step_of(line) for line in lines]
    # A run that was killed leaves a last line that is incomplete; a later step than that of any checkpoint.
    damaged = [
        n for n, (line, step) in enumerate(zip(lines, steps, strict=True), 1) if step is None and line[-1] == "\n"
    ]
    known = {step for step in steps if step is not None}
    # A run that began from a checkpoint without metrics has none of the steps before it.
    first = 1 if damaged else min(known, default=1)
    missing = [step for step in range(first, last + 1) if step not in known]
    if not missing:
        return ""
    which = f"step {missing[0]:,}" if len(missing) == 1 else f"{len(missing):,} steps, the first is step {missing[0]:,}"
    why = f" (line {damaged[0]:,} is damaged)" if damaged else ""
    return f"{file} lacks {which}{why}, and so do the metrics of this run"


def _is_until(line: str, step: int) -> bool:
    """Whether a line of metrics is complete and of a step up to ``step``."""
    its = _step_of(line)
    return its is not None and its <= step


def _step_of(line: str) -> int | None:
    """The step of a line of metrics; ``None`` if it is not complete."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _remove_drafts(path: Path) -> None:
    """Remove incomplete files of killed processes; since the lock is held, no process still writes them."""
    shutil.rmtree(path / DRAFTS, ignore_errors=True)
    remove_unfinished(path)


def remove_unfinished(path: Path) -> None:
    """Remove incomplete files and checkpoints; no process writes them any more."""
    checkpoints = path / FOLDER
    own = [one for one in path.glob(".*") if is_draft(one.name)]
    for draft in [*own, *checkpoints.glob(".step-*.part"), *checkpoints.glob(".step-*.old")]:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


def _new_default_folder() -> Path:
    """Create a folder in ``outputs/``, named after the time; runs that start in the same second get different names."""
    name = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    # mkdir fails if the folder exists, so that two processes cannot take the same name.
    for number in range(100):
        path = _OUTPUTS / (f"{name}-{number}" if number else name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise UserError(f"cannot find a free name below {_OUTPUTS}/ for {name}; give one as --output.folder")
