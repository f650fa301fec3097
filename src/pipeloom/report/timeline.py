"""What a page needs to draw timelines: boxes with times in whole numbers, and colors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.analysis.summary import summarize
from pipeloom.plotting.draw import box_colors
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import COMPUTE_KINDS, KINDS, STAGE_KINDS
from pipeloom.schedule.row import NO_MICROBATCH, Row
from pipeloom.trace import Trace

_GREY = ("#8a929c", "#ffffff")
_MOST_LEGEND_STAGES = 16


@dataclass(frozen=True)
class Unit:
    """A unit of time.

    Attributes:
        name: for people.
        per_s: how many of them a second has.
        digits: behind the point, of a makespan.
    """

    name: str
    per_s: float
    digits: int


MILLISECONDS = Unit("ms", 1e3, 1)


def timeline_contents(
    traces: Mapping[str, Trace], titles: Mapping[str, str], num_stages: int, unit: Unit = MILLISECONDS
) -> dict[str, Any]:
    """Panels of ranks of lanes of boxes.

    A box is (kind, stage, micro-batch, slice, start, duration, color): kind and color as indices into the lists
    beside the panels, times in millionths of the unit from the start of the step.

    Args:
        traces: by name; they have one time axis.
        titles: of the same names.
        num_stages: decides the colors.
        unit: of all times.
    """
    palette: dict[tuple[str, str], int] = {}
    panels = [
        {
            "name": name,
            "title": titles[name],
            "makespan": f"{summarize(trace).makespan_s * unit.per_s:,.{unit.digits}f} {unit.name}",
            "ranks": _ranks(trace, num_stages, palette, unit),
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
        "legend": _legend(next(iter(traces.values())), num_stages),
        "boxes": sum(len(trace.compute()) for trace in traces.values()),
    }


def _ranks(trace: Trace, num_stages: int, palette: dict[tuple[str, str], int], unit: Unit) -> list[dict[str, Any]]:
    spans, row = trace.spans, trace.spans.row
    # Whole millionths are shorter as text than fractions, and neighbors that touch still do.
    begin, end = (
        np.rint((at_s - trace.start_s) * unit.per_s * 1e6).astype(np.int64) for at_s in (spans.start_s, spans.end_s)
    )
    color = _color_numbers(row, num_stages, palette)
    columns = np.stack([row.kind, row.stage, row.microbatch, row.slice, begin, end - begin, color], axis=1)

    def boxes(places: NDArray[np.intp]) -> list[list[int | None]]:
        # By time: the page stops looking for the box below the pointer at the first one behind it.
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


def _color_numbers(row: Row, num_stages: int, palette: dict[tuple[str, str], int]) -> NDArray[np.intp]:
    """For each action the number of its colors in the palette, to which those that it lacks are added."""
    # Numbers of colors and kinds, not their text: a step may have a hundred thousand boxes.
    which, number = np.unique(row.kind.astype(np.int64) * num_stages + row.stage, return_inverse=True)
    pairs = (divmod(one, num_stages) for one in which.tolist())
    colors = [_colors(Action(KINDS[kind], stage), num_stages) for kind, stage in pairs]
    return np.array([palette.setdefault(one, len(palette)) for one in colors], np.intp)[number.reshape(-1)]


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
    kinds = [KINDS[code] for code in np.unique(trace.compute().row.kind).tolist()]
    actions = [Action(kind, stage, 0) for kind in kinds for stage in stages]
    return [[f"{action.stage}{action.kind.value}", _colors(action, num_stages)[0]] for action in actions]
