"""Pictures of traces; only their layout is computed here."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from pipeloom.analysis.summary import summarize
from pipeloom.plotting.figure import check_formats, headline, new_figure, save, svg_text
from pipeloom.plotting.palette import PAPER, ROW, Fill, channels, fill_of
from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import COMPUTE_LANE_KINDS, KINDS, LOAD_OF, OUT_OF, Kind
from pipeloom.schedule.lanes import COMPUTE_LANE, DATA_PARALLEL_LANE, Lane
from pipeloom.schedule.row import NO_MICROBATCH, Row
from pipeloom.trace import Spans, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A page has no room for more labels, and each of them is laid out as text.
_MOST_LABELS = 1200
_MOST_SHAPES = 20_000
"""Number of boxes above which a vector picture has them as pixels."""
_WIDTH, _ROW_INCHES = 10.5, 0.42
"""Inches of a timeline and of a row: in the documentation, the text is legible without zooming."""
_MOST_INCHES, _MOST_NAMES = 34, 80
"""Largest height of all rows of a panel, and number of rank names beside them: those of 80 rows at full height."""
_MOST_TONES = 4
"""Number of stages of a rank up to which the legend lists each."""
_SIZES = (7.0, 6.0, 5.5, 5.0)
"""Font sizes of labels in compute boxes, in points."""
_ROW_HEIGHT = 0.86
_STRIP_HEIGHT = 0.2
_STRIPS_HEIGHT = 0.4
"""Height of all strips of a row together."""


def excerpt(trace: Trace, most_ranks: int = 16, most_actions: int = 3000) -> tuple[Trace, str]:
    """The beginning of a trace: its first ranks, up to the time when the first ``most_actions`` compute actions begin.

    Args:
        trace: any trace.
        most_ranks: limit of ranks.
        most_actions: limit of compute actions.

    Returns:
        The excerpt, and a note for a headline; empty if the trace is complete.
    """
    num_ranks = min(trace.num_ranks, most_ranks)
    spans = trace.spans.take(trace.spans.rank < num_ranks)
    notes = [f"ranks 0 to {num_ranks - 1} of {trace.num_ranks}"] if num_ranks < trace.num_ranks else []
    starts = np.sort(spans.start_s[spans.on(COMPUTE_LANE.name)])
    if len(starts) > most_actions:
        end_s = float(starts[most_actions])
        # Cut by time, so that all ranks of the picture end at the same moment.
        spans = spans.take(spans.start_s < end_s)
        whole_s = trace.end_s - trace.start_s
        notes.append(f"the first {end_s - trace.start_s:.3g} s of {whole_s:.3g} s")
    return (Trace(spans, num_ranks), ", ".join(notes)) if notes else (trace, "")


def plot_timeline(
    trace: Trace, files: Sequence[Path], *, title: str, unit: str = "s", scale: float = 1.0, is_whole: bool = True
) -> None:
    """Draw a timeline: a row for each rank, a box for each compute action, labeled with its micro-batch.

    The color shows the kind, the tone the stage among the stages of its rank (``palette.py``). Strips below a rank's
    compute show collectives, and moves to a partner or the host and back.

    Args:
        trace: to draw.
        files: to write; their endings select the formats (``PICTURES``).
        title: the headline; the bubble of the step follows it.
        unit: unit of the time axis.
        scale: units per second.
        is_whole: whether to draw the whole trace; else its ``excerpt``, with a note in the headline.

    Raises:
        UserError: an ending is not supported, or a file cannot be written.
    """
    plot_timelines({title: trace}, files, unit=unit, scale=scale, is_whole=is_whole)


def plot_timelines(
    traces: Mapping[str, Trace], files: Sequence[Path], *, unit: str = "s", scale: float = 1.0, is_whole: bool = True
) -> None:
    """Draw several traces below each other on one time axis, each with its headline; see ``plot_timeline``."""
    check_formats(files)
    figure = _timelines_figure(traces, unit, scale, is_whole=is_whole)
    for file in files:
        save(figure, file)


def timelines_svg(traces: Mapping[str, Trace], *, unit: str, scale: float, is_whole: bool = True) -> str:
    """The picture of ``plot_timelines`` as SVG text."""
    return svg_text(_timelines_figure(traces, unit, scale, is_whole=is_whole))


class _Panel(NamedTuple):
    """A timeline of a picture.

    Attributes:
        title: its headline.
        trace: what it shows.
        compute: spans of compute.
        strips: name of a strip -> its spans.
    """

    title: str
    trace: Trace
    compute: Spans
    strips: Mapping[str, Spans]

    @classmethod
    def of(cls, title: str, trace: Trace, *, is_whole: bool) -> "_Panel":
        """The panel of a trace or of its excerpt; the bubble in the headline is that of the whole trace."""
        bubble = f"bubble {summarize(trace).bubble_fraction:.1%}" if len(trace.compute()) else ""
        part, note = (trace, "") if is_whole else excerpt(trace)
        return cls("; ".join(filter(None, (title, bubble, note))), part, part.compute(), _strips(part))

    @property
    def shown(self) -> list[Spans]:
        """Spans that have boxes."""
        return [self.compute, *self.strips.values()]

    @property
    def has_labels(self) -> bool:
        """Whether its boxes have labels where there is room."""
        return len(self.compute) <= _MOST_LABELS

    def has_room_for_letters(self, points_per_s: float) -> bool:
        """Whether all compute boxes have room for the letter of their kind beside the number."""
        width = (self.compute.end_s - self.compute.start_s) * points_per_s
        texts = _texts(self.compute, with_letters=True) if self.has_labels else {}
        return all(_points(text, _SIZES[0]) <= width[place] for place, text in texts.items())


def _timelines_figure(traces: Mapping[str, Trace], unit: str, scale: float, *, is_whole: bool = True) -> "Figure":
    panels = [_Panel.of(title, trace, is_whole=is_whole) for title, trace in traces.items()]
    rows = [0.75 + min(_ROW_INCHES * panel.trace.num_ranks, _MOST_INCHES) for panel in panels]
    figure = new_figure(_WIDTH, 0.9 + sum(rows))
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    longest = max((panel.trace.end_s - panel.trace.start_s) * scale for panel in panels)
    points = 72 * (_WIDTH - 1) / max(longest, 1e-12)
    # Either all boxes have letters or none: panels are compared.
    is_lettered = all(panel.has_room_for_letters(scale * points) for panel in panels)
    for axes, panel in zip(every, panels, strict=True):
        _draw_boxes(axes, panel, scale, points, is_lettered=is_lettered)
        _set_axes(axes, panel)
        # matplotlib warns of an axis of length 0.
        axes.set_xlim(0, max(longest, 1e-12))
    every[-1].set_xlabel(headline(f"time ({unit}){_numbers(every, panels)}", 110), fontsize=9)
    _add_legend(figure, panels)
    return figure


def _set_axes(axes: "Axes", panel: _Panel) -> None:
    num_ranks = panel.trace.num_ranks
    named = range(0, num_ranks, -(-num_ranks // _MOST_NAMES))
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.set_title(headline(panel.title, 110), loc="left", fontsize=10)
    # Inverted: rank 0 is at the top, as in papers.
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor(ROW)


def _draw_boxes(axes: "Axes", panel: _Panel, scale: float, points: float, *, is_lettered: bool) -> None:
    spans, num_strips = panel.compute, len(panel.strips)
    strip_height = min(_STRIP_HEIGHT, _STRIPS_HEIGHT / max(num_strips, 1))
    height = _ROW_HEIGHT - strip_height * num_strips
    bars = _Bars(axes, panel.trace.start_s, scale, points, stage_places(panel.trace), with_labels=panel.has_labels)
    bars.draw(spans, 0.0, height, _SIZES, is_lettered=is_lettered)
    for number, beside in enumerate(panel.strips.values()):
        bars.draw(beside, height + number * strip_height, strip_height, (5,))


def stage_places(trace: Trace) -> dict[int, tuple[int, int]]:
    """Stage -> (index among the stages of its rank, number of these), which determine its tone."""
    spans = trace.compute()
    by_rank: dict[int, list[int]] = {}
    # (rank, stage) as one number: np.unique takes twenty times as long for pairs.
    num_stages = 1 + int(spans.row.stage.max(initial=0))
    found = np.unique(spans.rank.astype(np.int64) * num_stages + spans.row.stage)
    for rank, stage in (divmod(one, num_stages) for one in found.tolist()):
        by_rank.setdefault(rank, []).append(stage)
    return {stage: (place, len(stages)) for stages in by_rank.values() for place, stage in enumerate(stages)}


def box_fill(action: Action, places: Mapping[int, tuple[int, int]]) -> Fill:
    """The colors of an action's box; only compute has tones, since other boxes are few and small."""
    place = places.get(action.stage, (0, 1)) if action.kind in COMPUTE_LANE_KINDS else (0, 1)
    return fill_of(action.kind.color, *place)


