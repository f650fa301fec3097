"""What the page needs to draw the timelines: boxes with whole nanoseconds, and colors."""

from collections.abc import Mapping
from typing import Any

from pipeloom.analysis.summary import summarize
from pipeloom.plotting.draw import box_colors
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import COMPUTE_KINDS, KINDS, STAGE_KINDS
from pipeloom.trace import Span, Trace

_GREY = ("#8a929c", "#ffffff")
_MOST_LEGEND_STAGES = 16


def timeline_contents(traces: Mapping[str, Trace], num_stages: int, step: int | None) -> dict[str, Any]:
    """Panels of ranks of lanes of boxes.

    A box is (kind, stage, micro-batch, slice, start, duration, color): kind and color as indices into the lists
    beside the panels, times in nanoseconds from the start of the step.
    """
    titles = {
        "measured": "measured in one step" if step is None else f"measured in step {step}",
        "predicted": "predicted before the first step, from profiled stages",
    }
    palette: dict[tuple[str, str], int] = {}
    panels = [
        {
            "name": name,
            "title": titles[name],
            "makespan": f"{summarize(trace).makespan_s * 1e3:,.1f} ms",
            "ranks": _ranks(trace, num_stages, palette),
        }
        for name, trace in traces.items()
    ]
    longest = max((trace.end_s - trace.start_s for trace in traces.values()), default=0.0)
    return {
        "panels": panels,
        "end": max(round(longest * 1e9), 1),
        "palette": [list(colors) for colors in palette],
        "kinds": [[kind.value, kind.words, kind in COMPUTE_KINDS] for kind in KINDS],
        "legend": _legend(next(iter(traces.values())), num_stages),
        "boxes": sum(len(trace.compute()) for trace in traces.values()),
    }


def _ranks(trace: Trace, num_stages: int, palette: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    boxes: dict[tuple[int, Any], list[list[int | None]]] = {}
    # By time: the page stops looking for the box below the pointer at the first one behind it.
    for span in sorted(trace.spans, key=lambda span: (span.start_s, span.end_s)):
        # Numbers of colors and kinds, not their text: a step may have a hundred thousand boxes.
        color = palette.setdefault(_colors(span.action, num_stages), len(palette))
        boxes.setdefault((span.rank, span.lane), []).append(_box(span, trace.start_s, color))
    return [
        {
            "label": f"rank {rank}",
            "lanes": [{"label": str(lane), "boxes": boxes[rank, lane]} for lane in trace.lanes(rank)],
        }
        for rank in range(trace.num_ranks)
    ]


def _box(span: Span, origin_s: float, color: int) -> list[int | None]:
    kind, stage, microbatch, part = span.action
    # Whole nanoseconds are shorter as text than seconds, and neighbors that touch still do.
    begin, end = round((span.start_s - origin_s) * 1e9), round((span.end_s - origin_s) * 1e9)
    return [kind.code, stage, microbatch, part, begin, end - begin, color]


def _colors(action: Action, num_stages: int) -> tuple[str, str]:
    """Fill and ink; a message has the color of what made its tensor."""
    if action.kind in STAGE_KINDS:
        return _GREY
    fill, ink = box_colors(action, num_stages)
    return "#" + "".join(f"{round(part * 255):02x}" for part in fill), "#ffffff" if ink == "white" else ink


def _legend(trace: Trace, num_stages: int) -> list[list[str]]:
    """(text, fill) of the boxes of each stage; of the first, middle and last where stages are many."""
    stages = list(range(num_stages))
    if num_stages > _MOST_LEGEND_STAGES:
        stages = [0, num_stages // 2, num_stages - 1]
    kinds = sorted({span.action.kind for span in trace.compute()}, key=lambda kind: kind.code)
    actions = [Action(kind, stage, 0) for kind in kinds for stage in stages]
    return [[f"{action.stage}{action.kind.value}", _colors(action, num_stages)[0]] for action in actions]
