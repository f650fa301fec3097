"""Pictures of traces. Nothing is computed here but where the ink goes."""

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import UserError
from pipeloom.plotting.labels import Label, place_labels
from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import COMPUTE_LANE_KINDS, KINDS, LOAD_OF, OUT_OF, Kind, Shade
from pipeloom.schedule.lanes import COMPUTE_LANE, DATA_PARALLEL_LANE, Lane
from pipeloom.schedule.row import NO_MICROBATCH, Row
from pipeloom.terminal.guard import printable
from pipeloom.trace import Spans, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
# More numbers have no room on a page, and each one is a text to lay out.
_MOST_LABELS = 1200
_MOST_SHAPES = 20_000
"""Boxes that a picture of shapes has one by one; more of them are pixels there, too."""
_MOST_INCHES, _MOST_NAMES = 44, 80
"""Height of all rows of a panel, and ranks that are named beside them: what 80 rows at full height take."""
_ROW_HEIGHT = 0.86
_STRIP_HEIGHT = 0.2
_STRIPS_HEIGHT = 0.4
"""Of all strips of a row together."""


def check_formats(files: Sequence[Path]) -> None:
    """Refuse files that no picture can be drawn to.

    Raises:
        UserError: an ending is not known.
    """
    for file in files:
        if file.suffix.lower().lstrip(".") not in FORMATS:
            known = ", ".join(f".{name}" for name in FORMATS)
            raise UserError(f"cannot draw to {file}: expected a file ending in one of {known}")


