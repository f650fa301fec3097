"""Which step of a run is traced: of several, the one of median time, since other work on a host slows single steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.config import RunConfig

MOST_CANDIDATES = 5
"""Steps of which one is chosen; their traces are in memory until then."""


BEGINS = "begins"
"""In the metrics of the first step of a run, and of the first one with another layout after a restart."""


def steps_before(metrics: Sequence[Mapping[str, Any]]) -> int | None:
    """Steps before those that a run did with its layout; ``None`` where its metrics do not have that."""
    return next((line["step"] - 1 for line in reversed(metrics) if line.get(BEGINS)), None)


def traced_candidates(config: RunConfig, begun: int) -> range:
    """Steps of which one is traced: an odd number of them from ``output.trace_step`` on, so that one is the median.

    Args:
        config: of the run.
        begun: steps before the run began.
    """
    steps = config.training.known_steps
    first = min(begun + config.output.trace_step, steps)
    room = min(MOST_CANDIDATES, steps - first + 1)
    return range(first, first + room - (room + 1) % 2)


def median_step(candidates: range, times_s: Mapping[int, float]) -> int | None:
    """The candidate of median time; ``None`` before all have ended.

    Args:
        candidates: from ``traced_candidates``.
        times_s: step -> seconds, as rank 0 measured them.
    """
    if not all(step in times_s for step in candidates):
        return None
    return sorted(candidates, key=lambda step: times_s[step])[len(candidates) // 2]
