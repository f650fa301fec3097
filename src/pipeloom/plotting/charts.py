"""Charts: predicted against measured step times, and training time against cost."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.plotting.figure import check_formats, headline, new_figure, plain, save
from pipeloom.plotting.labels import Label, place_labels
from pipeloom.plotting.palette import BAND, PAPER, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "os^vDPX*"
COST = "cost (dollars)"
"""Title of the axis of costs."""


def plot_accuracy(points: Mapping[str, Sequence[tuple[float, float]]], file: Path) -> None:
    """Draw predicted against measured step times, a color for each set, on logarithmic axes.

    Args:
        points: set -> (measured, predicted) in seconds.
        file: to write; its ending selects the format (``PICTURES``).

    Raises:
        UserError: the ending is not supported, or the file cannot be written.
    """
    check_formats([file])
    figure = new_figure(7, 7)
    axes = figure.add_subplot()
    for (name, pairs), marker, color in zip(points.items(), cycle(_MARKERS), cycle(SERIES), strict=False):
        style = {"linestyle": "", "markersize": 4, "alpha": 0.7, "markeredgewidth": 0.3, "markeredgecolor": PAPER}
        axes.plot(*zip(*pairs, strict=True), marker=marker, color=color, label=plain(name), **style)
    everything = [value for pairs in points.values() for pair in pairs for value in pair]
    if everything:
        # The same range on both axes: predictions on the diagonal are exact.
        ends = [min(everything) * 0.8, max(everything) * 1.25]
        axes.plot(ends, ends, color="0.5", linewidth=1, zorder=0)
        axes.set(xlim=ends, ylim=ends)
        axes.legend(frameon=False, fontsize=8)
    axes.set(xscale="log", yscale="log", aspect="equal")
    axes.set(xlabel="measured step time (s)", ylabel="predicted step time (s)")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, file)


Mark = tuple[float, float, str]
"""(dollars or device-hours, days, label)."""


def plot_tradeoff(
    curves: Mapping[str, Sequence[Mark]], front: Sequence[Mark], file: Path, *, title: str, unit: str = COST
) -> None:
    """Draw training time against cost on logarithmic axes, a curve for each method, a point for each cluster.

    Args:
        curves: method -> points, labeled with the number of devices.
        front: points of the Pareto front, drawn as a wide band below the curves.
        file: to write; its ending selects the format (``PICTURES``).
        title: the headline.
        unit: title of the axis of costs.

    Raises:
        UserError: the ending is not supported, or the file cannot be written.
    """
    check_formats([file])
    save(_tradeoff_figure(curves, front, title, unit), file)


def _tradeoff_figure(
    curves: Mapping[str, Sequence[Mark]], front: Sequence[Mark], title: str, unit: str = COST
) -> "Figure":
    from matplotlib.ticker import EngFormatter, LogLocator

    figure = new_figure(9, 5.8)
    axes = figure.add_subplot()
    band = [mark[:2] for mark in front]
    labels: list[Label] = []
    axes.plot(*zip(*band, strict=True), color=BAND, linewidth=9, alpha=0.55, zorder=0, label="Pareto front")
    # Markers in addition to colors, for prints in gray.
    for (method, marks), marker, color in zip(curves.items(), cycle(_MARKERS), cycle(SERIES), strict=False):
        if marks:
            costs, days, _ = zip(*marks, strict=True)
            axes.plot(costs, days, marker=marker, markersize=5, color=color, label=method)
            labels += [Label(label, (x, y), color) for x, y, label in marks]
    axes.set(xscale="log", yscale="log", xlabel=unit, ylabel="training time (days)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_formatter(EngFormatter(sep=""))
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.set_title(headline(title, 95), loc="left", fontsize=11)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, title="points: devices", title_fontsize=8)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    place_labels(figure, axes, labels)
    return figure
