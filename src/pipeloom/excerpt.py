"""A part of a large trace that a picture can hold: its first ranks, and of those the beginning."""

from dataclasses import dataclass

from pipeloom.schedule.action import COMPUTE_KINDS
from pipeloom.trace import Spans, Trace


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
    spans = [span for span in trace.spans if span.rank < num_ranks]
    starts = sorted(span.start_s for span in spans if span.action.kind in COMPUTE_KINDS)
    notes = [f"ranks 0 to {num_ranks - 1} of {trace.num_ranks}"] if num_ranks < trace.num_ranks else []
    if len(starts) > most_actions:
        end_s = starts[most_actions]
        spans = [span for span in spans if span.start_s < end_s]
        whole_s = trace.end_s - trace.start_s
        notes.append(f"the first {end_s - trace.start_s:.3g} s of {whole_s:.3g} s")
    if not notes:
        return Excerpt(trace, "")
    return Excerpt(Trace(Spans.of(spans), num_ranks), f"; {', '.join(notes)}")
