"""Placement of the labels of points, so that none is cut off and none covers another label, a point or a line."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

_Points = NDArray[np.float64]
_SIZE = 7
_POINT = 4.0
"""Half the side of the square that a point occupies, in points of 1/72 inch."""
_DISTANCES = (6.0, 12.0, 20.0, 30.0, 42.0)
_DIRECTIONS = 16
_FAR = 15.0
"""Distance above which a line connects a label with its point, in points."""


class Label(NamedTuple):
    """A label.

    Attributes:
        text: of the label.
        at: its point, in the units of the axes.
        color: a color of matplotlib.
    """

    text: str
    at: tuple[float, float]
    color: Any


def place_labels(figure: "Figure", axes: "Axes", labels: Sequence[Label]) -> None:
    """Add labels near their points, after everything else is drawn; a label without room is omitted.

    Each gets the place inside the axes with the lowest cost that overlaps no point and no earlier label. The cost grows
    with the distance from the point and with the number of lines crossed.
    """
    from matplotlib.transforms import Bbox

    # A constrained layout is computed by drawing; before that, positions in pixels are wrong.
    figure.draw_without_rendering()
    per_point = figure.dpi / 72
    room = axes.get_window_extent()
    points = axes.transData.transform([label.at for label in labels]) if labels else np.empty((0, 2))
    half = _POINT * per_point
    taken = [Bbox([point - half, point + half]) for point in points]
    lines = [axes.transData.transform(np.column_stack(line.get_data())) for line in axes.get_lines()]
    for label, point in zip(labels, points, strict=True):
        text = axes.annotate(label.text, label.at, (0, 0), textcoords="offset points", fontsize=_SIZE)
        text.set(color=label.color, ha="center", va="center")
        size = text.get_window_extent()
        places = _places(point, size.width, size.height, per_point)
        free = [
            # A crossed line costs as much as three steps of distance.
            (cost + sum(3 * _is_crossed(*ends, box) for line in lines for ends in pairwise(line)), offset, box)
            for cost, offset, box in places
            if room.x0 <= box.x0 and room.y0 <= box.y0 and box.x1 <= room.x1 and box.y1 <= room.y1
            if not any(box.overlaps(other) for other in taken)
        ]
        if not free:
            text.remove()
            continue
        _, offset, box = min(free, key=lambda place: place[0])
        taken.append(box)
        text.set_position(offset)
        text.set_in_layout(False)  # its place is final
        if max(box.x0 - point[0], point[0] - box.x1, box.y0 - point[1], point[1] - box.y1) > _FAR * per_point:
            leader = {"arrowstyle": "-", "color": label.color, "linewidth": 0.5, "shrinkA": 4, "shrinkB": 3}
            axes.annotate("", label.at, offset, textcoords="offset points", arrowprops=leader)


def _places(
    point: _Points, width: float, height: float, per_point: float
) -> Iterator[tuple[float, tuple[float, float], "Bbox"]]:
    """(cost, offset of the center in points, box in pixels), nearest first; right and above cost a little less."""
    from matplotlib.transforms import Bbox

    half = np.array([width, height]) / 2
    for distance in _DISTANCES:
        for number in range(_DIRECTIONS):
            angle = 2 * np.pi * (number + 1) / _DIRECTIONS
            across, up = np.cos(angle), np.sin(angle)
            middle = np.array([across, up]) * (distance * per_point + half)
            corner, far = point + middle - half, point + middle + half
            cost = distance / _DISTANCES[0] - 0.2 * across - 0.1 * up
            yield cost, (middle[0] / per_point, middle[1] / per_point), Bbox([corner, far])


def _is_crossed(begin: _Points, end: _Points, box: "Bbox") -> bool:
    """Whether a segment passes through a box."""
    first, last = 0.0, 1.0
    for at, step, low, high in zip(begin, end - begin, box.min, box.max, strict=True):
        if step == 0:
            if not low < at < high:
                return False
            continue
        near, far = sorted(((low - at) / step, (high - at) / step))
        first, last = max(first, near), min(last, far)
    return first < last