class _Bars(NamedTuple):
    """Settings for drawing the boxes of a panel.

    Attributes:
        axes: to draw on.
        start_s: beginning of the time axis.
        scale: units per second.
        points: points of 1/72 inch per unit.
        places: ``stage_places``, which determine the tones.
        with_labels: whether boxes have labels if they have room.
    """

    axes: "Axes"
    start_s: float
    scale: float
    points: float
    places: Mapping[int, tuple[int, int]]
    with_labels: bool

    def draw(
        self, spans: Spans, below: float, tall: float, sizes: Sequence[float], *, is_lettered: bool = False
    ) -> None:
        """Draw a box for each span, all in one collection: separate patches would take minutes.

        Args:
            spans: to draw.
            below: distance of the boxes from the top of their row.
            tall: their height.
            sizes: font sizes in points, of which one with room for many labels is used.
            is_lettered: whether labels begin with the letter of the kind.
        """
        from matplotlib.collections import PolyCollection

        left, right = ((at_s - self.start_s) * self.scale for at_s in (spans.start_s, spans.end_s))
        top = spans.rank.astype(np.float64) - _ROW_HEIGHT / 2 + below
        corners = [(left, top), (right, top), (right, top + tall), (left, top + tall)]
        is_edged = ((right - left) * self.points >= 2) & self.with_labels
        boxes = PolyCollection(
            cast("Sequence[NDArray[np.float64]]", np.stack([np.stack(corner, 1) for corner in corners], 1)),
            facecolors=self._colors(spans.row),
            edgecolors=PAPER,
            linewidths=np.where(is_edged, 0.5, 0.0),
        )
        # A vector file with very many shapes is larger than its pixels and slow to open.
        boxes.set_rasterized(len(spans) > _MOST_SHAPES)
        # Without autolim, since the limits are set and computing them would use every corner of every box.
        self.axes.add_collection(boxes, autolim=False)
        if self.with_labels:
            texts = _texts(spans, with_letters=is_lettered)
            self._label(spans, texts, (left, right - left, top + tall / 2), sizes)

    def _colors(self, row: Row) -> NDArray[np.float64]:
        """The fill color of each action's box."""
        # Computed for each kind and stage, not for each box.
        which, number = np.unique(np.stack([row.kind, row.stage], axis=1), axis=0, return_inverse=True)
        fills = [channels(box_fill(Action(KINDS[kind], stage), self.places).fill) for kind, stage in which.tolist()]
        return np.array(fills, np.float64).reshape(-1, 3)[number.reshape(-1)]

    def _label(
        self,
        spans: Spans,
        texts: Mapping[int, str],
        boxes: tuple[Seconds, Seconds, Seconds],
        sizes: Sequence[float],
    ) -> None:
        """Write the labels; of the boxes the left edges, widths and middles are given."""
        left, width, middle = boxes
        actions = {place: spans[place].action for place in texts}

        def fits(size: float) -> list[bool]:
            return [_points(text, size) <= width[place] * self.points for place, text in texts.items()]

        # A smaller size for a few more labels would make all of them harder to read.
        size = max(sizes, key=lambda one: sum(fits(one)) / max(len(texts), 1) + 0.02 * one)
        labeled = self._labeled_kinds(actions, texts, width, size)
        for (place, text), has_room in zip(texts.items(), fits(size), strict=True):
            if has_room and actions[place].kind in labeled:
                self.axes.annotate(
                    text,
                    (left[place] + width[place] / 2, middle[place]),
                    color=box_fill(actions[place], self.places).ink,
                    fontsize=size,
                    ha="center",
                    va="center",
                )

    def _labeled_kinds(
        self, actions: Mapping[int, Action], texts: Mapping[int, str], width: Seconds, size: float
    ) -> set[Kind]:
        """Kinds whose longest label fits their median box: numbers that end at 9 would look like an error."""
        by_kind: dict[Kind, list[int]] = {}
        for place, action in actions.items():
            by_kind.setdefault(action.kind, []).append(place)
        return {
            kind
            for kind, places in by_kind.items()
            if max(_points(texts[place], size) for place in places) <= np.median(width[places]) * self.points
        }


