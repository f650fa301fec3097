"""Cores of this host that this process may use."""

import os


def own_cores() -> frozenset[int]:
    """Numbers of the cores."""
    # Containers and job schedulers bind processes to some cores, which ``cpu_count`` ignores. macOS lacks the call.
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