def excerpt(trace: Trace, most_ranks: int = 16, most_actions: int = 3000) -> tuple[Trace, str]:
    """The first ranks of a trace and, if they do more, their first compute actions and what begins before these do.

    Args:
        trace: any trace.
        most_ranks: ranks to keep.
        most_actions: compute actions to keep.

    Returns:
        The part, and what was left out, to go behind a headline; empty if nothing was.
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
    return (Trace(spans, num_ranks), f"; {', '.join(notes)}") if notes else (trace, "")


def plot_timeline(trace: Trace, files: Sequence[Path], *, title: str, unit: str = "s", scale: float = 1.0) -> None:
    """Draw a step the way the papers do: a row for each rank, color by stage, the micro-batch in each box.

    Forwards are light, backwards dark. What else takes time has strips below each rank's compute: collectives, with
    gathers of weights light and reductions of gradients dark; what leaves the rank for a partner or the host; what
    comes back.

    Args:
        trace: what to draw.
        files: where to; the endings name the formats, ``FORMATS``.
        title: the headline.
        unit: name of the time axis's unit.
        scale: units for each second.

    Raises:
        UserError: an ending is not known, or a file cannot be written.
    """
    plot_timelines({title: trace}, files, unit=unit, scale=scale)


def plot_timelines(traces: Mapping[str, Trace], files: Sequence[Path], *, unit: str = "s", scale: float = 1.0) -> None:
    """Draw several traces below each other on one time axis, each under its headline; see ``plot_timeline``."""
    check_formats(files)
    figure = _timelines_figure(traces, unit, scale)
    for file in files:
        _save(figure, file)


def timelines_svg(traces: Mapping[str, Trace], *, unit: str, scale: float) -> str:
    """What ``plot_timelines`` draws, as the text of an SVG picture."""
    text = StringIO()
    _timelines_figure(traces, unit, scale).savefig(text, format="svg")
    return text.getvalue()


def _timelines_figure(traces: Mapping[str, Trace], unit: str, scale: float) -> "Figure":
    rows = [1.4 + min(0.55 * trace.num_ranks, _MOST_INCHES) for trace in traces.values()]
    figure = _new_figure(15, sum(rows))
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    longest = max((trace.end_s - trace.start_s) * scale for trace in traces.values())
    for axes, (title, trace) in zip(panels, traces.items(), strict=True):
        _draw_boxes(axes, trace, scale, longest)
        _set_axes(axes, trace, title)
        # matplotlib warns of an axis without length, which a trace without time would have.
        axes.set_xlim(0, max(longest, 1e-12))
    _add_legend(figure, next(iter(traces.values())))
    key = _key(traces.values())
    strips = dict.fromkeys(name for trace in traces.values() for name in _strips(trace))
    if strips:
        key += f"; strip{'s' if len(strips) > 1 else ''} below: {'; '.join(_STRIPS[name] for name in strips)}"
    panels[-1].set_xlabel(_headline(f"time ({unit}); {key}", 190))
    return figure


def _set_axes(axes: "Axes", trace: Trace, title: str) -> None:
    named = range(0, trace.num_ranks, -(-trace.num_ranks // _MOST_NAMES))
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.set_title(_headline(title, 150), loc="left", fontsize=11)
    # From below to above: rank 0 is at the top, as the papers draw it.
    axes.set_ylim(trace.num_ranks - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor("#f4f4f4")


def _draw_boxes(axes: "Axes", trace: Trace, scale: float, longest: float) -> None:
    spans, strips = trace.compute(), _strips(trace)
    strip_height = min(_STRIP_HEIGHT, _STRIPS_HEIGHT / max(len(strips), 1))
    height = _ROW_HEIGHT - strip_height * len(strips)
    num_stages = 1 + int(spans.row.stage.max(initial=0))
    bars = _Bars(axes, trace.start_s, scale, longest / 170, num_stages, with_labels=len(spans) <= _MOST_LABELS)
    bars.draw(spans, 0.0, height)
    for number, beside in enumerate(strips.values()):
        bars.draw(beside, height + number * strip_height, strip_height)


class _Bars(NamedTuple):
    """How the boxes of a panel are drawn.

    Attributes:
        axes: where to.
        start_s: where the time axis begins.
        scale: units for each second.
        shortest: units of a box that has room for a label.
        num_stages: decides the colors.
        with_labels: whether boxes with room for a label have one.
    """

    axes: "Axes"
    start_s: float
    scale: float
    shortest: float
    num_stages: int
    with_labels: bool

    def draw(self, spans: Spans, below: float, tall: float) -> None:
        """Draw a box for each span, all as one: a figure of so many patches takes minutes.

        Args:
            spans: what to draw.
            below: where boxes begin in their row, from its top.
            tall: their height.
        """
        from matplotlib.collections import PolyCollection

        left, right = ((at_s - self.start_s) * self.scale for at_s in (spans.start_s, spans.end_s))
        top = spans.rank.astype(np.float64) - _ROW_HEIGHT / 2 + below
        corners = [(left, top), (right, top), (right, top + tall), (left, top + tall)]
        is_edged = (right - left >= self.shortest / 2) & self.with_labels
        boxes = PolyCollection(
            cast("Sequence[NDArray[np.float64]]", np.stack([np.stack(corner, 1) for corner in corners], 1)),
            facecolors=self._colors(spans.row),
            edgecolors="white",
            linewidths=np.where(is_edged, 0.4, 0.0),
        )
        # A vector file with a shape for each of many boxes is larger than its pixels and slow to open.
        boxes.set_rasterized(len(spans) > _MOST_SHAPES)
        # The limits are set, and computing them takes every corner of every box.
        self.axes.add_collection(boxes, autolim=False)
        if self.with_labels:
            self._label(spans, left, right - left, top + tall / 2)

    def _colors(self, row: Row) -> NDArray[np.float64]:
        """For each action the fill of its box."""
        # A color for each kind and stage, not for each box.
        which, number = np.unique(np.stack([row.kind, row.stage], axis=1), axis=0, return_inverse=True)
        fills = [box_colors(Action(KINDS[kind], stage), self.num_stages)[0] for kind, stage in which.tolist()]
        return np.array(fills, np.float64).reshape(-1, 3)[number.reshape(-1)]

    def _label(self, spans: Spans, left: Seconds, width: Seconds, middle: Seconds) -> None:
        is_wide = width >= self.shortest * np.where(spans.row.slice > 0, 2, 1)
        for place in np.flatnonzero(is_wide & (spans.row.microbatch != NO_MICROBATCH)).tolist():
            span = spans[place]
            self.axes.annotate(
                str(span.action.microbatch) + (f".{span.action.slice}" if span.action.slice else ""),
                (left[place] + width[place] / 2, middle[place]),
                color=box_colors(span.action, self.num_stages)[1],
                fontsize=7 if span.lane == COMPUTE_LANE else 5,
                ha="center",
                va="center",
            )


def _key(traces: Iterable[Trace]) -> str:
    """What the numbers in boxes and the shades of compute are."""
    rows = [trace.spans.row for trace in traces]
    number = "micro-batch.slice" if any(row.slice.any() for row in rows) else "micro-batch"
    others = [kind for kind in KINDS if kind in COMPUTE_LANE_KINDS - {Kind.FORWARD} and _has(rows, kind)]
    shades = (f"{kind.shade.name.lower().replace('_', ' ')}: {kind.words}" for kind in (Kind.FORWARD, *others))
    return f"number: {number}, color: stage, {', '.join(shades)}"


def _has(rows: Iterable[Row], kind: Kind) -> bool:
    return any(bool(row.is_kind(kind).any()) for row in rows)


_STRIPS = {
    "collectives": "weights gathered (light), gradients reduced (dark)",
    "out": "to the partner or the host (light)",
    "back": "and from there (dark)",
}
_STRIP_OF = {
    DATA_PARALLEL_LANE: "collectives",
    **{Lane(kind.lane): "out" for kind in LOAD_OF},
    **{Lane(kind.lane): "back" for kind in OUT_OF},
}


def _strips(trace: Trace) -> dict[str, Spans]:
    """What takes time beside compute, by the strip that shows it."""
    spans = trace.spans
    strip_of = np.array([_STRIP_OF.get(lane, "") for lane in spans.lanes] or [""])[spans.lane]
    found = {name: (strip_of == name) & (spans.end_s > spans.start_s) for name in _STRIPS}
    return {name: spans.take(is_in) for name, is_in in found.items() if is_in.any()}


def box_colors(action: Action, num_stages: int) -> tuple[tuple[float, float, float], str]:
    """Fill and ink of a box, of compute or beside it: the hue shows the stage, the shade the kind."""
    import colorsys

    shade = action.kind.shade
    if shade is Shade.GRAY:
        return (0.62, 0.62, 0.62), "#222222"
    # 0.85 of the circle of hues, so that the last stage does not come back to the first one's color.
    hue = 0.58 + 0.85 * action.stage / max(num_stages, 1)
    if shade is Shade.LIGHT:
        return colorsys.hls_to_rgb(hue % 1, shade / 100, 0.62), "#222222"
    return colorsys.hls_to_rgb(hue % 1, shade / 100, 0.50), "white"


def _add_legend(figure: "Figure", trace: Trace) -> None:
    from matplotlib.patches import Patch

    stages = np.unique(trace.compute().row.stage).tolist()
    shown = stages if len(stages) <= 16 else [stages[0], stages[len(stages) // 2], stages[-1]]
    shades = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    kinds = [kind for kind in shades if _has([trace.spans.row], kind)]
    handles = [
        Patch(color=box_colors(Action(kind, stage, 0), 1 + stages[-1])[0], label=f"{stage}{kind.value}")
        for stage in shown
        for kind in kinds
    ]
    figure.legend(
        handles=handles,
        ncols=len(shown),
        fontsize=7,
        loc="outside upper right",
        frameon=False,
        handlelength=1,
        handleheight=1,
        columnspacing=0.8,
    )


def plot_accuracy(points: Mapping[str, Sequence[tuple[float, float]]], file: Path) -> None:
    """Draw predicted against measured step times, a color for each set, on logarithmic axes.

    Args:
        points: set -> (measured, predicted) in seconds.
        file: where to; the ending names the format, ``FORMATS``.

    Raises:
        UserError: the ending is not known, or the file cannot be written.
    """
    check_formats([file])
    figure = _new_figure(7, 7)
    axes = figure.add_subplot()
    for name, pairs in points.items():
        axes.plot(*zip(*pairs, strict=True), "o", markersize=3, alpha=0.6, label=_plain(name))
    everything = [value for pairs in points.values() for pair in pairs for value in pair]
    if everything:
        # One range for both axes, so that the diagonal is where predictions are exact.
        ends = [min(everything) * 0.8, max(everything) * 1.25]
        axes.plot(ends, ends, color="0.5", linewidth=1, zorder=0)
        axes.set(xlim=ends, ylim=ends)
        axes.legend(frameon=False, fontsize=8)
    axes.set(xscale="log", yscale="log", aspect="equal")
    axes.set(xlabel="measured step time (s)", ylabel="predicted step time (s)")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, file)


Mark = tuple[float, float, str]
"""(dollars, days, label)."""
_MARKERS = "os^vxDP*"


def plot_tradeoff(curves: Mapping[str, Sequence[Mark]], front: Sequence[Mark], file: Path, *, title: str) -> None:
    """Draw training time against cost on logarithmic axes, a curve for each method, a point for each cluster.

    Args:
        curves: method -> points; their labels show the number of devices.
        front: points of the Pareto front, drawn as a wide band below the curves.
        file: where to; the ending names the format, ``FORMATS``.
        title: the headline.

    Raises:
        UserError: the ending is not known, or the file cannot be written.
    """
    check_formats([file])
    _save(_tradeoff_figure(curves, front, title), file)


def _tradeoff_figure(curves: Mapping[str, Sequence[Mark]], front: Sequence[Mark], title: str) -> "Figure":
    from matplotlib.ticker import EngFormatter, LogLocator

    figure = _new_figure(10, 6.5)
    axes = figure.add_subplot()
    band = [mark[:2] for mark in front]
    labels: list[Label] = []
    axes.plot(*zip(*band, strict=True), color="#f2c14e", linewidth=9, alpha=0.55, zorder=0, label="Pareto front")
    # Markers as well as colors, for prints in gray and for the color-blind.
    for (method, marks), marker in zip(curves.items(), cycle(_MARKERS), strict=False):
        if marks:
            dollars, days, _ = zip(*marks, strict=True)
            (line,) = axes.plot(dollars, days, marker=marker, markersize=5, label=method)
            labels += [Label(label, (x, y), line.get_color()) for x, y, label in marks]
    axes.set(xscale="log", yscale="log", xlabel="cost (dollars)", ylabel="training time (days)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_formatter(EngFormatter(sep=""))
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.set_title(_headline(title, 95), loc="left", fontsize=11)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, title="points: devices", title_fontsize=8)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    place_labels(figure, axes, labels)
    return figure


def _new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    # Not pyplot: it keeps every figure in a global list, and may look for a display.
    FigureCanvasAgg(figure)
    return figure


def _headline(text: str, width: int) -> str:
    """A text in lines of so many letters: no layout leaves room for a long one."""
    return "\n".join(wrap(_plain(text), width))


def _plain(text: str) -> str:
    """A text that may hold foreign names, as it is: a pair of $ would begin mathematics."""
    return printable(text).replace("$", r"\$")


def _save(figure: "Figure", file: Path) -> None:
    try:
        figure.savefig(file, dpi=150)
        figure.set_layout_engine("none")  # it has placed everything; a second file needs it no more
    except OSError as error:
        raise UserError(f"cannot write the picture {file}: {error.strerror}") from error
