"""Bytes that each rank holds over time, from a schedule, a trace of it, and the bytes of each thing.

It does not matter whether the trace was simulated or measured.
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
    """What one rank holds over time.

    Attributes:
        points: (seconds from the start of the step, bytes held from then on), ascending, from 0 on; each holds other
            bytes than the one before.
        peak_bytes: the most.
        peak_s: when it is first held.
        peak_parts: what it is then made of, by ``PARTS``.
    """

    points: tuple[tuple[float, float], ...]
    peak_bytes: float
    peak_s: float
    peak_parts: dict[str, float]


def memory_over_time(schedule: Schedule, trace: Trace, held: HeldBytes) -> tuple[MemoryCurve, ...]:
    """For each rank its bytes over time.

    Args:
        schedule: what was run or simulated, at the level at which it was.
        trace: of one step of it.
        held: how large things are.
    """
    matched, span_s = match_spans(schedule, trace), (trace.start_s, trace.end_s)
    balance = Ledger.of(schedule, held).on(schedule.num_ranks, matched.start_s, matched.end_s, span_s)
    return tuple(
        _curve(always, *balance.entries_of(rank), trace.start_s) for rank, always in enumerate(held.always_bytes)
    )


def inputs_over_time(schedule: Schedule, trace: Trace) -> tuple[MemoryCurve, ...]:
    """The same for what ranks keep for backwards alone, 1 for each stage's micro-batch, which its slices share.

    What a partner evicted to a rank counts there; what is recomputed counts from when it is.
    """
    return memory_over_time(schedule, trace, HeldBytes(always_bytes=(0.0,) * schedule.num_ranks, kept=KeptBytes()))


def _curve(always: float, part: Ints, times: Seconds, more: Bytes, origin_s: float) -> MemoryCurve:
    times, total = times - origin_s, always + np.cumsum(more)
    peak = int(total.argmax()) if len(total) and total.max() > always else -1
    parts = np.bincount(part[: peak + 1], more[: peak + 1], len(PARTS))
    parts[PARTS.index("always")] += always
    # Of several changes at one time the last sum is what is held from then on.
    is_last = np.append(times[1:] != times[:-1], True)[: len(times)]
    points_s, held = times[is_last], total[is_last]
    if not len(points_s) or points_s[0] > 0:
        points_s, held = np.append(0.0, points_s), np.append(always, held)
    differs = np.append(True, held[1:] != held[:-1])
    points = tuple(zip(points_s[differs].tolist(), held[differs].tolist(), strict=True))
    peak_bytes, peak_s = (float(total[peak]), float(times[peak])) if peak >= 0 else (always, 0.0)
    return MemoryCurve(points, peak_bytes, peak_s, dict(zip(PARTS, parts.tolist(), strict=True)))