def _texts(spans: Spans, *, with_letters: bool) -> dict[int, str]:
    """Number of a span -> its label, of spans with a micro-batch."""
    texts = dict[int, str]()
    for place in np.flatnonzero(spans.row.microbatch != NO_MICROBATCH).tolist():
        action = spans[place].action
        number = f"{action.microbatch}.{action.slice}" if action.slice else f"{action.microbatch}"
        texts[place] = f"{action.kind.value}{number}" if with_letters else number
    return texts


def _points(text: str, size: float) -> float:
    """Width of a label of a font size with its margins, in points, with the widths of DejaVu Sans."""
    return sum(0.32 if letter == "." else 0.64 for letter in text) * size + 1.2


def _numbers(every: Iterable["Axes"], panels: Iterable[_Panel]) -> str:
    """Explanation of the numbers in boxes; empty if there are none."""
    labels = [len(axes.texts) for axes in every]
    if not any(labels):
        return ""
    drawn = [[spans.row for spans in panel.shown] for panel in panels]
    boxes = [sum(int((row.microbatch != NO_MICROBATCH).sum()) for row in rows) for rows in drawn]
    is_partial = any(found < needed for found, needed in zip(labels, boxes, strict=True))
    slices = ".slice" if any(row.slice.any() for rows in drawn for row in rows) else ""
    return f"; number in a box: micro-batch{slices}{' (none in narrow boxes)' * is_partial}"


