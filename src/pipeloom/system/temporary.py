"""Temporary folders that the next run removes if their own run was killed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeloom.system.folder_lock import lock_folder, take_over

_PREFIX = "pipeloom-"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end, or by the next run if this process is killed."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        lock = lock_folder(folder)
        try:
            yield folder
        finally:
            lock.release()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    """Remove this user's folders whose processes have all ended; a folder without a lock stays."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            # The folder for temporary files is everybody's: a link there may
            # lead to files of other people or of this user.
            is_own = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        except OSError:  # it is being removed
            continue
        lock = take_over(folder) if is_own else None
        if lock is not None:
            # While the lock is held, so that no two runs remove the same folder.
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
