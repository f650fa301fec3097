"""Where the texts of a picture are: which are cut, and which lie on each other."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text


def texts_of(figure: Figure) -> list[tuple[str, Any]]:
    """(text, its box in pixels) of everything written, as it is drawn."""
    figure.draw_without_rendering()
    ticks = [tick for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in _ticks(axis)]
    hidden = {label for tick, is_seen in ticks for label in (tick.label1, tick.label2) if not is_seen}
    texts = dict.fromkeys(text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip())
    return [(text.get_text(), text.get_window_extent()) for text in texts if text not in hidden]


def _ticks(axis: Any) -> Iterator[tuple[Any, bool]]:
    """Every tick, and whether it is within the range of its axis; others are not drawn."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
        yield tick, low - slack <= tick.get_loc() <= high + slack


def cut_texts(figure: Figure) -> list[str]:
    """Texts that reach beyond the picture."""
    edge = figure.bbox
    return [
        text
        for text, box in texts_of(figure)
        if box.x0 < edge.x0 - 0.5 or box.y0 < edge.y0 - 0.5 or box.x1 > edge.x1 + 0.5 or box.y1 > edge.y1 + 0.5
    ]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other by more than a pixel."""
    return [
        (one, other)
        for (one, a), (other, b) in combinations(texts_of(figure), 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]
