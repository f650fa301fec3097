"""A lock on a folder, released when the last process that holds it ends for any reason.

The lock is an ``flock`` on the file ``.lock`` in the folder. Forked processes share it with their parent; programs that
they start do not. On NFS it works between hosts, since the client sends it to the server as a lock on the file's bytes.
The file names the process that holds the lock. On a file system without locks, only this process is checked.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from pipeloom.errors import UserError
from pipeloom.system.files import parse_json, read_text
from pipeloom.system.processes import lives, start_of

LOCK = ".lock"
_PATIENCE_S = 2.0
"""How long to wait for a lock: the workers of a killed process share its lock, and end a moment later."""
_MOST_PID = 2**31 - 1
# On NFS an flock is a byte-range lock, for which POSIX allows EACCES as well as EAGAIN.
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as the lock's file names it.

    Attributes:
        pid: its process ID.
        host: name of its host.
        since: when it took the lock, in local time.
        started: when the process began, as of ``start_of``; empty without /proc.
    """

    pid: int
    host: str
    since: str
    started: str

    def describe(self) -> str:
        """The process, its host and the time, for a message."""
        return f"process {self.pid} on host {self.host} since {self.since}"


class FolderLock:
    """A held lock; ``lock_folder`` returns it.

    Attributes:
        folder: the locked folder.
        is_kept: whether the file system supports locks. Without, only processes of the same host exclude each other.
    """

    def __init__(self, folder: Path, descriptor: int, *, is_kept: bool) -> None:
        self.folder = folder
        self.is_kept = is_kept
        self._descriptor = descriptor

    def release(self) -> None:
        """Remove the file and end the lock."""
        # Before the lock ends: a process that waits for it then finds that the file is gone (_is_file).
        (self.folder / LOCK).unlink(missing_ok=True)
        os.close(self._descriptor)


def lock_folder(folder: Path, patience_s: float = _PATIENCE_S) -> FolderLock:
    """Lock a folder for this process and its forks; wait at most ``patience_s`` for a lock that is held.

    Raises:
        UserError: another process holds the lock; the message names it.
        OSError: the lock file cannot be written.
    """
    deadline = time.monotonic() + patience_s
    while True:
        descriptor, is_kept = _open(folder)
        if descriptor is not None:
            return FolderLock(folder, descriptor, is_kept=is_kept)
        if time.monotonic() > deadline:
            holder = _read_holder(folder / LOCK)
            who = "another process" if holder is None else holder.describe()
            raise UserError(f"the run folder {folder} is in use by {who}; wait for its end, or end it")
        # flock without LOCK_NB would wait forever, and could not name the holder.
        time.sleep(0.05)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which this process may hold already.

    Raises:
        UserError: as ``lock_folder``.
        OSError: the lock file cannot be written.
    """
    holder = _read_holder(folder / LOCK)
    if holder is not None and (holder.pid, holder.host) == (os.getpid(), socket.gethostname()) and is_locked(folder):
        yield
        return
    lock = lock_folder(folder)
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of a folder; ``None`` if that cannot be determined. Changes nothing."""
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return False if error.errno == errno.ENOENT else None
    try:
        # Shared and brief: with an exclusive lock, a run that starts at this moment would find the folder in use.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read_holder(path)
        if error.errno in _HELD:
            return True
        return None if holder is None or holder.host != socket.gethostname() else _lives(holder)
    finally:
        os.close(descriptor)
    return False


def take_over(folder: Path) -> FolderLock | None:
    """Lock a folder whose holder ended without releasing it; ``None`` if it is held, unlocked or unclear."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    # An empty file: another process has created it and is about to lock it. Some networks lock for each host alone.
    holder = _read_holder(folder / LOCK)
    if holder is None or holder.host != socket.gethostname():
        os.close(descriptor)
        return None
    return FolderLock(folder, descriptor, is_kept=True)


def _open(folder: Path) -> tuple[int | None, bool]:
    """The locked file's descriptor, or ``None`` if another process holds it; and whether the file system has locks."""
    path = folder / LOCK
    # Close-on-exec: a program that a worker starts must not hold the lock after the run. Mode 0666, less the umask:
    # other users of a shared folder must be able to lock it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    is_taken, is_kept = False, True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # False if the holder removed the file between the two calls.
            is_taken = _is_file(descriptor, path)
        except OSError as error:
            if error.errno not in (*_HELD, *_NO_LOCKS):
                raise
            is_kept = error.errno in _HELD
            holder = _read_holder(path)
            is_taken = not is_kept and (holder is None or not _lives(holder))
        if is_taken:
            # Written in place, not replaced: the lock belongs to this inode.
            os.ftruncate(descriptor, 0)
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            holder = Holder(os.getpid(), socket.gethostname(), now, start_of(os.getpid()))
            os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
    finally:
        if not is_taken:
            os.close(descriptor)
    return (descriptor if is_taken else None), is_kept


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_holder(path: Path) -> Holder | None:
    """The holder that a lock file names; ``None`` if there is no such file, or if it contains something else."""
    try:
        holder = Holder(**parse_json(read_text(path)))
    except (UserError, TypeError):
        return None
    texts = (holder.host, holder.since, holder.started)
    # Any program may have written the file. kill(2) takes 0 and negative numbers as groups of processes.
    is_pid = type(holder.pid) is int and 0 < holder.pid <= _MOST_PID
    return holder if is_pid and all(isinstance(text, str) for text in texts) else None


def _lives(holder: Holder) -> bool:
    """Whether a process of this host still runs; ``False`` for other hosts, whose processes are not visible here."""
    if holder.host != socket.gethostname():
        return False
    return lives(holder.pid, holder.started)
