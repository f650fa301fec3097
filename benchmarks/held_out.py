"""How good predictions are on rows that no calibration has seen: the table of docs/accuracy.md, computed anew.

    python benchmarks/held_out.py TABLE.csv [PART ...] [--write]

Each line fits a program, from general values, on some rows of a table of measurements, as ``pipeloom validate --fit``
does, and predicts others. A PART keeps the lines whose name contains it. Some minutes for all of them. ``--write``
writes the error bars of the catalog (``pipeloom.catalog.accuracy``): for each program those of all its lines together,
and for each device those of the general values on all of its rows.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tomli_w
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from pipeloom.accuracy.compare import Outcome, cluster_of, compare, measure, program_of, rankings
from pipeloom.accuracy.fit import first_guess, fit
from pipeloom.accuracy.rows import Group, Row, read_rows

ACCURACY = Path(__file__).parents[1] / "src" / "pipeloom" / "catalog" / "accuracy.toml"

T = TypeVar("T")
Choice = Callable[[Row], bool]


@dataclass(frozen=True)
class Split:
    """Rows of one program, in two parts.

    Attributes:
        program: whose rows.
        fitted, held_out: names of the parts.
        is_fitted, is_held_out: which rows.
    """

    program: str
    fitted: str
    held_out: str
    is_fitted: Choice
    is_held_out: Choice


def _models(program: str, first: str, second: str) -> Iterator[Split]:
    for one, other in ((first, second), (second, first)):
        yield Split(program, one, other, _is_model(one), _is_model(other))


def _is_model(name: str) -> Choice:
    return lambda row: row.run.shape.name == name


def _otherwise(program: str, fitted: str, held_out: str, choice: Choice) -> Split:
    return Split(program, fitted, held_out, choice, lambda row: not choice(row))


def splits() -> list[Split]:
    """Every line of the table: by model where a set has two, otherwise by what another model would change."""
    found = [*_models("zero-bubble", "gpt-1.5b", "gpt-6.2b"), *_models("vtrain-multi", "gpt-3.6b", "gpt-18.4b")]
    for program in ("scaling-2023a", "scaling-2023b"):
        found += [
            _otherwise(program, "2,048 tokens", "8,192 tokens", lambda row: row.run.seq == 2048),
            _otherwise(program, "8,192 tokens", "2,048 tokens", lambda row: row.run.seq == 8192),
            _otherwise(program, "micro-batch 1", "above", lambda row: row.run.micro_batch == 1),
            _otherwise(program, "micro-batch above 1", "1", lambda row: row.run.micro_batch > 1),
            _otherwise(program, "tp 1 and 2", "tp 4 and 8", lambda row: row.run.tp <= 2),
        ]
    found += [
        _otherwise("megatron-2021", "all but 18B and 22B", "18B and 22B", lambda row: row.run.shape.hidden < 6144),
        _nanotron("8 devices", "16 devices", 0, 8, 16),
        _nanotron("up to 16 devices", "32 devices", 0, 16, 32),
        _nanotron("up to 16 devices", "64 devices", 0, 16, 64),
        _otherwise("vtrain-single", "hidden size 2,048", "1,024", lambda row: row.run.shape.hidden == 2048),
    ]
    return found


def _nanotron(fitted: str, held_out: str, above: int, most: int, tested: int) -> Split:
    return Split(
        "nanotron",
        fitted,
        held_out,
        lambda row: above < row.run.num_devices <= most,
        lambda row: row.run.num_devices == tested,
    )


@dataclass(frozen=True)
class Held:
    """What a split gave.

    Attributes:
        split: which rows.
        device: of the rows.
        num_fitted: rows that were fitted.
        before, after: predictions of the held-out rows with general values, and with those that were fitted.
    """

    split: Split
    device: str
    num_fitted: int
    before: tuple[Outcome, ...]
    after: tuple[Outcome, ...]


def held_out(split: Split, rows: list[Row]) -> Held:
    """Fit one part of a split and predict the other."""
    own = [row for row in rows if program_of(row)[0] == split.program]
    fitted = [row for row in own if split.is_fitted(row) and row.is_ok and row.step_time_s is not None]
    if split.program == "vtrain-single":
        fitted = fitted[::5]
    tested = [row for row in own if split.is_held_out(row)]
    start = first_guess(program_of(fitted[0])[1])
    cluster = cluster_of(fitted[0], start)
    result = fit(fitted, cluster, start)
    before, after = (compare(tested, cluster, program).outcomes for program in (start, result.software))
    return Held(split, cluster.device.name, len(fitted), before, after)


def cells(held: Held) -> list[str]:
    """A line of the table."""
    before, after = measure(held.before), measure(held.after)
    shares = (before.mean_abs_error, after.mean_abs_error, after.bias)
    ranks = "-" if after.rank_correlation is None else f"{after.rank_correlation:.3f}"
    regret = "-" if after.mean_top1_regret is None else f"{after.mean_top1_regret:.1%}"
    split = held.split
    counts = [str(held.num_fitted), split.held_out, str(after.timed_rows)]
    return [split.program, split.fitted, *counts, *(f"{share or 0:.1%}" for share in shares), ranks, regret]


class Pair(NamedTuple):
    """Two layouts of a group: (slower / faster) of the predicted step times, and of the measured ones."""

    predicted: float
    measured: float


NEAR = 1.5
"""Pairs are made of layouts whose predicted step takes at most this multiple of the fastest one of their group. A plan
prints no slower ones, and their errors are larger."""


def pairs_of(outcomes: Iterable[Outcome]) -> list[Pair]:
    """Pairs of the layouts that a plan would compare."""
    groups: dict[Group, list[tuple[float, float]]] = defaultdict(list)
    for outcome in _timed(outcomes):
        groups[outcome.row.group].append((outcome.step_time_s, outcome.row.step_time_s or 0.0))
    found = []
    for times in groups.values():
        near = sorted(time for time in times if time[0] <= NEAR * min(times)[0])
        found += [Pair(slow[0] / fast[0], slow[1] / fast[1]) for fast, slow in combinations(near, 2)]
    return found


def pair_errors(pairs: Sequence[Pair], weights: Sequence[float] = ()) -> dict[str, float]:
    """How well the predictions order two layouts (``catalog.accuracy.Errors``)."""
    if not pairs:
        return {}
    predicted, measured = np.array(pairs).T
    weight = np.array(weights) if weights else np.ones(len(pairs))
    limit = _quantile(np.abs(predicted / measured - 1), weight, 0.5)
    found = {"pair_error": limit}
    for name, part in (("order_below", predicted < 1 + limit), ("order_above", predicted >= 1 + limit)):
        if part.any():
            found[name] = float(np.average(measured[part] >= 1, weights=weight[part]))
    return found


def _quantile(values: NDArray[np.float64], weight: NDArray[np.float64], share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(values[order][np.searchsorted(reached, share - 1e-9)])


def errors_of(
    parts: Sequence[Sequence[Outcome]], regrets: Sequence[float], *, is_weighted: bool = False
) -> dict[str, Any]:
    """The fields that every entry of the file has.

    Args:
        parts: predictions; a pair has both layouts in one part.
        regrets: one for each group.
        is_weighted: whether every part has the same weight; otherwise every prediction has.
    """

    def flat(lists: Sequence[Sequence[T]]) -> tuple[list[T], list[float]]:
        weights = [1 / len(part) if is_weighted else 1.0 for part in lists for _ in part]
        return [one for part in lists for one in part], weights

    outcomes, weights = flat([_timed(part) for part in parts])
    pairs, pair_weights = flat([pairs_of(part) for part in parts])
    errors = np.array([outcome.error for outcome in outcomes])
    found = {
        "mean_abs_error": float(np.average(np.abs(errors), weights=weights)),
        "p90_abs_error": _quantile(np.abs(errors), np.array(weights), 0.9),
        "bias": float(np.average(errors, weights=weights)),
        **pair_errors(pairs, pair_weights),
    }
    if regrets:
        found |= {"median_regret": float(np.median(regrets)), "worst_regret": max(regrets)}
    rounded = {name: round(value, 4) for name, value in found.items()}
    rows = len({id(outcome.row) for outcome in outcomes})
    return {"rows": rows, "groups": len(regrets), "pairs": len(pairs), **rounded}


def _timed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.error is not None]


def programs(answers: Sequence[Held]) -> list[dict[str, Any]]:
    """For each program and device the errors of everything that was held out."""
    entries = []
    for name in dict.fromkeys(held.split.program for held in answers):
        own = [held for held in answers if held.split.program == name]
        # A row of several splits has several predictions. Pairs are made within a split, whose predictions share a fit.
        parts = [held.after for held in own]
        regrets = [ranking.regret for held in own for ranking in rankings(held.after)]
        entries.append(
            {
                "program": name,
                "device": own[0].device,
                "predictions": sum(len(_timed(part)) for part in parts),
                "splits": [f"{held.split.fitted} -> {held.split.held_out}" for held in own],
                **errors_of(parts, regrets),
            }
        )
    return entries


def general(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each device the errors of the general values on all rows; every program counts as much as another."""
    found: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        name, program = program_of(row)
        start = first_guess(program)
        found[row.device][name] += compare([row], cluster_of(row, start), start).outcomes
    entries = []
    for device, parts in sorted(found.items()):
        means = {
            name: round(error, 4)
            for name, part in sorted(parts.items())
            if (error := measure(part).mean_abs_error) is not None
        }
        regrets = [ranking.regret for part in parts.values() for ranking in rankings(part)]
        entries.append(
            {"device": device, **errors_of(list(parts.values()), regrets, is_weighted=True), "mean_abs_error_of": means}
        )
    return entries


