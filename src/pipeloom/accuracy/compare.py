"""Predictions for a table of measurements, and for measured stage times, and their errors as fractions."""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.accuracy.disturbed import disturbed
from pipeloom.accuracy.programs import known_cluster, program_of
from pipeloom.accuracy.rows import Group, Row, read_table
from pipeloom.accuracy.schedules import FAMILY_OF, predict
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import ConfigError
from pipeloom.families import Choice
from pipeloom.recipe import Recipe, build
from pipeloom.schedule.compiled import expect_much
from pipeloom.simulation import simulate
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Outcome:
    """A measured row and its prediction.

    Attributes:
        row: the measurement.
        step_time_s: predicted step time.
        memory_bytes: predicted memory of the device that was measured: the fullest one, or one of the first stage
            (``Software.reports_first``).
        filled: predicted share of the memory of the fullest device; above 1 it does not fit.
        is_observed: whether the prediction contains an observation about rows of this model, which states nothing about
            others (``Software.extra_drain_slots``).
    """

    row: Row
    step_time_s: float
    memory_bytes: float
    filled: float
    is_observed: bool = False

    @property
    def fits(self) -> bool:
        """Whether the prediction fits the devices."""
        return self.filled <= 1

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1 of the step time; ``None`` if it was not measured."""
        measured = self.row.step_time_s
        return None if measured is None or not self.row.is_ok else self.step_time_s / measured - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted / measured - 1 of the memory; ``None`` if it was not measured."""
        measured = self.row.memory_bytes
        return None if measured is None or not self.row.is_ok else self.memory_bytes / measured - 1


@dataclass(frozen=True)
class Measures:
    """Statistics of a list of outcomes; ``None`` where they are not defined.

    Attributes:
        rows: number of outcomes.
        timed_rows: number of outcomes with a measured step time.
        mean_abs_error, median_abs_error, p90_abs_error: of |predicted / measured - 1| of step times.
        bias: mean of predicted / measured - 1.
        groups: number of groups with at least two measured layouts (``Row.group``).
        rank_correlation: mean of Spearman's over the groups of at least three layouts, weighted by their rows.
        mean_top1_regret: mean over the groups of the measured step time of the layout predicted fastest / that of the
            fastest - 1.
        mean_top3_regret: the same of the fastest measured of the three that are predicted fastest.
        oom_first: number of groups in which a layout that ran out of memory was predicted to fit and to be faster than
            all measured ones.
        oom_agreement: share of the rows for which "fits" or "out of memory" was predicted correctly.
        memory_mean_abs_error: mean of |predicted / measured - 1| of memory.
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
    mean_top3_regret: float | None
    oom_first: int
    oom_agreement: float | None
    memory_mean_abs_error: float | None

    def to_json(self) -> dict[str, float | int | None]:
        """All statistics by name."""
        return asdict(self)


def measure(outcomes: Sequence[Outcome]) -> Measures:
    """All statistics of ``outcomes``."""
    errors = np.array([outcome.error for outcome in outcomes if outcome.error is not None])
    memory = np.array([outcome.memory_error for outcome in outcomes if outcome.memory_error is not None])
    absolute, has_errors = np.abs(errors), errors.size > 0
    ranked = rankings(outcomes)
    # Weighted by rows: the order of three layouts is often right or wrong by chance.
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
        mean_top3_regret=float(np.mean([ranking.regret_of_three for ranking in ranked])) if ranked else None,
        oom_first=sum(ranking.is_first_oom for ranking in ranked),
        oom_agreement=float(np.mean(agree)) if agree else None,
        memory_mean_abs_error=float(np.abs(memory).mean()) if memory.size else None,
    )


@dataclass(frozen=True)
class Ranking:
    """The predicted ranking of a group's layouts.

    Attributes:
        group: what the layouts have in common.
        layouts: number of different layouts with a measured step time, at least two.
        first, fastest: the one predicted fastest, and the one measured fastest.
        regret: measured step time of ``first`` / that of ``fastest`` - 1.
        regret_of_three: the same of the fastest measured of the three that are predicted fastest.
        rank_correlation: Spearman's; ``None`` for less than three layouts, or if all values are equal.
        is_first_oom: whether a layout that ran out of memory was predicted to fit and to be faster than ``first``.
    """

    group: Group
    layouts: int
    first: Row
    fastest: Row
    regret: float
    regret_of_three: float
    rank_correlation: float | None
    is_first_oom: bool

    def to_json(self) -> dict[str, str | float | bool | None]:
        """Group and statistics, without the layouts."""
        return {
            **self.group._asdict(),
            "layouts": self.layouts,
            "regret": self.regret,
            "regret_of_three": self.regret_of_three,
            "rank_correlation": self.rank_correlation,
            "is_first_oom": self.is_first_oom,
        }


def rankings(outcomes: Sequence[Outcome]) -> list[Ranking]:
    """The rankings of the groups with at least two measured layouts, in the order of the table."""
    found: dict[Group, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.row.group].append(outcome)
    ranked = (_ranking(group, members) for group, members in found.items())
    return [ranking for ranking in ranked if ranking is not None]


def _ranking(group: Group, outcomes: Sequence[Outcome]) -> Ranking | None:
    timed = _layouts(outcome for outcome in outcomes if outcome.error is not None)
    if len(timed) < 2:
        return None
    measured = [outcome.row.step_time_s or 0.0 for outcome in timed]
    # Layouts that ran count even if they were predicted not to fit: this compares the order of step times.
    predicted = [outcome.step_time_s for outcome in timed]
    first = predicted.index(min(predicted))
    return Ranking(
        group=group,
        layouts=len(timed),
        first=timed[first].row,
        fastest=timed[measured.index(min(measured))].row,
        regret=top_regret(measured, predicted),
        regret_of_three=top_regret(measured, predicted, 3),
        # The correlation of two layouts is 1 or -1, which means little.
        rank_correlation=rank_correlation(np.array(measured), np.array(predicted)) if len(timed) > 2 else None,
        is_first_oom=any(o.fits and not o.row.is_ok and o.step_time_s < predicted[first] for o in outcomes),
    )


def _layouts(timed: Iterable[Outcome]) -> list[Outcome]:
    """Each layout once, with the mean of its measured step times: rows that differ in notes only are repeats of it."""
    repeats: dict[tuple[Run, str], list[Outcome]] = defaultdict(list)
    for outcome in timed:
        repeats[outcome.row.run, outcome.row.schedule].append(outcome)
    return [
        same[0]
        if len(same) == 1
        else replace(same[0], row=replace(same[0].row, step_time_s=fmean(one.row.step_time_s or 0.0 for one in same)))
        for same in repeats.values()
    ]


def top_regret(measured: Sequence[float], predicted: Sequence[float], most: int = 1) -> float:
    """Measured seconds of the fastest of those predicted fastest / those of the fastest of all - 1.

    Args:
        measured: seconds, at least one.
        predicted: seconds, in the same order.
        most: number of those predicted fastest.
    """
    first = sorted(range(len(predicted)), key=predicted.__getitem__)[:most]
    return min(measured[each] for each in first) / min(measured) - 1


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Spearman's: Pearson's correlation of the ranks; equal values get their mean rank. ``None`` if all are equal."""
    one, other = _ranks(first), _ranks(second)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (values[:, None] > values[None, :]).sum(axis=1)
    # Equal values get the mean of their ranks.
    equal = (values[:, None] == values[None, :]).sum(axis=1)
    return below + (equal + 1) / 2