_STRIPS = ("collectives", "out", "back")
_STRIP_OF = {
    DATA_PARALLEL_LANE: "collectives",
    **{Lane(kind.lane): "out" for kind in LOAD_OF},
    **{Lane(kind.lane): "back" for kind in OUT_OF},
}


def _strips(trace: Trace) -> dict[str, Spans]:
    """Name of a strip -> its spans, for strips with spans that take time."""
    spans = trace.spans
    strip_of = np.array([_STRIP_OF.get(lane, "") for lane in spans.lanes] or [""])[spans.lane]
    found = {name: (strip_of == name) & (spans.end_s > spans.start_s) for name in _STRIPS}
    return {name: spans.take(is_in) for name, is_in in found.items() if is_in.any()}


_KEYS = {
    "forward": "F: forward",
    "backward": "B: backward",
    "input-gradient": "I: input gradient",
    "weight-gradient": "W: weight gradient",
    "recompute": "R: recomputed forward",
    "update": "optimizer step",
    "message": "message",
    "gather": "weight gather",
    "reduce": "gradient reduction",
    "move": "move out, then back",
}


def legend_names(traces: Sequence[Trace]) -> list[tuple[str, str]]:
    """(category, text) of the legend of all kinds of actions in the traces."""
    kinds = {KINDS[kind] for trace in traces for kind in np.unique(trace.spans.row.kind).tolist()}
    drawn = {kind.color for kind in kinds}
    return [(name, text) for name, text in _KEYS.items() if name in drawn]


def legend_tones(trace: Trace) -> list[tuple[str, Fill]]:
    """(stages, colors) of the legend of forwards, if ranks have several stages; of many, the first and the last."""
    stages: dict[tuple[int, int], list[int]] = {}
    for stage, place in stage_places(trace).items():
        stages.setdefault(place, []).append(stage)
    if len(stages) <= 1:
        return []
    if len(stages) <= _MOST_TONES:
        names = {place: f"stage{_span_of(sorted(stages[place]))}" for place in sorted(stages)}
    else:
        names = {min(stages): "first stage of a rank", max(stages): "last"}
    return [(name, fill_of("forward", *place)) for place, name in names.items()]


def _add_legend(figure: "Figure", panels: Sequence[_Panel]) -> None:
    """Add the legend below the panels: categories, and tones of stages."""
    from matplotlib.patches import Patch

    # Messages have no boxes, nor do actions on other lanes that take no time.
    shown = [Trace(spans, 0) for panel in panels for spans in panel.shown]
    # The panel with the most tones: beside a schedule of one stage on each rank, the other one has them all.
    tones = max((legend_tones(panel.trace) for panel in panels), key=len)
    # Kinds have the plain hue, which is that of no tone: beside a schedule with tones another may have none.
    entries = [(text, fill_of(name).fill) for name, text in legend_names(shown)]
    entries += [(text, fill.fill) for text, fill in tones]
    # The tones are those of forwards.
    entries += [("lighter: later stages", "none")] if tones else []
    handles = [Patch(facecolor=fill, label=text) for text, fill in entries]
    if handles:
        # As many columns as fit: matplotlib's layout reserves the height of a legend, but does not limit its width.
        widest = max(len(text) for text, _ in entries) * 5 + 26
        figure.legend(
            handles=handles,
            ncols=min(len(handles), max(1, int(_WIDTH * 72 / widest))),
            fontsize=8,
            loc="outside lower center",
            frameon=False,
            handlelength=1,
            handleheight=1,
            columnspacing=1.2,
        )


def _span_of(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f" {numbers[0]}"
    return f"s {numbers[0]} to {numbers[-1]}"
