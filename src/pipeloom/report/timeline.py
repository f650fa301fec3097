"""What the page needs to draw the timelines: boxes with whole nanoseconds, and colors."""

from collections.abc import Mapping
from typing import Any

from pipeloom.analysis.summary import summarize
from pipeloom.plot.draw import box_colors
from pipeloom.schedule.action import COMPUTE_KINDS, STAGE_KINDS, Action, Kind
from pipeloom.trace import Span, Trace

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward for the input",
    Kind.BACKWARD_WEIGHT: "backward for the weights",
    Kind.RECOMPUTE: "forward again",
    Kind.SEND_F: "send of the output",
    Kind.RECV_F: "receive of the input",
    Kind.SEND_B: "send of the gradient",
    Kind.RECV_B: "receive of the gradient",
    Kind.EVICT: "eviction of activations",
    Kind.LOAD: "load of evicted activations",
    Kind.OFFLOAD: "offload of activations to the host",
    Kind.RELOAD: "reload of activations from the host",
    Kind.UNSHARD: "gather of the weights",
    Kind.RESHARD: "release of the weights",
    Kind.REDUCE_GRAD: "reduction of the gradient",
    Kind.SWAP_IN: "stage from the host",
    Kind.SWAP_OUT: "stage to the host",
    Kind.UPDATE: "optimizer step",
    Kind.SEND_TIED: "send of the tied matrix",
    Kind.RECV_TIED: "receive of the tied matrix",
    Kind.SEND_TIED_GRAD: "send of the tied matrix's gradient",
    Kind.RECV_TIED_GRAD: "receive of the tied matrix's gradient",
}
_KINDS = list(Kind)
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
        "kinds": [[kind.value, _WORDS[kind], kind in COMPUTE_KINDS] for kind in _KINDS],
        "legend": _legend(next(iter(traces.values())), num_stages),
        "boxes": sum(len(trace.compute()) for trace in traces.values()),
    }


def _ranks(trace: Trace, num_stages: int, palette: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    boxes: dict[tuple[int, Any], list[list[int | None]]] = {}
    for span in sorted(trace.spans, key=lambda span: (span.start_s, span.end_s)):
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
    begin, end = round((span.start_s - origin_s) * 1e9), round((span.end_s - origin_s) * 1e9)
    return [_KINDS.index(kind), stage, microbatch, part, begin, end - begin, color]


def _colors(action: Action, num_stages: int) -> tuple[str, str]:
    """Fill and ink; a message has the color of what made its tensor."""
    if action.kind in STAGE_KINDS:
        return _GREY
    if action.kind not in COMPUTE_KINDS:
        is_output = action.kind in (Kind.SEND_F, Kind.RECV_F, Kind.EVICT, Kind.OFFLOAD)
        action = action._replace(kind=Kind.FORWARD if is_output else Kind.BACKWARD)
    fill, ink = box_colors(action, num_stages)
    return "#" + "".join(f"{round(part * 255):02x}" for part in fill), "#ffffff" if ink == "white" else ink


def _legend(trace: Trace, num_stages: int) -> list[list[str]]:
    """(text, fill) of the boxes of each stage; of the first, middle and last where stages are many."""
    stages = list(range(num_stages))
    if num_stages > _MOST_LEGEND_STAGES:
        stages = [0, num_stages // 2, num_stages - 1]
    kinds = sorted({span.action.kind for span in trace.compute()}, key=_KINDS.index)
    actions = [Action(kind, stage, 0) for kind in kinds for stage in stages]
    return [[f"{action.stage}{action.kind.value}", _colors(action, num_stages)[0]] for action in actions]
