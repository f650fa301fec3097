"""Processes of this host by ID and start, so that a number that was used again is not taken for the old process."""

import os
from pathlib import Path


def start_of(pid: int) -> str:
    """Boot ID and clock tick at which a process of this host began; empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    found = _stat(pid)
    # Ticks count from the boot, so the boot ID belongs to them.
    return f"{boot} {found[19]}" if found else ""


def lives(pid: int, started: str) -> bool:
    """Whether the process of this host that had this ID and began then still runs.

    Args:
        pid: its ID.
        started: as of ``start_of``.
    """
    try:
        # Signal 0 sends nothing; it checks that the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    # With another start time, the process ID was reused. A zombie has ended; only its parent has not noticed.
    return start_of(pid) == started and _stat(pid)[:1] != ["Z"]


def is_stopped(pid: int, *, by_debugger: bool = True) -> bool:
    """Whether a signal has stopped a process of this host, or a debugger has; ``False`` without /proc."""
    return _stat(pid)[:1] in ([["T"], ["t"]] if by_debugger else [["T"]])


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name, the state first; empty without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # proc(5): starttime is field 22, the 20th after the name. The name may contain spaces and brackets, so it ends at
    # the last bracket.
    return stat.rpartition(")")[2].split()
