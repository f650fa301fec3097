"""A run's metrics as curves over its steps."""

import math
from statistics import median_high
from typing import Any

from pipeloom.runs.run_reading import Run
from pipeloom.terminal.words import ms


def curves_contents(run: Run) -> list[dict[str, Any]]:
    """The curves that the run's metrics hold; empty before the first step is done."""
    if not run.metrics:
        return []
    return [
        curve
        for curve in (
            _loss(run),
            _plain(run, "lr", "Learning rate", ""),
            _plain(run, "grad_norm", "Gradient norm", "before clipping"),
            _tokens(run),
            _step_times(run),
        )
        if curve["points"]
    ]


def _loss(run: Run) -> dict[str, Any]:
    summary = run.summary or {}
    unigram, validation = summary.get("unigram_loss"), summary.get("validation_loss")
    curve = _plain(run, "loss", "Loss", "nats per token")
    if unigram is not None:
        curve["levels"].append(_level(f"unigram model {unigram:.4f}", unigram, "reference"))
    if validation is not None:
        at = [run.metrics[-1]["step"], _finite(validation)]
        curve["marks"].append({"name": f"validation {validation:.4f}", "at": at})
    return curve | {"from_zero": False}


def _tokens(run: Run) -> dict[str, Any]:
    curve = _plain(run, "tokens_per_s", "Tokens per second", "")
    median = median_tokens_per_s(run)
    if median is not None:
        curve["levels"].append(_level(f"median {median:,.0f}", median, "measured"))
    return curve


def _step_times(run: Run) -> dict[str, Any]:
    curve = _plain(run, "step_time_s", "Step time", "ms", 1e3)
    seconds = {"measured": median_step_time_s(run), "predicted": (run.summary or {}).get("predicted_step_time_s")}
    names = {"measured": "median", "predicted": "predicted"}
    curve["levels"] += [
        _level(f"{names[kind]} {ms(value)} ms", value * 1e3, kind)
        for kind, value in seconds.items()
        if value is not None
    ]
    return curve


def median_step_time_s(run: Run) -> float | None:
    """Median over the steps, as the summary counts it or, before the end, over those that are done."""
    if run.summary is not None:
        return run.summary["step_time_s"]
    # As the summary's: a time that was measured, whatever the number of steps.
    return median_high(line["step_time_s"] for line in run.metrics) if run.metrics else None


def median_tokens_per_s(run: Run) -> float | None:
    """Tokens per second at the median step time."""
    if run.summary is not None:
        return run.summary["tokens_per_s"]
    median_s = median_step_time_s(run)
    return run.config.layout.batch_size * run.config.data.seq_len / median_s if median_s else None


def ink(value: float) -> float:
    """As many digits as a picture can show."""
    # Six digits are finer than a pixel, and a page of many curves is less than half as large.
    return float(f"{value:.6g}")


def _plain(run: Run, name: str, title: str, unit: str, scale: float = 1.0) -> dict[str, Any]:
    """A curve from zero of one of the metrics; without points where a step lacks it."""
    # Only three names are certain (run_reading); a curve with holes for older lines would mislead.
    is_known = all(name in line for line in run.metrics)
    points = [[line["step"], _finite(line[name] * scale)] for line in run.metrics] if is_known else []
    return {"title": title, "unit": unit, "points": points, "levels": [], "marks": [], "from_zero": True}


def _level(name: str, value: float, style: str) -> dict[str, Any]:
    return {"name": name, "value": _finite(value), "style": style}


def _finite(value: float) -> float | None:
    """A number that JSON can hold; a loss may have become infinite."""
    return ink(value) if math.isfinite(value) else None
