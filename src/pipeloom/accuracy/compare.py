"""Predictions for a table of measurements and for measured stage times, and how good they are. Errors are fractions."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.accuracy.rows import Group, Row, read_table
from pipeloom.accuracy.schedules import FAMILY_OF, predict
from pipeloom.catalog import CLUSTERS, load_software, names
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import ConfigError, UserError
from pipeloom.families import Choice
from pipeloom.recipe import Recipe, build
from pipeloom.simulation import simulate


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


DEFAULT_SOFTWARE = "megatron-2021"
"""The program of a set without a calibrated one, unless another one is calibrated for the row's device."""


@lru_cache(maxsize=1)
def _programs() -> tuple[tuple[str, Software], ...]:
    return tuple((name, load_software(name)) for name in names("software"))


def _clusters() -> Iterable[Cluster]:
    return CLUSTERS.values()


def program_of(row: Row) -> tuple[str, Software]:
    """The program that the row's set was measured with, by name and as a value.

    For a set that no program names: ``DEFAULT_SOFTWARE`` if it was calibrated on the row's device, otherwise the first
    program that was, whose runs had the row's attention kernel; otherwise ``DEFAULT_SOFTWARE`` all the same.
    """
    named = [(name, software) for name, software in _programs() if _is_for(software, row.run.attention)]
    for name, software in named:
        if any(row.set_name.startswith(begin) for begin in software.sets):
            return name, software
    default = dict(_programs())[DEFAULT_SOFTWARE]
    for name, software in ((DEFAULT_SOFTWARE, default), *named):
        if _device_of(software) == row.device:
            return name, software
    return DEFAULT_SOFTWARE, default


def _is_for(software: Software, attention: str) -> bool:
    return not software.attentions or attention in software.attentions


def _device_of(software: Software) -> str:
    """Device that a program of the catalog was calibrated on."""
    return next((cluster.device.name for cluster in _clusters() if cluster.name == software.cluster), "")


def _known_cluster(row: Row, software: Software) -> Cluster | None:
    """The program's own cluster if it has the row's device, otherwise the first that has, if any."""
    # Stable: behind the program's own cluster the others stay in the order of the catalog.
    own_first = sorted(_clusters(), key=lambda cluster: cluster.name != software.cluster)
    return next((cluster for cluster in own_first if cluster.device.name == row.device), None)


def cluster_of(row: Row, software: Software) -> Cluster:
    """The program's own cluster if it has the row's device, otherwise the first that has.

    Raises:
        UserError: no cluster has the device.
    """
    cluster = _known_cluster(row, software)
    if cluster is None:
        devices = ", ".join(sorted({known.device.name for known in _clusters()}))
        raise UserError(f"no cluster of the catalog has the device '{row.device}'; known: {devices}; or give --cluster")
    return cluster


@dataclass(frozen=True)
class Comparison:
    """A table and what was predicted for it.

    Attributes:
        outcomes: in the order of the table, without the rows that could not be predicted.
        skipped: why rows were not predicted -> how many.
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

    def to_json(self) -> dict[str, Any]:
        """``summary``, the same under ``sets``, the ranking of each of the ``groups``, and what was skipped."""
        return {
            "summary": measure(self.outcomes).to_json(),
            "sets": {name: part.to_json() for name, part in self.by_set.items()},
            "groups": [ranking.to_json() for ranking in rankings(self.outcomes)],
            "skipped": self.skipped,
        }


def compare(rows: Iterable[Row], cluster: Cluster | None = None, software: Software | None = None) -> Comparison:
    """Predict every row.

    Args:
        rows: a table.
        cluster: for every row; ``None`` chooses by the row's device.
        software: for every row; ``None`` chooses by the row's set.
    """
    outcomes: list[Outcome] = []
    skipped: dict[str, int] = defaultdict(int)
    for row in rows:
        program = software or program_of(row)[1]
        machine = cluster or _known_cluster(row, program)
        reason = _reason_to_skip(row, machine)
        if machine is not None and reason is None:
            try:
                answer = predict(Placed(row.run, machine, program), row.schedule).prediction
            except ConfigError:  # a schedule that its family cannot make in this size, such as 1f1b with loops
                reason = f"no family makes the schedule '{row.schedule}' in this size"
            else:
                outcomes.append(Outcome(row, answer.step_time_s, answer.memory.total_bytes, answer.fits))
        if reason is not None:
            skipped[reason] += 1
    return Comparison(tuple(outcomes), dict(skipped))


def _reason_to_skip(row: Row, cluster: Cluster | None) -> str | None:
    if row.run.num_stages > 1 and row.schedule not in FAMILY_OF:
        return f"no family makes the schedule '{row.schedule}'"
    if cluster is None:
        return f"no cluster of the catalog has the device '{row.device}': give --cluster"
    if row.run.precision not in cluster.device.peak_flops_per_s:
        return f"the device '{cluster.device.name}' has no rate for {row.run.precision}"
    return None


EXCHANGE_S = 0.6e-3
"""Seconds in which a rank blocks to exchange tensors with its neighbors, for each micro-batch; half of it with
the forward, half with the backward. Published stage times leave it out. arXiv 2401.10241 profiled 0.53 to 0.76 ms
(``T_comm``) on the same machines."""

STAGE_COLUMNS = (
    "schedule",
    "pp",
    "num_microbatches",
    "measured_step_time_s",
    "forward_s_by_stage",
    "backward_s_by_stage",
)


def compare_stage_times(path: Path) -> dict[str, Any]:
    """Feed measured stage times to the simulator; the step time it expects beside the measured one.

    Exchanges between stages block, as in the Megatron-LM that such tables come from: ``EXCHANGE_S``.

    Returns:
        ``summary`` with ``rows``, ``max_abs_error``, ``mean_abs_error`` and ``bias``, and ``rows``, one for each line.

    Raises:
        UserError: it is no such table.
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
    """Outcomes by set, for a picture."""
    parts: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        parts[outcome.row.set_name].append(outcome)
    return dict(parts)
