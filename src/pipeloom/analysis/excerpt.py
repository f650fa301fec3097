"""A part of a large trace that a picture can hold: its first ranks, and of those the beginning."""

from dataclasses import dataclass

import numpy as np

from pipeloom.schedule.lanes import COMPUTE_LANE
from pipeloom.trace import Trace


@dataclass(frozen=True)
class Excerpt:
    """A part of a trace.

    Attributes:
        trace: the part.
        note: what was left out, to go behind a headline; empty if nothing was.
    """

    trace: Trace
    note: str


def excerpt(trace: Trace, most_ranks: int = 16, most_actions: int = 3000) -> Excerpt:
    """The first ranks of a trace and, if they do more, their first compute actions and what begins before these do.

    Args:
        trace: any trace.
        most_ranks: ranks to keep.
        most_actions: compute actions to keep.
    """
    num_ranks = min(trace.num_ranks, most_ranks)
    spans = trace.spans.take(trace.spans.rank < num_ranks)
    notes = [f"ranks 0 to {num_ranks - 1} of {trace.num_ranks}"] if num_ranks < trace.num_ranks else []
    starts = np.sort(spans.start_s[spans.on(COMPUTE_LANE.name)])
    if len(starts) > most_actions:
        end_s = float(starts[most_actions])
        # By time and not by number: all ranks of the picture end at the same moment.
        spans = spans.take(spans.start_s < end_s)
        whole_s = trace.end_s - trace.start_s
        notes.append(f"the first {end_s - trace.start_s:.3g} s of {whole_s:.3g} s")
    if not notes:
        return Excerpt(trace, "")
    return Excerpt(Trace(spans, num_ranks), f"; {', '.join(notes)}")
