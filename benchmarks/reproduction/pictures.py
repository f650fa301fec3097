"""The paper's figures 2 and 3 as simulated, drawn from the rows of the data files."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from pipeloom.plotting.figure import new_figure, save
from pipeloom.plotting.labels import Label, place_labels
from pipeloom.plotting.palette import SERIES
from reproduction.batch import METHODS
from reproduction.cost_time import CRITICAL, SIZES, curve
from reproduction.loops import LOOPS, NETWORKS
from reproduction.machine import MESSAGES, MODELS, Row
from reproduction.tables import NETWORK_TITLES

COLORS = dict(zip(("breadth-first", "depth-first", "1F1B", "GPipe", "no pipeline"), SERIES, strict=False))
LABELS = {
    "breadth-first": "breadth-first (pipeloom)",
    "depth-first": "depth-first (Megatron-LM)",
    "1F1B": "1F1B (Megatron-LM)",
    "GPipe": "GPipe (pipeloom)",
    "no pipeline": "no pipeline (pipeloom)",
}
MARKERS = {"breadth-first": "o", "depth-first": "s", "1F1B": "^", "GPipe": "v", "no pipeline": "x"}
SHADES = {"8": ("-", "o"), "9": ("--", "D"), "16": ("-.", "s"), "64": (":", "^")}


def draw_loops(rows: Sequence[Row], file: Path) -> None:
    """TFLOP/s over the loops."""
    figure, panels = _panels(1, len(NETWORKS), (13, 4.6))
    for axes, network in zip(panels, NETWORKS, strict=True):
        axes.set_title(NETWORK_TITLES[network], fontsize=10)
        for schedule in ("breadth-first", "depth-first"):
            for count, (style, marker) in SHADES.items():
                points = {
                    int(row["loops"]): float(row["tflop_per_s"])
                    for row in rows
                    if (row["network"], row["schedule"], row["num_microbatches"]) == (network, schedule, count)
                }
                label = f"{schedule}, M = {count}"
                if len(points) > 1:
                    axes.plot(
                        list(points), list(points.values()), style, marker=marker, ms=4, c=COLORS[schedule], label=label
                    )
        axes.set_xscale("log", base=2)
        axes.set_xticks(LOOPS, list(map(str, LOOPS)))
        axes.set_xlabel("stages for each rank, V (1: GPipe and 1F1B)")
    panels[0].set_ylabel("TFLOP/s of each GPU, recomputation counted")
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle("52 billion parameters on 64 V100, tensor and pipeline axis of 8, micro-batches of one sequence")
    save(figure, file)


def draw_batch(rows: Sequence[Row], file: Path) -> None:
    """TFLOP/s of each method's best configuration over the batch for each device."""
    figure, panels = _panels(len(MODELS), len(MESSAGES), (12, 9))
    places = [(model, messages) for model in MODELS for messages in MESSAGES]
    for axes, (model, messages) in zip(panels, places, strict=True):
        axes.set_title(f"{model}, {NETWORK_TITLES[messages]}", fontsize=10)
        for method in METHODS:
            points = _curve(rows, model, messages if method != "no pipeline" else "cut", method)
            axes.plot(*points, marker=MARKERS[method], ms=5, c=COLORS[method], label=LABELS[method])
        axes.set_xscale("log", base=2)
        ticks = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
        axes.set_xticks(ticks, ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
        axes.set_ylim(0)
    for axes in panels[-len(MESSAGES) :]:
        axes.set_xlabel("sequences in a batch for each GPU")
    for axes in panels[:: len(MESSAGES)]:
        axes.set_ylabel("TFLOP/s of each GPU, recomputation counted")
    panels[0].legend(fontsize=9, loc="lower right", frameon=False)
    figure.suptitle("The best configuration of each method on 64 V100")
    save(figure, file)


def draw_cost_time(rows: Sequence[Row], file: Path) -> None:
    """Days of training over GPU-days: as the paper extrapolates, and simulated on each cluster."""
    figure, panels = _panels(len(MODELS), 2, (12.5, 10))
    labels: dict[Axes, list[Label]] = {}
    places = [(model, is_simulated) for model in MODELS for is_simulated in (False, True)]
    for axes, (model, is_simulated) in zip(panels, places, strict=True):
        how = "simulated on each cluster" if is_simulated else "by the utilization of 64 GPUs, as the paper assumes"
        axes.set_title(f"{model}, {how}", fontsize=10)
        for method in METHODS:
            for critical, style in zip(CRITICAL, ({"lw": 1.8}, {"lw": 0.8, "ls": ":", "alpha": 0.8}), strict=True):
                points = curve(rows, model, "cut", method, critical, is_simulated=is_simulated)
                label = LABELS[method] if critical == "recalled" else None
                line = ([best.device_days for best in points], [best.days for best in points])
                axes.plot(*line, marker=MARKERS[method], ms=4, c=COLORS[method], label=label, **style)
                if method == "breadth-first" and critical == "recalled":
                    labels[axes] = [
                        Label(f"{best.devices:,}", (best.device_days, best.days), COLORS[method]) for best in points
                    ]
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(EngFormatter(sep=""))
            axis.set_minor_locator(LogLocator(subs=(2, 5)))
            axis.set_minor_formatter(EngFormatter(sep=""))
    for axes in panels[-2:]:
        axes.set_xlabel("cost (GPU-days)")
    for axes in panels[::2]:
        axes.set_ylabel("training time (days)")
    panels[0].legend(fontsize=9, loc="upper right", frameon=False)
    values = "; ".join(
        f"{name}: {', '.join(f'{value:,.0f}' for value in sizes.values())} sequences"
        for name, sizes in CRITICAL.items()
    )
    figure.suptitle(
        f"Training time over cost, {SIZES[0]} to {SIZES[-1]:,} V100, the best batch and configuration of each method, "
        f"messages cut\nB_crit {values} (dotted)",
        fontsize=11,
    )
    for axes, of_axes in labels.items():
        place_labels(figure, axes, of_axes)
    save(figure, file)


def _curve(rows: Sequence[Row], model: str, messages: str, method: str) -> tuple[list[float], list[float]]:
    chosen = [row for row in rows if (row["model"], row["messages"], row["method"]) == (model, messages, method)]
    return [float(row["batch_per_device"]) for row in chosen], [float(row["tflop_per_s"]) for row in chosen]


def _panels(num_rows: int, num_columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = new_figure(*size)
    panels = list(figure.subplots(num_rows, num_columns, sharey="row", squeeze=False).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
