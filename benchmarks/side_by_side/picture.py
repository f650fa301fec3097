"""Steps as bars: a panel for each case, theory as a line across each bar.

    python -m side_by_side.picture TABLE.csv PICTURE.svg

draws what was measured before again, from the table that ``results.write`` leaves.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pipeloom.plotting.figure import new_figure, save
from pipeloom.plotting.palette import INK, NEUTRAL, SERIES

COLORS = {"pipeloom": SERIES[0], "PyTorch": NEUTRAL}
_THEORY, _SPREAD = SERIES[1], INK


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Medians, the spread from the fastest to the slowest repetition, and what each order would take ideally.

    Args:
        rows: of ``results.rows``, or of the table that they were written to.
        file: where to.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    save(figure_of(rows), file)


def figure_of(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The same, not yet written."""
    cases = list(dict.fromkeys((row["case"], row["network"]) for row in rows))
    bars = [len([row for row in rows if (row["case"], row["network"]) == case]) for case in cases]
    figure = new_figure(7.5, 0.24 * sum(bars) + 0.6 * len(cases) + 0.8)
    for axes, case in zip(
        figure.subplots(len(cases), 1, squeeze=False, height_ratios=[count + 1.2 for count in bars]).flat,
        cases,
        strict=True,
    ):
        _draw_case(axes, [row for row in rows if (row["case"], row["network"]) == case])
        axes.set_title("; ".join(case), fontsize=9)
    axes.set_xlabel("ms for a step", fontsize=8)
    keys = [
        *(Patch(color=color, label=f"{runtime}, median") for runtime, color in COLORS.items()),
        Line2D([], [], color=_SPREAD, marker="|", label="all repetitions"),
        Line2D([], [], color=_THEORY, lw=2, label="simulated, the same order and network"),
    ]
    # outside the panels: the layout leaves room for a legend, but not for the width of an axis label
    figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _draw_case(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: float(row["median_ms"]), reverse=True)
    labels = [f"{row['runtime']} {row['order']}, {row['loops']}" for row in rows]
    middle, least, most, theory = (
        [float(row[name]) for row in rows] for name in ("median_ms", "min_ms", "max_ms", "theory_ms")
    )
    spread = [[m - a for m, a in zip(middle, least, strict=True)], [b - m for m, b in zip(middle, most, strict=True)]]
    colors = [COLORS[row["runtime"]] for row in rows]
    axes.barh(labels, middle, xerr=spread, color=colors, ecolor=_SPREAD, capsize=2, height=0.7)
    for place, value in enumerate(theory):
        axes.plot([value] * 2, [place - 0.4, place + 0.4], color=_THEORY, lw=2)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="utf-8", newline="") as table:
        draw(list(csv.DictReader(table)), Path(sys.argv[2]))
