"""A lock on a folder. It ends with the last process that holds it, however that process ends.

The lock is an ``flock`` on the file ``.lock`` in the folder. Forked processes hold it together with their parent;
programs that they start do not. On NFS the client passes it on to the server as a lock on the file's bytes, so it holds
between hosts. The file contains who holds it; without locks of the file system, only that is compared.
"""

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from pipeloom.errors import UserError

LOCK = ".lock"
_PATIENCE_S = 2.0
"""How long a lock may stay held after its process was killed: the workers of that process end a moment later."""
# On NFS an flock is a byte-range lock, for which POSIX allows EACCES as well as EAGAIN.
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as the lock's file names it.

    Attributes:
        pid: its number.
        host: where it runs.
        since: when it took the lock, in local time.
        started: when the process began, by the clock of its kernel; empty where that cannot be found out.
    """

    pid: int
    host: str
    since: str
    started: str

    def describe(self) -> str:
        """For a message."""
        return f"process {self.pid} on host {self.host} since {self.since}"


class FolderLock:
    """A held lock; ``lock_folder`` returns it.

    Attributes:
        folder: what is locked.
        is_kept: whether the file system keeps locks. Where it does not, only processes of the same host see each other.
    """

    def __init__(self, folder: Path, descriptor: int, *, is_kept: bool) -> None:
        self.folder = folder
        self.is_kept = is_kept
        self._descriptor = descriptor

    def release(self) -> None:
        """Remove the file and end the lock."""
        (self.folder / LOCK).unlink(
            missing_ok=True
        )  # while it is held: whoever waits for the file sees that it is gone
        os.close(self._descriptor)


def lock_folder(folder: Path, patience_s: float = _PATIENCE_S) -> FolderLock:
    """Lock a folder for this process and those that it forks; wait so long for a lock that is held.

    Raises:
        UserError: another process holds it; the message names it.
        OSError: the file of the lock cannot be written.
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
        # flock without LOCK_NB would wait without an end, and could not name the holder.
        time.sleep(0.05)


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of a folder; the lock stays as it is. ``None`` where that is not clear."""
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return False if error.errno == errno.ENOENT else None
    try:
        # A shared lock ends with this descriptor; an exclusive one would look held to a run that starts at this moment.
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
    """The lock of a folder whose holder ended without releasing it; ``None`` where that is not certain."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    if _read_holder(folder / LOCK) is None:  # another process has made the file and is about to lock it
        os.close(descriptor)
        return None
    return FolderLock(folder, descriptor, is_kept=True)


def _open(folder: Path) -> tuple[int | None, bool]:
    """The locked file, or ``None`` if another process holds it; and whether the file system keeps locks."""
    path = folder / LOCK
    # Close-on-exec: a program that a worker starts must not hold the lock beyond the run. Read and write for everybody,
    # less the umask: another user of a shared folder has to be able to lock it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    is_taken, is_kept = False, True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = _is_file(descriptor, path)  # not, if its holder released it after it was opened here
        except OSError as error:
            if error.errno not in (*_HELD, *_NO_LOCKS):
                raise
            is_kept = error.errno in _HELD
            holder = _read_holder(path)
            is_taken = not is_kept and (holder is None or not _lives(holder))
        if is_taken:
            # Written in place and not replaced: the lock belongs to this file, not to its name.
            os.ftruncate(descriptor, 0)
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            holder = Holder(os.getpid(), socket.gethostname(), now, _start_of(os.getpid()))
            os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
    finally:
        if not is_taken:
            os.close(descriptor)
    return (descriptor if is_taken else None), is_kept


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether a path still names the file that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_holder(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _start_of(pid: int) -> str:
    """Boot and tick in which a process of this host began; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # proc(5): field 22, starttime, the 20th behind the name. The name may contain spaces and brackets, so the last
    # bracket ends it. Ticks count from the boot, hence its id.
    return f"{boot} {stat.rpartition(')')[2].split()[19]}"


def _lives(holder: Holder) -> bool:
    """Whether a process of this host still runs; a process of another host cannot be seen from here."""
    if holder.host != socket.gethostname():
        return False
    try:
        # Signal 0 sends nothing; it checks that the process exists.
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return _start_of(holder.pid) == holder.started  # otherwise the number went to another process