HEAD = """\
# Errors of predictions, as fractions of the measured step time, for `planner/error_bar.py`. Written by the command
# below, not by hand. [[program]]: held-out rows, which the fit that predicted them did not use, of all splits together;
# [[general]]: the general efficiencies, which are not fitted, on all rows of a device, with equal weight for every
# program.

"""


def write(table: Path, rows: Sequence[Row], answers: Sequence[Held], file: Path = ACCURACY) -> None:
    """Write the error bars."""
    provenance = {
        "by": f"python benchmarks/held_out.py {table.name} --write",
        "table": table.name,
        "rows": len(rows),
        "date": str(date.today()),
    }
    values = {"provenance": provenance, "program": programs(answers), "general": general(rows)}
    file.write_text(HEAD + tomli_w.dumps(values), encoding="utf-8")


def main(words: list[str]) -> None:
    """Compute and print the selected lines."""
    table, parts = Path(words[0]), [word for word in words[1:] if word != "--write"]
    if parts and "--write" in words:
        sys.exit("--write needs every line: leave out " + ", ".join(parts))
    rows = read_rows(table)
    chosen = [split for split in splits() if not parts or any(part in split.program for part in parts)]
    console = Console(width=150)
    answers = []
    for split in chosen:
        answers.append(held_out(split, rows))
        error = measure(answers[-1].after).mean_abs_error or 0
        console.print(f"{split.program}: {split.fitted} -> {split.held_out}: {error:.1%}")
    lines = Table("program", "fitted on", "rows", "predicted", "rows", "unfitted", "error", "bias", "ranks", "regret")
    for held in answers:
        lines.add_row(*cells(held))
    console.print(lines)
    if "--write" in words:
        write(table, rows, answers)
        console.print(f"written to {ACCURACY}")


if __name__ == "__main__":
    main(sys.argv[1:])
