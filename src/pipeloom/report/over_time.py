"""Charts over time, by rank: number of stage inputs, and memory by the cost model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeloom.analysis.memory import MemoryCurve, inputs_over_time, memory_over_time
from pipeloom.errors import UserError
from pipeloom.predict.memory import held_bytes
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.report.curves import ink, inks
from pipeloom.report.timeline import MILLISECONDS, Unit
from pipeloom.runs.run_reading import Run
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import HeldBytes
from pipeloom.terminal.words import short, unit_bytes
from pipeloom.trace import Trace

Steps = Sequence[tuple[float, float]]
"""(seconds from the start of the step, value from then on)."""


def over_time_contents(run: Run, schedule: Schedule, traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    """Charts with a step function for each rank and trace: (milliseconds, value from then on)."""
    inputs = {name: [curve.points for curve in inputs_over_time(schedule, trace)] for name, trace in traces.items()}
    charts = [chart("Stage inputs held", STAGE_INPUTS, inputs, traces, peak="peak {:g}".format)]
    held = held_bytes_of(run, schedule)
    if held is not None:
        memory = {name: memory_over_time(schedule, trace, held) for name, trace in traces.items()}
        peaks = run.metrics[-1].get("memory_bytes", ()) if run.metrics else ()
        charts.append(memory_chart(memory, traces, peaks, on_device=run.config.training.device == "cuda"))
    return charts


def memory_chart(
    curves: Mapping[str, Sequence[MemoryCurve]],
    traces: Mapping[str, Trace],
    peaks: Sequence[float] = (),
    *,
    on_device: bool = False,
) -> dict[str, Any]:
    """A chart of the memory of each rank by the cost model.

    Args:
        curves: name of a trace -> bytes of each rank over time.
        traces: by the same names.
        peaks: of each rank, as measured until the last step; empty if nothing was.
        on_device: whether these are of a CUDA device, not of a process.
    """
    most = max(size for ranks in curves.values() for curve in ranks for _, size in curve.points)
    size_of_unit, unit = unit_bytes(most)
    memory = {
        name: [[(time_s, size / size_of_unit) for time_s, size in curve.points] for curve in ranks]
        for name, ranks in curves.items()
    }
    found = chart(f"Memory, {unit}", _MEMORY, memory, traces, peak=lambda most: f"peak {short(most)} {unit}")
    found["labels"] = [f"cost model, at {name} times" for name in traces]
    if len(peaks) == len(found["ranks"]):
        what = "allocated on the device" if on_device else "resident memory of the process, PyTorch itself included"
        found["note"] += f" Measured: the peak since the start of the run, {what}."
        for rank, peak in zip(found["ranks"], peaks, strict=True):
            rank["peak"] += f" by the cost model, {short(peak / size_of_unit)} {unit} measured"
    return found


STAGE_INPUTS = (
    "Number of (stage, micro-batch) pairs whose activations a rank keeps for backwards, including those that its "
    "partner moved to it, without those that it moved away or that will be recomputed."
)
_MEMORY = (
    "Weights, gradients, optimizer state, activations, logits and receive buffers by the cost model, at the times of "
    "each trace; without memory of the process itself and of its allocator."
)


def held_bytes_of(run: Run, schedule: Schedule) -> HeldBytes | None:
    """Sizes of what the ranks hold; ``None`` if the cost model does not support the run."""
    try:
        # Those of training, not of machine.cluster: what is kept depends on the kernels of the run's device.
        sizes = sizes_in_training(run.config)
    except UserError:  # such as a dtype without closed forms
        return None
    # Without the reserve, a constant that would hide changes.
    return held_bytes(sizes.run, replace(sizes.software, reserve_bytes=0.0), schedule)


def chart(
    title: str,
    note: str,
    steps: Mapping[str, Sequence[Steps]],
    traces: Mapping[str, Trace],
    *,
    peak: Callable[[float], str],
    unit: Unit = MILLISECONDS,
) -> dict[str, Any]:
    """A chart of step functions.

    Args:
        title: of the chart.
        note: its explanation.
        steps: name of a trace -> step function of each rank.
        traces: by the same names.
        peak: formats the maximum of a rank.
        unit: of the time axis.
    """
    longest = max(trace.end_s - trace.start_s for trace in traces.values())
    ranks: list[dict[str, Any]] = []
    for rank, by_trace in enumerate(zip(*steps.values(), strict=True)):
        # As arrays: the curves of a large step have thousands of points.
        curves = [inks(np.array(curve, np.float64) * (unit.per_s, 1.0)).tolist() for curve in by_trace]
        most = max(held for curve in by_trace for _, held in curve)
        ranks.append({"label": f"rank {rank}", "curves": curves, "peak": peak(most)})
    most = max(held for rank in ranks for curve in rank["curves"] for _, held in curve)
    return {
        "title": title,
        "note": note,
        "traces": list(traces),
        "labels": list(traces),
        "ranks": ranks,
        "end": ink(longest * unit.per_s),
        "unit": unit.name,
        "most": most,
    }
