"""How good predictions are: errors, ranks, regret. All are fractions."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from pipeloom.accuracy.rows import Group, Row


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
        groups: of at least two measured layouts that compete with each other (``Row.group``).
        rank_correlation: Spearman's, mean over the groups of at least three layouts, weighted by their rows.
        mean_top1_regret: how much slower the layout that is predicted to be the fastest was, as measured, than the
            fastest, mean over the groups.
        oom_first: groups in which one that ran out of memory was predicted to fit and to be faster still.
        oom_agreement: part of the rows for which "fits" or "out of memory" was predicted as it came.
        memory_mean_abs_error: of |predicted / measured - 1| in memory.
    """

    rows: int
    timed_rows: int
    mean_abs_error: float | None
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    groups: int
    rank_correlation: float | None
    mean_top1_regret: float | None
    oom_first: int
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
    ranked = rankings(outcomes)
    # Weighted by their rows: the order of three layouts is easily right or wrong by chance.
    correlations = np.array([(r.rank_correlation, r.layouts) for r in ranked if r.rank_correlation is not None])
    agree = [outcome.fits == outcome.row.is_ok for outcome in outcomes]
    return Measures(
        rows=len(outcomes),
        timed_rows=int(errors.size),
        mean_abs_error=float(absolute.mean()) if has_errors else None,
        median_abs_error=float(np.median(absolute)) if has_errors else None,
        p90_abs_error=float(np.quantile(absolute, 0.9)) if has_errors else None,
        bias=float(errors.mean()) if has_errors else None,
        groups=len(ranked),
        rank_correlation=float(np.average(correlations[:, 0], weights=correlations[:, 1]))
        if correlations.size
        else None,
        mean_top1_regret=float(np.mean([ranking.regret for ranking in ranked])) if ranked else None,
        oom_first=sum(ranking.is_first_oom for ranking in ranked),
        oom_agreement=float(np.mean(agree)) if agree else None,
        memory_mean_abs_error=float(np.abs(memory).mean()) if memory.size else None,
    )


@dataclass(frozen=True)
class Ranking:
    """How the layouts of a group were ranked.

    Attributes:
        group: what they have in common.
        layouts: those with a measured step time, at least two.
        first, fastest: ranked first, and measured fastest among them.
        regret: how much slower ``first`` was, as measured, than ``fastest``.
        rank_correlation: Spearman's, for at least three layouts; ``None`` if flat.
        is_first_oom: whether one that ran out of memory was predicted to fit and to be faster than ``first``.
    """

    group: Group
    layouts: int
    first: Row
    fastest: Row
    regret: float
    rank_correlation: float | None
    is_first_oom: bool

    def to_json(self) -> dict[str, str | float | bool | None]:
        """The group's values, and how it was ranked, without the layouts."""
        return {
            **self.group._asdict(),
            "layouts": self.layouts,
            "regret": self.regret,
            "rank_correlation": self.rank_correlation,
            "is_first_oom": self.is_first_oom,
        }


def rankings(outcomes: Sequence[Outcome]) -> list[Ranking]:
    """The ranking of every group with at least two measured layouts, in the order of the table."""
    found: dict[Group, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.row.group].append(outcome)
    ranked = (_ranking(group, members) for group, members in found.items())
    return [ranking for ranking in ranked if ranking is not None]


def _ranking(group: Group, outcomes: Sequence[Outcome]) -> Ranking | None:
    timed = [outcome for outcome in outcomes if outcome.error is not None]
    if len(timed) < 2:
        return None
    measured = [outcome.row.step_time_s or 0.0 for outcome in timed]
    # Layouts that were measured to run count even if they were predicted
    # not to fit: the order of times is what is judged.
    predicted = [outcome.step_time_s for outcome in timed]
    first = predicted.index(min(predicted))
    return Ranking(
        group=group,
        layouts=len(timed),
        first=timed[first].row,
        fastest=timed[measured.index(min(measured))].row,
        regret=top1_regret(measured, predicted),
        # Of two layouts the correlation is 1 or -1, which says little.
        rank_correlation=rank_correlation(np.array(measured), np.array(predicted)) if len(timed) > 2 else None,
        is_first_oom=any(o.fits and not o.row.is_ok and o.step_time_s < predicted[first] for o in outcomes),
    )


def top1_regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """How much slower what is predicted to be the fastest was, as measured, than the fastest; 0 if it was the fastest.

    Args:
        measured: seconds of at least one thing.
        predicted: seconds of the same ones.
    """
    first = min(range(len(predicted)), key=predicted.__getitem__)
    return measured[first] / min(measured) - 1


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Spearman's: Pearson's correlation of the ranks, equal values sharing the mean of theirs; ``None`` if flat."""
    one, other = _ranks(first), _ranks(second)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (values[:, None] > values[None, :]).sum(axis=1)
    # Equal values share the mean of their ranks.
    equal = (values[:, None] == values[None, :]).sum(axis=1)
    return below + (equal + 1) / 2
