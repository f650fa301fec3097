"""Bytes that each rank holds over time, from a schedule, its trace, and the sizes of what it holds.

The trace may be simulated or measured.
"""

from dataclasses import dataclass

import numpy as np

from pipeloom.analysis.matching import match_spans
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import PARTS, Bytes, HeldBytes, KeptBytes, Ledger
from pipeloom.schedule.row import Ints
from pipeloom.trace import Trace
from pipeloom.trace.spans import Seconds


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes that one rank holds over time.

    Attributes:
        points: (seconds from the start of the step, bytes held from then on), from 0 on, ascending; consecutive bytes
            differ.
        peak_bytes: maximum.
        peak_s: when it is first reached.
        peak_parts: part of ``PARTS`` -> bytes at that time.
    """

    points: tuple[tuple[float, float], ...]
    peak_bytes: float
    peak_s: float
    peak_parts: dict[str, float]


def memory_over_time(schedule: Schedule, trace: Trace, held: HeldBytes) -> tuple[MemoryCurve, ...]:
    """The bytes of each rank over time.

    Args:
        schedule: the schedule that was run or simulated, with all of its actions.
        trace: of one step.
        held: sizes.
    """
    matched, span_s = match_spans(schedule, trace), (trace.start_s, trace.end_s)
    balance = Ledger.of(schedule, held).on(schedule.num_ranks, matched.start_s, matched.end_s, span_s)
    return tuple(
        _curve(always, *balance.entries_of(rank), trace.start_s) for rank, always in enumerate(held.always_bytes)
    )


def inputs_over_time(schedule: Schedule, trace: Trace) -> tuple[MemoryCurve, ...]:
    """Number of stage inputs that each rank holds over time; a token slice counts as its share.

    Evicted ones count at the partner, recomputed ones from their recomputation on.
    """
    return memory_over_time(schedule, trace, HeldBytes(always_bytes=(0.0,) * schedule.num_ranks, kept=KeptBytes()))


def _curve(always: float, part: Ints, times: Seconds, more: Bytes, origin_s: float) -> MemoryCurve:
    times, total = times - origin_s, always + np.cumsum(more)
    peak = int(total.argmax()) if len(total) and total.max() > always else -1
    parts = np.bincount(part[: peak + 1], more[: peak + 1], len(PARTS))
    parts[PARTS.index("always")] += always
    # Of several changes at one time, the last sum is held from then on.
    is_last = np.append(times[1:] != times[:-1], True)[: len(times)]
    points_s, held = times[is_last], total[is_last]
    if not len(points_s) or points_s[0] > 0:
        points_s, held = np.append(0.0, points_s), np.append(always, held)
    differs = np.append(True, held[1:] != held[:-1])
    points = tuple(zip(points_s[differs].tolist(), held[differs].tolist(), strict=True))
    peak_bytes, peak_s = (float(total[peak]), float(times[peak])) if peak >= 0 else (always, 0.0)
    return MemoryCurve(points, peak_bytes, peak_s, dict(zip(PARTS, parts.tolist(), strict=True)))
