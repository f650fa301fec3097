"""Free memory of this Linux host, of its control group and of this process."""

import os
import re
import resource
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("sys/fs/cgroup")


class Available(NamedTuple):
    """An amount of free memory.

    Attributes:
        size_bytes: how much; infinite without a limit, or where it cannot be read.
        source: completes ``N bytes``, such as ``free on this host``.
    """

    size_bytes: float
    source: str


def available_memory(root: Path = Path("/")) -> Available:
    """Memory that the processes of this host, or of this process's control group, can still allocate together.

    The page cache counts as available.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    return min([_free(root), *_group_limits(root)])


def address_space(root: Path = Path("/")) -> Available:
    """Address space that this process, and each of its forks, can still map (``ulimit -v``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Available(inf, "no limit")
    # All mapped addresses count against the limit, whether memory backs them or not.
    pages = _number(_read(root / "proc/self/statm"), r"^(\d+)") or 0.0
    return Available(max(0.0, limit - pages * os.sysconf("SC_PAGE_SIZE")), "left of the limit of a process's addresses")


def _free(root: Path) -> Available:
    # MemAvailable, not MemFree: it includes page cache that the kernel can reclaim (proc(5)).
    kibibytes = _number(_read(root / "proc/meminfo"), r"^MemAvailable:\s*(\d+)")
    return Available(inf if kibibytes is None else kibibytes * 1024, "free on this host")


def _group_limits(root: Path) -> Iterator[Available]:
    """What is left of each limit of the control group and its parents, in versions 1 and 2."""
    versions = (
        (r"^0::(.*)$", "", "memory.max", "memory.current", ""),
        (
            # Version 1 has a line for each set of controllers; version 2 has one line, with number 0 and no controller.
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
        # The limits of parent groups apply, too.
        for folder in [group, *(above for above in group.parents if above.is_relative_to(top))]:
            limit = _number(_read(folder / limit_name), r"^(\d+)$")
            usage = _number(_read(folder / usage_name), r"^(\d+)$")
            # No limit is "max" in version 2, which is not a number.
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
