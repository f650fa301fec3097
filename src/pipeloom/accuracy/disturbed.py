"""Measured runs that something disturbed: those that disagree with their neighbors.

The rule never uses predictions, so it cannot hide their errors. For each set and model, the logarithm of the step time
is a Gaussian process over the layout: a linear trend in the logarithms of its numbers, and a smooth rest. A run whose
time differs from what all others imply by more than 10 %, and by more than four robust standard deviations, is
disturbed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pipeloom.accuracy.rows import Row
from pipeloom.workload.run import Run

Floats = NDArray[np.float64]

LEAST_ROWS = 12
"""Sets with fewer measured runs of a model have too few neighbors."""
LEAST_RESIDUAL = 0.10
"""Residuals of the logarithm below this are no disturbance."""
LEAST_SIGMAS = 4.0
"""The same, in robust standard deviations (1.4826 times the median absolute residual)."""
LEAST_DEVIATIONS = 3.0
"""The same, in standard deviations of what the others imply: at the edge of the layouts they imply little."""
MOST_SHARE = 0.2
"""At most this share of a part is disturbed; beyond it there is no rule that others disagree with."""
_LENGTHS = (0.5, 1.0, 2.0, 4.0)
_NOISES = (1e-4, 1e-3, 1e-2)
_SMOOTH = (0.01, 0.1)
"""Variances of the smooth rest that are tried, in squared logarithms of the time."""
_TREND = 10.0
"""Variance of the coefficients of the trend."""


def disturbed(rows: Iterable[Row]) -> frozenset[int]:
    """``id`` of the rows that are disturbed runs; rows without a measured time are none."""
    parts: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.is_ok and row.step_time_s is not None:
            parts[row.set_name, row.run.shape.name].append(row)
    return frozenset(id(row) for part in parts.values() for row in _odd(part))


def _odd(rows: Sequence[Row]) -> list[Row]:
    """The disturbed rows of one set and model: the worst is removed until no other exceeds the limit."""
    left, found = list(rows), list[Row]()
    while len(left) >= LEAST_ROWS and len(found) < MOST_SHARE * len(rows):
        signed, deviations = left_out_residuals(_features(left), _times(left))
        residuals = np.abs(signed)
        sigma = 1.4826 * float(np.median(residuals))
        limits = np.maximum(max(LEAST_SIGMAS * sigma, LEAST_RESIDUAL), LEAST_DEVIATIONS * deviations)
        # A row that is alone with a size has no neighbor to disagree with.
        limits[_is_alone(left)] = np.inf
        worst = int((residuals / limits).argmax())
        if residuals[worst] <= limits[worst]:
            break
        found.append(left.pop(worst))
    return found


def _is_alone(rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Which rows are the only ones with their value of a size."""
    alone = np.zeros(len(rows), np.bool_)
    for column in _sizes(rows):
        _, which, counts = np.unique(column, return_inverse=True, return_counts=True)
        alone |= counts[which] == 1
    return alone


def _sizes(rows: Sequence[Row]) -> list[list[int]]:
    """For each whole number of a run its values."""
    found = [[getattr(row.run, item.name) for row in rows] for item in fields(Run)]
    return [values for values in found if all(type(value) is int and value > 0 for value in values)]


def _choices(rows: Sequence[Row]) -> list[list[str]]:
    """For each word and flag of a run its values, and the schedule."""
    found = [[getattr(row.run, item.name) for row in rows] for item in fields(Run)]
    words = [[str(value) for value in values] for values in found if all(isinstance(one, str | bool) for one in values)]
    return [*words, [row.schedule for row in rows]]


def _times(rows: Sequence[Row]) -> Floats:
    return np.log(np.array([row.step_time_s for row in rows], np.float64))


def _features(rows: Sequence[Row]) -> Floats:
    """[row, feature]: logarithms to base 2 of numbers, and 0 or 1 for each value of a choice; without constant ones."""
    sizes = [*_sizes(rows), [row.run.num_microbatches for row in rows]]
    columns = [[float(np.log2(value)) for value in values] for values in sizes]
    for values in _choices(rows):
        columns += [[float(each == value) for each in values] for value in sorted(set(values))]
    table = np.array(columns, np.float64).T
    return table[:, np.ptp(table, axis=0) > 0]


def left_out_residuals(features: Floats, values: Floats) -> tuple[Floats, Floats]:
    """For each row its value minus what a Gaussian process of all other rows predicts, and the deviation of that.

    Length, variance and noise are those with the largest likelihood. What the others imply follows from one inverse
    (Rasmussen and Williams, Gaussian Processes for Machine Learning, equations 5.10 to 5.12).
    """
    centered = features - features.mean(axis=0)
    distances = ((centered[:, None] - centered[None]) ** 2).sum(-1)
    trend = _TREND * (centered @ centered.T) + 10 * _TREND
    covariances = (
        trend + smooth * np.exp(-distances / (2 * length**2)) + noise * np.eye(len(values))
        for length, smooth, noise in product(_LENGTHS, _SMOOTH, _NOISES)
    )
    inverse = np.linalg.inv(max(covariances, key=lambda covariance: _log_likelihood(covariance, values)))
    weighted, precisions = inverse @ values, np.diag(inverse)
    return weighted / precisions, precisions**-0.5


def _log_likelihood(covariance: Floats, values: Floats) -> float:
    """Of values with a normal distribution around 0, without the constant."""
    # The last row of a bordered matrix's Cholesky factor is L^-1 values: one factor instead of an inverse and a
    # determinant. The corner only has to keep it positive definite.
    corner = 1.0 + values @ values / _NOISES[0]
    factor = np.linalg.cholesky(np.block([[covariance, values[:, None]], [values[None], np.array([[corner]])]]))
    return -0.5 * float(factor[-1, :-1] @ factor[-1, :-1]) - float(np.log(np.diag(factor)[:-1]).sum())
