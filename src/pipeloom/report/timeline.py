"""What a page needs to draw timelines: boxes with whole nanoseconds, colors, the style sheet and the script."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pipeloom.analysis.summary import summarize
from pipeloom.plotting.draw import box_fill, legend_names, legend_tones, stage_places
from pipeloom.plotting.palette import style_sheet
from pipeloom.schedule.kinds import COMPUTE_KINDS, KINDS
from pipeloom.trace import Span, Trace

_Places = Mapping[int, tuple[int, int]]
_Palette = dict[tuple[str, ...], int]


def timeline_style() -> str:
    """The style sheet of pages with timelines: the palette, both color modes, and the timelines themselves."""
    return style_sheet() + _asset("drawing.css")


def timeline_script() -> str:
    """The script of pages with timelines: ``new Timeline(timeline_contents(...))``, ``modeSwitch()`` and helpers."""
    return _asset("drawing.js")


def timeline_contents(
    traces: Mapping[str, Trace], titles: Mapping[str, str], unit: str = "ms", scale: float = 1e3
) -> dict[str, Any]:
    """Panels of ranks of lanes of boxes, one below the other, for ``Timeline`` of the script.

    A box is (kind, stage, micro-batch, slice, start, duration, colors): kind and colors as indices into the lists
    beside the panels, times in nanoseconds from the start of the step.

    Args:
        traces: name -> what to draw.
        titles: the headline of each name.
        unit: of times on the page; empty for costs without a unit.
        scale: units for each second.
    """
    palette: _Palette = {}
    panels = []
    for name, trace in traces.items():
        makespan = f"{summarize(trace).makespan_s * scale:,.1f} {unit}".rstrip()
        ranks = _ranks(trace, stage_places(trace), palette)
        panels.append({"name": name, "title": titles[name], "makespan": makespan, "ranks": ranks})
    longest = max((trace.end_s - trace.start_s for trace in traces.values()), default=0.0)
    shown = list(traces.values())
    return {
        "panels": panels,
        "end": max(round(longest * 1e9), 1),
        "unit": unit,
        "scale": scale / 1e9,
        "palette": [list(colors) for colors in palette],
        "kinds": [[kind.value, kind.words, kind in COMPUTE_KINDS] for kind in KINDS],
        "legend": [list(names) for names in legend_names(shown)],
        "tones": [[text, fill.fill, fill.dark_fill] for text, fill in legend_tones(shown[0])] if shown else [],
        "boxes": sum(len(trace.compute()) for trace in shown),
    }


def _ranks(trace: Trace, places: _Places, palette: _Palette) -> list[dict[str, Any]]:
    boxes: dict[tuple[int, Any], list[list[int | None]]] = {}
    # By time: the page stops searching for the box below the pointer at the first one behind it.
    for span in sorted(trace.spans, key=lambda span: (span.start_s, span.end_s)):
        # Numbers of colors and kinds, not their text: a step may have a hundred thousand boxes.
        colors = palette.setdefault(box_fill(span.action, places), len(palette))
        boxes.setdefault((span.rank, span.lane), []).append(_box(span, trace.start_s, colors))
    return [
        {
            "label": f"rank {rank}",
            "lanes": [{"label": str(lane), "boxes": boxes[rank, lane]} for lane in trace.lanes(rank)],
        }
        for rank in range(trace.num_ranks)
    ]


def _box(span: Span, origin_s: float, colors: int) -> list[int | None]:
    kind, stage, microbatch, part = span.action
    # Whole nanoseconds are shorter as text than seconds, and neighbors that touch still do.
    begin, end = round((span.start_s - origin_s) * 1e9), round((span.end_s - origin_s) * 1e9)
    return [kind.code, stage, microbatch, part, begin, end - begin, colors]


def _asset(name: str) -> str:
    return (files(__package__ or "pipeloom.report") / name).read_text(encoding="utf-8")
