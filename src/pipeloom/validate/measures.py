"""How good predictions are: errors, ranks, regret. All are fractions."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from pipeloom.validate.rows import Row


@dataclass(frozen=True)
class Outcome:
    """A row with what was predicted for it.

    Attributes:
        row: as measured.
        step_time_s: predicted.
        memory_bytes: predicted, of the fullest device.
        fits: whether it was predicted to fit.
    """

    row: Row
    step_time_s: float
    memory_bytes: float
    fits: bool

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1 in step time."""
        measured = self.row.step_time_s
        return None if measured is None or not self.row.is_ok else self.step_time_s / measured - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted / measured - 1 in memory."""
        measured = self.row.memory_bytes
        return None if measured is None or not self.row.is_ok else self.memory_bytes / measured - 1


@dataclass(frozen=True)
class Measures:
    """What is reported of a list of outcomes; ``None`` where it does not apply.

    Attributes:
        rows: outcomes.
        timed_rows: those with a measured step time.
        mean_abs_error, median_abs_error, p90_abs_error: of |predicted / measured - 1| in step time.
        bias: mean of predicted / measured - 1.
        rank_correlation: Spearman's, mean over the groups of at least three layouts, weighted by their rows.
        mean_top1_regret: how much slower the layout that is predicted to be the fastest was, as measured, than the
            fastest, mean over the groups of at least two.
        oom_agreement: part of the rows for which "fits" or "out of memory" was predicted as it came.
        memory_mean_abs_error: of |predicted / measured - 1| in memory.
    """

    rows: int
    timed_rows: int
    mean_abs_error: float | None
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    rank_correlation: float | None
    mean_top1_regret: float | None
    oom_agreement: float | None
    memory_mean_abs_error: float | None

    def to_json(self) -> dict[str, float | int | None]:
        """As plain values."""
        return asdict(self)


def measure(outcomes: Sequence[Outcome]) -> Measures:
    """Every measure of ``outcomes``."""
    errors = np.array([outcome.error for outcome in outcomes if outcome.error is not None])
    memory = np.array([outcome.memory_error for outcome in outcomes if outcome.memory_error is not None])
    absolute, has_errors = np.abs(errors), errors.size > 0
    agree = [outcome.fits == outcome.row.is_ok for outcome in outcomes]
    return Measures(
        rows=len(outcomes),
        timed_rows=int(errors.size),
        mean_abs_error=float(absolute.mean()) if has_errors else None,
        median_abs_error=float(np.median(absolute)) if has_errors else None,
        p90_abs_error=float(np.quantile(absolute, 0.9)) if has_errors else None,
        bias=float(errors.mean()) if has_errors else None,
        rank_correlation=_mean_rank_correlation(outcomes),
        mean_top1_regret=_mean_regret(outcomes),
        oom_agreement=float(np.mean(agree)) if agree else None,
        memory_mean_abs_error=float(np.abs(memory).mean()) if memory.size else None,
    )


def _groups(outcomes: Sequence[Outcome], least: int) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """(measured, predicted) step times of each group with at least ``least`` layouts."""
    found: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None and outcome.row.step_time_s is not None:
            found[outcome.row.group].append((outcome.row.step_time_s, outcome.step_time_s))
    pairs = [np.array(group).T for group in found.values() if len(group) >= least]
    return [(measured, predicted) for measured, predicted in pairs]


def _mean_rank_correlation(outcomes: Sequence[Outcome]) -> float | None:
    groups = _groups(outcomes, 3)
    values = [(rank_correlation(measured, predicted), len(measured)) for measured, predicted in groups]
    known = np.array([(value, count) for value, count in values if value is not None])
    return float(np.average(known[:, 0], weights=known[:, 1])) if known.size else None


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Spearman's: Pearson's correlation of the ranks, equal values sharing the mean of theirs; ``None`` if flat."""
    one, other = _ranks(first), _ranks(second)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (values[:, None] > values[None, :]).sum(axis=1)
    equal = (values[:, None] == values[None, :]).sum(axis=1)
    return below + (equal + 1) / 2


def _mean_regret(outcomes: Sequence[Outcome]) -> float | None:
    values = [measured[np.argmin(predicted)] / measured.min() - 1 for measured, predicted in _groups(outcomes, 2)]
    return float(np.mean(values)) if values else None
