"""Traces: actions with their times, simulated or measured."""

from pipeloom.trace.spans import Span, Spans
from pipeloom.trace.trace import Trace, from_chrome, merge, step_s_of, to_chrome

__all__ = ["Span", "Spans", "Trace", "from_chrome", "merge", "step_s_of", "to_chrome"]
