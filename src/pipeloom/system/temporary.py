"""Temporary folders; those of a killed run are removed by the next run."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeloom.system.folder_lock import lock_folder, take_over

_PREFIX = "pipeloom-"
_MARK = ".temporary"
"""File in every temporary folder. A run folder that a user named like one has none."""
SHARED_MEMORY = Path("/dev/shm")
"""A file system in memory, whose files outlive the processes that wrote them."""


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """A folder that is removed at the end of the block, or by the next run if this process is killed.

    Args:
        place: that contains it; ``None`` for the system's folder of temporary files.
    """
    place = place or Path(tempfile.gettempdir())
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        (folder / _MARK).touch()
        lock = lock_folder(folder)
        try:
            yield folder
        finally:
            lock.release()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove temporary folders of this user whose processes have ended, also in memory; without a lock one stays."""
    places = (Path(tempfile.gettempdir()), SHARED_MEMORY)
    for folder in [mark.parent for place in places for mark in place.glob(f"{_PREFIX}*/{_MARK}")]:
        try:
            # Anyone can write to the folder for temporary files: a symbolic link there may point to any file.
            is_own = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        except OSError:  # another process is removing it
            continue
        lock = take_over(folder) if is_own else None
        if lock is not None:
            # The lock is held meanwhile, so that no two runs remove the same folder.
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