@dataclass(frozen=True)
class Comparison:
    """The predictions for a table.

    Attributes:
        outcomes: in the order of the table, without skipped rows.
        skipped: reason -> number of rows that could not be predicted.
    """

    outcomes: tuple[Outcome, ...]
    skipped: dict[str, int]

    @property
    def by_set(self) -> dict[str, Measures]:
        """``SET`` and ``SET/MODEL`` -> measures."""
        parts: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in self.outcomes:
            row = outcome.row
            parts[row.set_name].append(outcome)
            parts[f"{row.set_name}/{row.run.shape.name}"].append(outcome)
        return {name: measure(part) for name, part in sorted(parts.items())}

    @cached_property
    def undisturbed(self) -> "Comparison":
        """Without disturbed runs (``pipeloom.accuracy.disturbed``)."""
        return self.without(disturbed(outcome.row for outcome in self.outcomes))

    def without(self, odd: Set[int]) -> "Comparison":
        """Without the rows whose ``id`` are in ``odd``."""
        return Comparison(tuple(outcome for outcome in self.outcomes if id(outcome.row) not in odd), self.skipped)

    @property
    def num_disturbed(self) -> int:
        """Number of disturbed runs."""
        return len(self.outcomes) - len(self.undisturbed.outcomes)

    def to_json(self) -> dict[str, Any]:
        """``summary``: statistics of all rows; ``sets``: by set; ``groups``: rankings; ``skipped``.

        ``undisturbed`` is the summary without disturbed runs, and ``undisturbed_sets`` has the sets that lose rows.
        ``observed`` is the summary of the rows whose prediction contains an observation, ``physics`` that of others.
        """
        whole, quiet = self.by_set, self.undisturbed.by_set
        observed, others = ([one for one in self.outcomes if one.is_observed is kind] for kind in (True, False))
        return {
            "summary": measure(self.outcomes).to_json(),
            "undisturbed": measure(self.undisturbed.outcomes).to_json(),
            "undisturbed_sets": {
                name: part.to_json() for name, part in quiet.items() if "/" not in name and part.rows < whole[name].rows
            },
            "observed": measure(observed).to_json(),
            "physics": measure(others).to_json(),
            "sets": {name: part.to_json() for name, part in whole.items()},
            "groups": [ranking.to_json() for ranking in rankings(self.outcomes)],
            "skipped": self.skipped,
        }


