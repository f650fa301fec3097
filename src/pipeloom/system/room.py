"""Room for files that are written through memory.

A file of a given size need not have room on its disk. If the disk is full, a store to a mapping of such a file raises
no error: SIGBUS ends the process. So the room is taken before the file is mapped.
"""

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of an exceeded quota."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_CHUNK = 1 << 20


def take_room(file: int, size: int, begin: int = 0) -> None:
    """Append ``size`` bytes to an open file that ends at ``begin``, with their room on the disk.

    Raises:
        OSError: there is no room.
    """
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(file, begin, size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    done = 0
    while done < size:
        done += os.pwrite(file, bytes(min(_CHUNK, size - done)), begin + done)
