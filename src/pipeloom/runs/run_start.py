"""How a run takes its folder: locked, cleared of drafts of killed runs, its own first files drafted.

Until the first step is done nothing of an earlier run in the folder is changed, and a new folder contains drafts alone.
``RunFolder.begin`` ends that.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pipeloom.checkpoint.checkpoint_choice import goes_on_in, later_checkpoints
from pipeloom.checkpoint.checkpoint_folder import FOLDER, list_checkpoints, read_info, run_of
from pipeloom.config import RunConfig
from pipeloom.errors import RunError, UserError, reason_of
from pipeloom.runs.run_folder import CONFIG, DRAFTS, METRICS, RunFolder, weight_files
from pipeloom.system.folder_lock import FolderLock, lock_folder

_OUTPUTS = Path("outputs")
"""Where run folders without a name go, in the current folder."""


@contextmanager
def take_run_folder(config: RunConfig) -> Iterator[FolderLock]:
    """Make the folder of a run and hold its lock. At the end, a run that has not begun leaves nothing behind.

    Args:
        config: with the folder and, for a run that goes on in the same one, what it goes on from.

    Raises:
        UserError: the folder cannot be written to, is in use, or holds another run already.
    """
    path = config.output.folder
    made: list[Path] = []
    try:
        if path is None:
            has_parent = _OUTPUTS.exists()
            path = _new_default_folder()
            # What this run makes is removed again if it never begins; what was there before stays.
            made = [path] if has_parent else [path, _OUTPUTS]
        else:
            made = [one for one in (path, *path.parents) if not one.exists()]
            path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path)
    except OSError as error:
        _remove_empty(made)
        raise UserError(
            f"cannot write the run folder {path or 'outputs'}: {reason_of(error)}; choose another --output.folder"
        ) from error
    try:
        has_run = (path / CONFIG).exists() or bool(list_checkpoints(path) or weight_files(path))
        resume = config.checkpoint.resume
        # Under the lock: another run may have begun here while this one waited for it.
        if has_run and not (resume is not None and goes_on_in(resume, path)):
            raise UserError(f"{path} holds a run already; choose another --output.folder, or move it away")
        _remove_drafts(path)
        yield lock
    finally:
        # Before the lock is released, or the next holder's drafts would be removed.
        shutil.rmtree(path / DRAFTS, ignore_errors=True)
        lock.release()
        _remove_empty(made)


def draft_start(path: Path, config: RunConfig) -> RunFolder:
    """Draft the first files of a run: its configuration and, with a checkpoint, the metrics until its step.

    The configuration leaves out the folder itself, so that it can be run again as it is.

    Args:
        path: the run folder, locked.
        config: resolved; what it resumes from is the newest whole checkpoint of its run, if that run has this folder.

    Raises:
        UserError: the folder cannot be written to.
    """
    resume = config.checkpoint.resume
    later: list[Path] = [] if resume is None else later_checkpoints(resume, path)
    folder = RunFolder(path, damaged=tuple(one.name for one in later))
    try:
        (path / DRAFTS).mkdir()
        folder.write_config(config)
        # Steps behind the checkpoint are done again, and would stand twice in the metrics.
        folder.write(METRICS, "" if resume is None else "".join(_metrics_until(resume)))
    except (OSError, RunError) as error:
        raise UserError(
            f"cannot write the run folder {path}: {reason_of(error)}; choose another --output.folder"
        ) from None
    return folder


def _metrics_until(checkpoint: Path) -> list[str]:
    """The lines of metrics of a checkpoint's run until its step."""
    run = run_of(checkpoint)
    if run is None or not (run / METRICS).is_file():
        return []
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
    step = read_info(checkpoint).step
    return [line for line in lines if _is_until(line, step)]


def _is_until(line: str, step: int) -> bool:
    """Whether a line of metrics is whole and of a step that a checkpoint has seen."""
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def _remove_drafts(path: Path) -> None:
    """Remove what killed processes of this run left half written; the lock is held, so no process still writes it."""
    shutil.rmtree(path / DRAFTS, ignore_errors=True)
    checkpoints = path / FOLDER
    for draft in [*path.glob(".*.part"), *checkpoints.glob(".step-*.part"), *checkpoints.glob(".step-*.old")]:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


def _remove_empty(made: list[Path]) -> None:
    """Remove folders that this run made, the innermost first, as far as nothing is in them."""
    for folder in made:
        try:
            folder.rmdir()
        except OSError:
            return


def _new_default_folder() -> Path:
    """``outputs/`` and the time, made; two runs that start in the same second get two folders."""
    name = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    # mkdir fails where the folder exists, so that two processes cannot both take one name.
    for number in range(100):
        path = _OUTPUTS / (f"{name}-{number}" if number else name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise UserError(f"cannot find a free name below {_OUTPUTS}/ for {name}; give one as --output.folder")