_MANY = 500
"""Rows whose schedules have enough actions that compiled kernels pay from the first one."""


def compare(rows: Iterable[Row], cluster: Cluster | None = None, software: Software | None = None) -> Comparison:
    """Predict every row.

    Args:
        rows: of a table.
        cluster: of all rows; ``None`` to choose by each row's device.
        software: of all rows; ``None`` to choose by each row's set.
    """
    outcomes: list[Outcome] = []
    skipped: dict[str, int] = defaultdict(int)
    rows = list(rows)
    if len(rows) >= _MANY:
        expect_much()
    for row in rows:
        program = software or program_of(row)[1]
        machine = cluster or known_cluster(row, program)
        reason = _reason_to_skip(row, machine)
        if machine is not None and reason is None:
            try:
                step = predict(Placed(row.run, machine, program), row.schedule)
            except ConfigError:  # the family does not support the sizes, such as 1f1b with loops
                reason = f"no family makes the schedule '{row.schedule}' in this size"
            else:
                answer = step.prediction
                memory = answer.memory_by_rank[0] if program.reports_first else answer.memory
                is_observed = step.drain_s > 0
                outcomes.append(Outcome(row, answer.step_time_s, memory.total_bytes, answer.filled, is_observed))
        if reason is not None:
            skipped[reason] += 1
    return Comparison(tuple(outcomes), dict(skipped))


def _reason_to_skip(row: Row, cluster: Cluster | None) -> str | None:
    run = row.run
    if run.num_stages > 1 and row.schedule not in FAMILY_OF:
        return f"no family makes the schedule '{row.schedule}'"
    if (reason := run.impossible) is not None:
        return reason
    if cluster is None:
        return f"no cluster of the catalog has the device '{row.device}': give --cluster"
    for precision in (row.run.precision, row.run.peak_precision):
        if precision not in cluster.device.peak_flops_per_s:
            return f"the device '{cluster.device.name}' has no rate for {precision}"
    return None


EXCHANGE_S = 0.6e-3
"""Seconds per micro-batch in which a rank blocks to exchange tensors with its neighbors, half in the forward and half
in the backward. Published stage times do not include them. arXiv 2401.10241 profiled 0.53 to 0.76 ms (``T_comm``)
on the same machines."""

STAGE_COLUMNS = (
    "schedule",
    "pp",
    "num_microbatches",
    "measured_step_time_s",
    "forward_s_by_stage",
    "backward_s_by_stage",
)


def compare_stage_times(path: Path) -> dict[str, Any]:
    """Simulate steps with measured stage times, and compare with measured step times.

    Exchanges between stages block for ``EXCHANGE_S``, as in the Megatron-LM that such tables come from.

    Returns:
        ``summary`` with ``rows``, ``max_abs_error``, ``mean_abs_error`` and ``bias``, and ``rows``: for each line
        ``measured_s``, ``predicted_s`` and ``error``.

    Raises:
        UserError: the file cannot be read, or is not such a table.
    """
    problems: list[str] = []
    answers: list[dict[str, float]] = []
    for number, line in enumerate(read_table(path, STAGE_COLUMNS), start=2):
        try:
            answers.append(_stage_times(line))
        except (ValueError, KeyError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise ConfigError(problems, str(path))
    errors = [answer["error"] for answer in answers]
    summary = {
        "rows": len(errors),
        "max_abs_error": max(map(abs, errors)),
        "mean_abs_error": sum(map(abs, errors)) / len(errors),
        "bias": sum(errors) / len(errors),
    }
    return {"summary": summary, "rows": answers}


def _stage_times(line: dict[str, str]) -> dict[str, float]:
    pp, count = int(line["pp"]), int(line["num_microbatches"])
    measured = float(line["measured_step_time_s"])
    if pp < 1 or count < 1 or not measured > 0:
        raise ValueError("expected pp, num_microbatches and measured_step_time_s above 0")
    if line["schedule"] not in FAMILY_OF:
        raise ValueError(f"no family makes the schedule '{line['schedule']}'; known: {', '.join(FAMILY_OF)}")
    forward, backward = (_seconds(line[f"{side}_s_by_stage"]) for side in ("forward", "backward"))
    if len(forward) != len(backward) or len(forward) % pp:
        raise ValueError(f"expected seconds of each of {pp} stages, found {len(forward)} and {len(backward)}")
    half_s = 0.0 if pp == 1 else EXCHANGE_S / 2
    costs = StageCosts(tuple(value + half_s for value in forward), tuple(value + half_s for value in backward))
    choice = Choice(family=FAMILY_OF[line["schedule"]], pp=pp, loops=len(forward) // pp, num_microbatches=count)
    predicted = simulate(build(Recipe(start=choice, receive_buffers=None)), costs).end_s
    return {"measured_s": measured, "predicted_s": predicted, "error": predicted / measured - 1}


def _seconds(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


def parts_of(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Set -> its outcomes."""
    parts: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        parts[outcome.row.set_name].append(outcome)
    return dict(parts)
