"""Curves of a run's metrics over its steps."""

import math
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.runs.run_reading import Run
from pipeloom.terminal.words import ms


def curves_contents(run: Run) -> list[dict[str, Any]]:
    """The curves of the metrics; empty before the end of the first step."""
    if not run.metrics:
        return []
    summary = run.summary or {}
    loss = _plain(run, "loss", "Loss", "nats per token") | {"from_zero": False}
    if (unigram := summary.get("unigram_loss")) is not None:
        loss["levels"].append(_level(f"unigram model {unigram:.4f}", unigram, "reference"))
    points = [[line["step"], _finite(line["validation_loss"])] for line in run.metrics if "validation_loss" in line]
    loss["marks"] += [{"name": "" if number else "validation", "at": at} for number, at in enumerate(points)]
    if (validation := summary.get("validation_loss")) is not None:
        at = [run.metrics[-1]["step"], _finite(validation)]
        loss["marks"].append({"name": f"validation {validation:.4f}", "at": at})
    speed = _plain(run, "tokens_per_s", "Tokens per second", "")
    if (median := median_tokens_per_s(run)) is not None:
        speed["levels"].append(_level(f"median {median:,.0f}", median, "measured"))
    times = _plain(run, "step_time_s", "Step time", "ms", 1e3)
    for name, kind, seconds in (
        ("median", "measured", median_step_time_s(run)),
        ("predicted", "predicted", summary.get("predicted_step_time_s")),
    ):
        if seconds is not None:
            times["levels"].append(_level(f"{name} {ms(seconds)} ms", seconds * 1e3, kind))
    bubble = _plain(run, "bubble_fraction", "Bubble", "% of the step in which ranks do not compute", 100.0)
    rate = _plain(run, "lr", "Learning rate", "")
    norm = _plain(run, "grad_norm", "Gradient norm", "before clipping")
    return [curve for curve in (loss, rate, norm, speed, times, bubble) if curve["points"]]


def median_step_time_s(run: Run) -> float | None:
    """Median step time: the summary's or, before the end, that of the steps so far."""
    if run.summary is not None:
        return run.summary["step_time_s"]
    # median_high, as in the summary: one of the measured times.
    times_s = [line["step_time_s"] for line in run.metrics if line["step"] > (run.begun or 0)]
    return median_high(times_s) if times_s else None


def median_tokens_per_s(run: Run) -> float | None:
    """Tokens per second at the median step time."""
    if run.summary is not None:
        return run.summary["tokens_per_s"]
    median_s = median_step_time_s(run)
    return run.config.layout.update_size * run.config.data.seq_len / median_s if median_s else None


def ink(value: float) -> float:
    """A number rounded to six significant digits."""
    # They are finer than a pixel, and a page with many curves is less than half as large.
    return float(f"{value:.6g}")


def inks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``ink`` of each element."""
    with np.errstate(divide="ignore"):
        places = 5 - np.floor(np.log10(np.abs(values)))
    places = np.where(np.isfinite(places), places, 0.0)
    # Powers of ten of at least 1 are exact, so that results print with six digits.
    up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
    return np.rint(values * up / down) * down / up


def _plain(run: Run, name: str, title: str, unit: str, scale: float = 1.0) -> dict[str, Any]:
    """A curve of one of the metrics, from zero; without points if any step lacks it."""
    # Only three metrics are in every line (run_reading), and a curve with gaps would mislead.
    is_known = all(name in line for line in run.metrics)
    points = [[line["step"], _finite(line[name], scale)] for line in run.metrics] if is_known else []
    return {"title": title, "unit": unit, "points": points, "levels": [], "marks": [], "from_zero": True}


def _level(name: str, value: float, style: str) -> dict[str, Any]:
    return {"name": name, "value": _finite(value), "style": style}


def _finite(value: float | None, scale: float = 1.0) -> float | None:
    """A number for JSON; ``None`` if it is not finite, as a loss may be (``RunFolder.add_metrics``)."""
    return None if value is None or not math.isfinite(value) else ink(value * scale)
