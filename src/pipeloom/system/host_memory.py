"""Memory that this host, its control group and this process still have, as Linux shows it."""

import os
import re
import resource
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("sys/fs/cgroup")


class Available(NamedTuple):
    """Memory that is there.

    Attributes:
        size_bytes: how much; infinite where no source has it.
        source: what limits it, for people.
    """

    size_bytes: float
    source: str


def available_memory(root: Path = Path("/")) -> Available:
    """What all processes of this host, or of this process's control group, can still take together.

    Memory that holds files only counts as available.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    return min([_free(root), *_group_limits(root)])


def address_space(root: Path = Path("/")) -> Available:
    """What this process, and each one that it forks, can still map (``ulimit -v``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Available(inf, "no limit")
    # Addresses that are in use already count against the limit, whether memory is behind them or not.
    pages = _number(_read(root / "proc/self/statm"), r"^(\d+)") or 0.0
    return Available(max(0.0, limit - pages * os.sysconf("SC_PAGE_SIZE")), "left of the limit of a process's addresses")


def _free(root: Path) -> Available:
    # MemAvailable and not MemFree: it counts the page cache that the kernel would give up (proc(5)).
    kibibytes = _number(_read(root / "proc/meminfo"), r"^MemAvailable:\s*(\d+)")
    return Available(inf if kibibytes is None else kibibytes * 1024, "free on this host")


def _group_limits(root: Path) -> Iterator[Available]:
    """Of the control group and of those around it, in both versions."""
    versions = (
        (r"^0::(.*)$", "", "memory.max", "memory.current", ""),
        (
            # Version 1 names a group for each set of controllers; version 2 has
            # one line, with number 0 and no controller.
            r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_",
        ),
    )
    for pattern, controller, limit_name, usage_name, prefix in versions:
        found = re.search(pattern, _read(root / "proc/self/cgroup"), re.MULTILINE)
        if found is None:
            continue
        top = root / _GROUPS / controller
        group = top / found[1].lstrip("/")
        # A group is limited by each group around it as well.
        for folder in [group, *(above for above in group.parents if above.is_relative_to(top))]:
            limit = _number(_read(folder / limit_name), r"^(\d+)$")
            usage = _number(_read(folder / usage_name), r"^(\d+)$")
            # "max" in version 2 is no number: no limit.
            if limit is None or usage is None:
                continue
            stat = _read(folder / "memory.stat")
            # Usage counts cached files, which the kernel drops before it kills a process for memory.
            files = sum(_number(stat, rf"^{prefix}{kind}_file (\d+)$") or 0.0 for kind in ("inactive", "active"))
            yield Available(max(0.0, limit - max(0.0, usage - files)), "left of the limit of the control group")


def _number(text: str, pattern: str) -> float | None:
    found = re.search(pattern, text, re.MULTILINE)
    return None if found is None else float(found[1])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
