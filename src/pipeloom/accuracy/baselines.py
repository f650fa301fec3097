"""What simple models make of the same rows: a constant utilization, and a regression without physics."""

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from pipeloom.accuracy.rows import Row
from pipeloom.cost.flops import shape_model_flops

Floats = NDArray[np.float64]
Baseline = Callable[[Row], float]
"""Row -> predicted seconds."""


def constant_mfu(rows: Sequence[Row], peak_flops_per_s: Callable[[Row], float]) -> Baseline:
    """Every step reaches the same model FLOPs utilization: the median of ``rows``.

    Args:
        rows: measured, at least one.
        peak_flops_per_s: peak of a row's device.
    """

    def full_s(row: Row) -> float:
        run = row.run
        return run.global_batch * shape_model_flops(run.shape, run.seq) / run.num_devices / peak_flops_per_s(row)

    slower = float(np.median([(row.step_time_s or 0.0) / full_s(row) for row in rows]))
    return lambda row: slower * full_s(row)


def log_linear(rows: Sequence[Row]) -> Baseline:
    """The logarithm of the time is linear in the logarithms of a row's sizes and in its choices.

    A ridge keeps the slope of what does not vary in ``rows`` at 0.
    """
    names = sorted({name for row in rows for name in _features(row)})

    def vector(row: Row) -> Floats:
        found = _features(row)
        return np.array([found.get(name, 0.0) for name in names])

    features = np.array([vector(row) for row in rows])
    values = np.log([row.step_time_s or 1.0 for row in rows])
    means, center = features.mean(axis=0), float(values.mean())
    centered = features - means
    slopes = np.linalg.solve(centered.T @ centered + 1e-2 * np.eye(len(means)), centered.T @ (values - center))
    return lambda row: float(np.exp(center + (vector(row) - means) @ slopes))


def _features(row: Row) -> dict[str, float]:
    """Logarithms of the whole numbers of the model and the layout; 1 for each choice."""
    values = {item.name: getattr(part, item.name) for part in (row.run.shape, row.run) for item in fields(part)}
    found = {name: float(np.log(value)) for name, value in values.items() if type(value) is int and value > 0}
    own = {key: value for key, value in values.items() if key != "name" and isinstance(value, str | bool)}
    return found | {f"{name} {value}": 1.0 for name, value in own.items()}


def mean_error(rows: Sequence[Row], baseline: Baseline) -> float:
    """Mean of |predicted / measured - 1| of measured rows."""
    return float(np.mean([abs(baseline(row) / (row.step_time_s or 1.0) - 1) for row in rows]))
