"""Contents of timelines for a page: boxes with times in whole numbers, and colors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.analysis.summary import summarize
from pipeloom.plotting.palette import Fill
from pipeloom.plotting.timelines import box_fill, legend_names, legend_tones, stage_places
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import COMPUTE_KINDS, KINDS
from pipeloom.schedule.row import NO_MICROBATCH, Row
from pipeloom.trace import Trace

_Palette = dict[Fill, int]


@dataclass(frozen=True)
class Unit:
    """A unit of time.

    Attributes:
        name: its symbol.
        per_s: units per second.
        digits: decimals of a makespan.
    """

    name: str
    per_s: float
    digits: int


MILLISECONDS = Unit("ms", 1e3, 1)


def timeline_contents(
    traces: Mapping[str, Trace], titles: Mapping[str, str], unit: Unit = MILLISECONDS
) -> dict[str, Any]:
    """Contents of ``Timeline`` in ``drawing.js``: panels contain ranks, ranks lanes, and lanes boxes.

    A box is (kind, stage, micro-batch, slice, start, duration, colors): kind and colors are indices into ``kinds`` and
    ``palette``, times are in millionths of the unit from the start of the step. Other lanes than those of compute, and
    what of the legend is on those alone, are hidden at first.

    Args:
        traces: name -> trace, on one time axis.
        titles: name -> title.
        unit: of all times.
    """
    palette: _Palette = {}
    shown = list(traces.values())
    panels = [
        {
            "name": name,
            "title": titles[name],
            "makespan": f"{summarize(trace).makespan_s * unit.per_s:,.{unit.digits}f} {unit.name}",
            "ranks": _ranks(trace, palette, unit),
        }
        for name, trace in traces.items()
    ]
    longest = max((trace.end_s - trace.start_s for trace in traces.values()), default=0.0)
    return {
        "panels": panels,
        "end": max(round(longest * unit.per_s * 1e6), 1),
        "unit": unit.name,
        "palette": [list(colors) for colors in palette],
        "kinds": [[kind.value, kind.words, kind in COMPUTE_KINDS] for kind in KINDS],
        "legend": _legend(shown),
        "tones": [[text, fill.fill, fill.dark_fill] for text, fill in legend_tones(shown[0])],
        "boxes": sum(len(trace.compute()) for trace in shown),
    }


def _legend(traces: Sequence[Trace]) -> list[tuple[str, str, bool]]:
    """(category, text, whether it is on compute lanes) of all kinds of actions in the traces."""
    computed = dict(legend_names([Trace(trace.compute(), trace.num_ranks) for trace in traces]))
    return [(name, text, name in computed) for name, text in legend_names(traces)]


def _ranks(trace: Trace, palette: _Palette, unit: Unit) -> list[dict[str, Any]]:
    spans, row = trace.spans, trace.spans.row
    # Whole millionths are shorter as text than fractions, and adjacent boxes still touch.
    begin, end = (
        np.rint((at_s - trace.start_s) * unit.per_s * 1e6).astype(np.int64) for at_s in (spans.start_s, spans.end_s)
    )
    color = _color_numbers(row, stage_places(trace), palette)
    columns = np.stack([row.kind, row.stage, row.microbatch, row.slice, begin, end - begin, color], axis=1)

    def boxes(places: NDArray[np.intp]) -> list[list[int | None]]:
        # By time: the page's search for the box below the pointer ends at the first later box.
        places = places[np.lexsort((spans.end_s[places], spans.start_s[places]))]
        found: list[list[int | None]] = columns[places].tolist()
        for number in np.flatnonzero(row.microbatch[places] == NO_MICROBATCH).tolist():
            found[number][2] = None
        return found

    return [
        {
            "label": f"rank {rank}",
            "lanes": [{"label": str(lane), "boxes": boxes(spans.by_lane[rank, lane])} for lane in trace.lanes(rank)],
        }
        for rank in range(trace.num_ranks)
    ]


def _color_numbers(row: Row, places: Mapping[int, tuple[int, int]], palette: _Palette) -> NDArray[np.intp]:
    """The index of each action's colors in the palette, to which missing colors are added."""
    # Indices instead of names: a step may have a hundred thousand boxes.
    num_stages = 1 + int(row.stage.max(initial=0))
    which, number = np.unique(row.kind.astype(np.int64) * num_stages + row.stage, return_inverse=True)
    pairs = (divmod(one, num_stages) for one in which.tolist())
    colors = [box_fill(Action(KINDS[kind], stage), places) for kind, stage in pairs]
    return np.array([palette.setdefault(one, len(palette)) for one in colors], np.intp)[number.reshape(-1)]
