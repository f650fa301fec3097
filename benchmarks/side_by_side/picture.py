"""Steps as bars: a panel for each case, theory as a line across each bar."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from side_by_side.results import Outcome, median_s

COLORS = {"pipeloom": "#1f6fb4", "PyTorch": "#b8b8b8"}


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    """Medians, the spread from the fastest to the slowest repetition, and what each order would take ideally."""
    figure = Figure(figsize=(6.4, 2.6 * len(outcomes)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, outcome in zip(figure.subplots(len(outcomes), 1, squeeze=False).flat, outcomes, strict=True):
        measured = sorted(outcome.measured, key=median_s, reverse=True)
        labels = [f"{one.contender}, {one.contender.loops}" for one in measured]
        middle = [median_s(one) * 1e3 for one in measured]
        below = [m - min(one.seconds) * 1e3 for m, one in zip(middle, measured, strict=True)]
        above = [max(one.seconds) * 1e3 - m for m, one in zip(middle, measured, strict=True)]
        colors = [COLORS[one.contender.runtime] for one in measured]
        axes.barh(labels, middle, xerr=[below, above], color=colors, ecolor="#444444", capsize=2, height=0.7)
        for place, one in enumerate(measured):
            axes.plot([one.theory_s * 1e3] * 2, [place - 0.4, place + 0.4], color="#d9541e", lw=2)
        case = outcome.plan.case
        network = str(case.link) if case.link is not None else "loopback"
        axes.set_title(f"{case.name}; {network}", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(
        "ms for a step; whiskers: all repetitions; orange: simulated, the same order and network", fontsize=8
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
