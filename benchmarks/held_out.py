"""How good predictions are on rows that no calibration has seen: the tables of docs/accuracy.md, computed anew.

    python benchmarks/held_out.py [TABLE.csv ...] [PART ...] [--write]

First the errors of the programs as shipped. Then each line fits a program on some rows, as ``pipeloom validate --fit``
does, and predicts others: by model, by number of devices, by sequence length. The prior of a fit has the other programs
only. The last lines leave out all rows of a program, or of a device: they are predicted by the general program, with
the medians of the efficiencies of the others. Two baselines are fitted on the same rows. Without a table, the published
measurements beside the checkout. A PART keeps the lines whose program's name contains it. Some minutes for all of them.
``--write`` writes the error bars of the catalog (``pipeloom.catalog.accuracy``), and the prior of all programs into the
general program.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tomli_w
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from pipeloom.accuracy import calculon
from pipeloom.accuracy.baselines import constant_mfu, log_linear, mean_error
from pipeloom.accuracy.compare import Comparison, Outcome, compare, measure, parts_of, rankings
from pipeloom.accuracy.disturbed import disturbed
from pipeloom.accuracy.fit import Fit, estimates, first_guess, fit
from pipeloom.accuracy.prior import NAMES, Estimate, Prior, pooled
from pipeloom.accuracy.programs import DEFAULT_SOFTWARE, cluster_of, default_of, program_of
from pipeloom.accuracy.rows import Group, Row, read_rows
from pipeloom.cost.software import Software
from pipeloom.planner.error_bar import features_of

SHARED = Path(__file__).parents[2] / "shared" / "data"
TABLES = (SHARED / "measured.csv", SHARED / "modern.csv")
MOST_FITTED = 40
"""Rows of a fit, evenly spaced in the table, so that it takes seconds."""
CATALOG = Path(__file__).parents[1] / "src" / "pipeloom" / "catalog"
ACCURACY, GENERAL = CATALOG / "accuracy.toml", CATALOG / "software" / "general.toml"

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


def _otherwise(program: str, fitted: str, held_out: str, choice: Choice) -> Split:
    return Split(program, fitted, held_out, choice, lambda row: not choice(row))


def splits(rows: Sequence[Row]) -> list[Split]:
    """Every line of the table: by model where a program has several, else by sequence length; and by devices."""
    found: list[Split] = []
    for program in sorted({program_of(row)[0] for row in rows} - {DEFAULT_SOFTWARE}):
        own = [row for row in rows if program_of(row)[0] == program and row.is_ok and row.step_time_s is not None]
        if own:
            found += _split_by(program, "model", own, lambda row: row.run.shape.name) or _split_by(
                program, "tokens", own, lambda row: row.run.seq
            )
            found += _by_devices(program, own)
    return found


def _split_by(program: str, what: str, rows: Sequence[Row], key: Callable[[Row], Any]) -> list[Split]:
    """Two halves of the values of a key, each fitted once; none with a single value."""
    values = sorted({key(row) for row in rows})
    halves = [set(values[number::2]) for number in (0, 1)]
    if len(values) < 2:
        return []
    names = [
        f"{what} {'/'.join(map(str, sorted(half)))}" if len(half) < 3 else f"{len(half)} {what}s" for half in halves
    ]
    return [
        Split(program, names[one], names[1 - one], _is_in(key, halves[one]), _is_in(key, halves[1 - one]))
        for one in (0, 1)
    ]


def _is_in(key: Callable[[Row], Any], values: set[Any]) -> Choice:
    return lambda row: key(row) in values


def _by_devices(program: str, rows: Sequence[Row]) -> list[Split]:
    """Fitted on fewer devices than half of the rows have, predicted on more."""
    counts = sorted(row.run.num_devices for row in rows)
    limit = counts[(len(counts) - 1) // 2]
    if limit == counts[-1]:
        return []
    return [_otherwise(program, f"up to {limit} devices", "more", lambda row: row.run.num_devices <= limit)]


@dataclass(frozen=True)
class Held:
    """What a split gave.

    Attributes:
        split: which rows.
        device: of the rows.
        num_fitted: rows that were fitted.
        before, after: predictions of the held-out rows without the fit, and with it.
        mfu_error, regression_error: mean errors of the baselines, fitted on the same rows.
    """

    split: Split
    device: str
    num_fitted: int
    before: tuple[Outcome, ...]
    after: tuple[Outcome, ...]
    mfu_error: float = 0.0
    regression_error: float = 0.0


class Programs:
    """The programs of a table, each fitted once: the priors of all fits.

    Attributes:
        rows: the table.
        odd: ``id`` of its disturbed runs, which no fit uses.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        # Among all rows of a set: a part of them has too few neighbors to disagree with.
        self.odd = disturbed(rows)
        self._found: dict[tuple[str, str], dict[str, Estimate]] = {}

    def prior(self, without: str = "", without_device: str = "") -> Prior:
        """The prior of all programs that ran but one, from rows of all devices but one."""
        ran = {name for row in self.rows for name, program in (program_of(row),) if not program.is_composed}
        names = sorted(ran - {DEFAULT_SOFTWARE, without})
        return pooled([self._estimates(name, without_device) for name in names], Prior())

    def measured(self, name: str) -> list[Row]:
        """The undisturbed measured rows of a program."""
        own = [row for row in self.rows if program_of(row)[0] == name]
        return [row for row in own if row.is_ok and row.step_time_s is not None and id(row) not in self.odd]

    def _estimates(self, name: str, without_device: str) -> dict[str, Estimate]:
        own = self.measured(name)
        kept = [row for row in own if row.device != without_device]
        key = (name, without_device if len(kept) < len(own) else "")
        if key not in self._found:
            self._found[key] = self._fitted(kept) if kept else {}
        return self._found[key]

    def _fitted(self, rows: Sequence[Row]) -> dict[str, Estimate]:
        return estimates(fitted_on(rows, first_guess(program_of(rows[0])[1], Prior()), Prior()))


def fitted_on(rows: Sequence[Row], start: Software, prior: Prior) -> Fit:
    """A fit of a part of the rows, each on its own cluster."""
    return fit(thinned(rows, MOST_FITTED), None, start, prior=prior)


def held_out(split: Split, known: Programs, change: Callable[[Software], Software] = lambda program: program) -> Held:
    """Fit one part of a split and predict the other, with a change of the program."""
    measured = [row for row in known.measured(split.program) if split.is_fitted(row)]
    tested = [row for row in known.rows if program_of(row)[0] == split.program and split.is_held_out(row)]
    prior = known.prior(split.program)
    start = first_guess(change(program_of(measured[0])[1]), prior)
    end = replace(fitted_on(measured, start, prior).software, cluster=start.cluster)
    return _held(split, thinned(measured, MOST_FITTED), *(predicted(tested, program) for program in (start, end)))


def thinned(rows: Sequence[T], most: int) -> list[T]:
    """At most ``most`` rows, evenly spaced."""
    return [rows[number * len(rows) // most] for number in range(most)] if len(rows) > most else list(rows)


def _held(split: Split, fitted: Sequence[Row], before: tuple[Outcome, ...], after: tuple[Outcome, ...]) -> Held:
    timed = [outcome.row for outcome in after if outcome.error is not None]
    baselines = [constant_mfu(fitted, _peak), log_linear(fitted)]
    device = after[0].row.device
    return Held(split, device, len(fitted), before, after, *(mean_error(timed, each) for each in baselines))


def predicted(rows: Iterable[Row], program: Software) -> tuple[Outcome, ...]:
    """Predictions with a program, each row on its own cluster."""
    return compare(rows, None, program).outcomes


def generally(rows: Iterable[Row], prior: Prior) -> tuple[Outcome, ...]:
    """Predictions as of rows of unknown sets, with the center of a prior."""
    parts: dict[Software, list[Row]] = defaultdict(list)
    for row in rows:
        parts[default_of(row)].append(row)
    each = (predicted(part, replace(program, efficiency=prior.center)) for program, part in parts.items())
    return tuple(outcome for part in each for outcome in part)


def _peak(row: Row) -> float:
    return cluster_of(row, program_of(row)[1]).device.peak_flops_per_s[row.run.precision]


def left_out(name: str, is_out: Choice, known: Programs, prior: Prior) -> Held | None:
    """The general program on the rows that are left out; ``None`` without other rows."""
    others = [row for row in known.rows if not is_out(row) and row.is_ok and row.step_time_s is not None]
    split = Split(DEFAULT_SOFTWARE, "all others", name, lambda row: not is_out(row), is_out)
    if not others:
        return None
    tested = [row for row in known.rows if is_out(row)]
    before, after = (generally(tested, each) for each in (Prior(), prior))
    return _held(split, thinned(others, MOST_FITTED), before, after) if after else None


def left_out_lines(known: Programs, parts: Sequence[str] = ()) -> Iterator[Held]:
    """A line for each program that is left out, and for each device."""
    names = sorted({program_of(row)[0] for row in known.rows})
    devices = sorted({row.device for row in known.rows})
    choices = [(name, _is_in(lambda row: program_of(row)[0], {name}), (name, "")) for name in names]
    choices += [(device, _is_in(lambda row: row.device, {device}), ("", device)) for device in devices]
    for name, is_out, without in choices:
        if not parts or any(part in name for part in parts):
            held = left_out(name, is_out, known, known.prior(*without))
            if held is not None and _timed(held.after):
                yield held


def cells(held: Held, odd: Set[int]) -> list[str]:
    """A line of the table.

    Args:
        held: what it is of.
        odd: ``id`` of disturbed runs.
    """
    before, after = measure(held.before), measure(held.after)
    quiet = measure(Comparison(held.after, {}).without(odd).outcomes)
    shares = (before.mean_abs_error, after.mean_abs_error, quiet.mean_abs_error, after.bias)
    ranks = "-" if after.rank_correlation is None else f"{after.rank_correlation:.3f}"
    regrets = ["-" if share is None else f"{share:.1%}" for share in (quiet.mean_top1_regret, quiet.mean_top3_regret)]
    split = held.split
    counts = [str(held.num_fitted), split.held_out, str(after.timed_rows)]
    simple = [f"{share:.0%}" for share in (held.mfu_error, held.regression_error)]
    return [split.program, split.fitted, *counts, *(f"{share or 0:.1%}" for share in shares), ranks, *regrets, *simple]


COLUMNS = (
    *("program", "fitted on", "rows", "predicted", "rows", "unfitted", "error", "undisturbed", "bias", "ranks"),
    *("regret", "of 3", "constant MFU", "regression"),
)


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
    rows = {id(outcome.row): outcome.row.run for outcome in outcomes}
    counts = {"rows": len(rows), "groups": len(regrets), "pairs": len(pairs)}
    features = sorted({feature for run in rows.values() for feature in features_of(run)})
    return counts | rounded | {"features": features, "longest": max(run.seq for run in rows.values())}


def _timed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.error is not None]


def programs(answers: Sequence[Held], odd: Set[int] = frozenset()) -> list[dict[str, Any]]:
    """For each program and device the errors of everything that was held out, but for disturbed runs.

    Args:
        answers: of ``held_out``.
        odd: ``id`` of disturbed runs.
    """
    entries = []
    names = dict.fromkeys((held.split.program, one.row.device) for held in answers for one in _timed(held.after))
    for name, device in names:
        own = [held for held in answers if held.split.program == name]
        # A row of several splits has several predictions. Pairs are made within a split, whose predictions share a fit.
        whole = [(held.split, [one for one in held.after if one.row.device == device]) for held in own]
        each = [(split, [one for one in _timed(part) if id(one.row) not in odd]) for split, part in whole]
        parts = [part for _, part in each if part]
        regrets = [ranking.regret for part in parts for ranking in rankings(part)]
        entries.append(
            {
                "program": name,
                "device": device,
                "predictions": sum(map(len, parts)),
                "splits": [f"{split.fitted} -> {split.held_out}" for split, part in each if part],
                **errors_of(parts, regrets),
            }
        )
    return entries


def general(rows: Sequence[Row], answers: Sequence[Held] = (), odd: Set[int] = frozenset()) -> list[dict[str, Any]]:
    """For each device the errors of the general program on all rows; every program counts as much as another.

    Args:
        rows: the table.
        odd: ``id`` of disturbed runs, which are left out.
        answers: of ``left_out``, for every program; one that is missing is predicted without a fit.
    """
    found: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    by_name = {held.split.held_out: held.after for held in answers}
    for name in sorted({program_of(row)[0] for row in rows}):
        own = [row for row in rows if program_of(row)[0] == name]
        for outcome in by_name.get(name) or generally(own, Prior()):
            if id(outcome.row) not in odd:
                found[outcome.row.device][name].append(outcome)
    entries = []
    for device, parts in sorted(found.items()):
        means = {
            name: round(error, 4)
            for name, part in sorted(parts.items())
            if (error := measure(part).mean_abs_error) is not None
        }
        regrets = [ranking.regret for part in parts.values() for ranking in rankings(part)]
        timed = [part for part in parts.values() if _timed(part)]
        entries.append({"device": device, **errors_of(timed, regrets, is_weighted=True), "mean_abs_error_of": means})
    return entries


HEAD = """\
# Errors of predictions, as fractions of the measured step time, for `planner/error_bar.py`. Written by the command
# below, not by hand. [[program]]: held-out rows, which the fit that predicted them did not use, of all splits together;
# [[general]]: the general program on all rows of a device, fitted without the program of the row, with equal weight for
# every program. Disturbed runs are left out.

"""


def write(
    table: Path, rows: Sequence[Row], answers: Sequence[Held], odd: Set[int] = frozenset(), file: Path = ACCURACY
) -> None:
    """Write the error bars, without the disturbed runs, whose ``id`` are in ``odd``."""
    provenance = {
        "by": f"python benchmarks/held_out.py {table.name} --write",
        "table": table.name,
        "rows": len(rows),
        "date": str(date.today()),
    }
    calibrated = [held for held in answers if held.split.program != DEFAULT_SOFTWARE]
    others = [held for held in answers if held.split.program == DEFAULT_SOFTWARE]
    values = {"provenance": provenance, "program": programs(calibrated, odd)}
    values["general"] = general(rows, others, odd)
    file.write_text(HEAD + tomli_w.dumps(values), encoding="utf-8")


def write_prior(prior: Prior, tables: Sequence[str], file: Path = GENERAL) -> None:
    """Replace the efficiencies of the general program, behind its facts."""
    facts = file.read_text(encoding="utf-8").split("[provenance]")[0]
    provenance = {
        "by": "medians and spreads of all other programs (accuracy/prior.py); benchmarks/held_out.py --write",
        "table": ", ".join(tables),
        "date": str(date.today()),
    }
    rounded = {name: float(f"{getattr(prior.center, name):.3g}") for name in NAMES}
    spread = {name: round(prior.width(name), 2) for name in NAMES}
    values = {"provenance": provenance, "efficiency": rounded, "spread": spread}
    file.write_text(facts + tomli_w.dumps(values), encoding="utf-8")


def tables_in(words: Sequence[str]) -> list[Path]:
    """The tables of measurements among the words of a command; without any the default ones.

    Raises:
        SystemExit: one is missing.
    """
    tables = [Path(word) for word in words if word.endswith(".csv")] or list(TABLES)
    if missing := [str(table) for table in tables if not table.is_file()]:
        sys.exit(f"expected tables of measurements, found none at {', '.join(missing)}; name others as TABLE.csv ...")
    return tables


def main(words: list[str]) -> None:
    """Compute and print the selected lines."""
    parts = [word for word in words if not word.endswith(".csv") and word != "--write"]
    if parts and "--write" in words:
        sys.exit("--write needs every line: leave out " + ", ".join(parts))
    tables = tables_in(words)
    skipped: dict[str, int] = {}
    by_table = {table.name: read_rows(table, skipped) for table in tables}
    rows = [row for own in by_table.values() for row in own]
    console = Console(width=200)
    # Others have no cluster, or no family makes their schedule.
    rows = print_shipped(console, rows, skipped)
    answers, known = [], Programs(rows)
    for split in splits(rows):
        if not parts or any(part in split.program for part in parts):
            answers.append(held_out(split, known))
            console.print(f"{split.program}: {split.fitted} -> {split.held_out}: {mean_of(answers[-1]):.1%}")
    for held in left_out_lines(known, parts):
        answers.append(held)
        console.print(f"general, without {held.split.held_out}: {mean_of(held):.1%}")
    lines = Table(*COLUMNS)
    for held in answers:
        lines.add_row(*cells(held, known.odd))
    console.print(lines)
    pooled_lines = Table(*POOLED, title="each row once, without disturbed runs")
    for line in pooled_cells(answers, by_table, known.odd):
        pooled_lines.add_row(*line)
    console.print(pooled_lines)
    if "--write" in words:
        write(Path(" and ".join(table.name for table in tables)), rows, answers, known.odd)
        write_prior(known.prior(), [table.name for table in tables])
        console.print(f"written to {ACCURACY} and {GENERAL}")


ALL, STEPS = "all", "all that ran"
KINDS = OTHER_HALF, MORE_DEVICES, LEFT_OUT = "other half of models or lengths", "more devices", "program left out"
POOLED = "rows of", *(head for kind in KINDS for head in (kind, "rows"))


def pooled_cells(
    answers: Sequence[Held], by_table: Mapping[str, Sequence[Row]], odd: Set[int] = frozenset()
) -> Iterator[list[str]]:
    """A line for each set and each table, and for what ran of a table: mean errors by kind of split.

    A kind of split predicts each row once, without the disturbed runs, whose ``id`` are in ``odd``.
    """
    lines: dict[str, list[str]] = defaultdict(list)
    names = sorted({row.set_name for rows in by_table.values() for row in rows})
    for kind in KINDS:
        outcomes = [one for held in answers if _kind(held) == kind for one in _timed(held.after)]
        quiet = Comparison(tuple(outcomes), {}).without(odd)
        by_set = parts_of(quiet.outcomes)
        parts = {f"set {name}": by_set.get(name, []) for name in names}
        for table, rows in by_table.items():
            own = {id(row) for row in rows}
            part = replace(quiet, outcomes=tuple(one for one in quiet.outcomes if id(one.row) in own))
            parts |= {table: part.outcomes, f"{table}, that ran": without_composed(part).outcomes}
        for name, part in parts.items():
            found = measure(part)
            lines[name] += [f"{found.mean_abs_error or 0:.1%}" if found.timed_rows else "-", str(found.timed_rows)]
    yield from ([name, *line] for name, line in lines.items() if set(line[1::2]) != {"0"})


def _kind(held: Held) -> str | None:
    """One of ``KINDS``; ``None`` if a device is left out, whose rows belong to programs as well."""
    if held.split.program != DEFAULT_SOFTWARE:
        return MORE_DEVICES if held.split.held_out == "more" else OTHER_HALF
    return LEFT_OUT if held.split.held_out == program_of(held.after[0].row)[0] else None


def without_composed(answer: Comparison) -> Comparison:
    """Without rows that a simulator composed (``Software.is_composed``): steps that ran."""
    ran = (outcome for outcome in answer.outcomes if not program_of(outcome.row)[1].is_composed)
    return replace(answer, outcomes=tuple(ran))


def print_shipped(console: Console, rows: Sequence[Row], skipped: dict[str, int]) -> list[Row]:
    """Print the errors of the programs as shipped, by set; returns the rows that were predicted."""
    answer = compare(rows)
    other = calculon.installed()
    lines = Table("as shipped", "timed", "error", "undisturbed", "bias", "regret", "of 3", *["Calculon"] * bool(other))
    wholes = {ALL: answer, STEPS: without_composed(answer)}
    quiet = answer.undisturbed.by_set | {name: measure(part.undisturbed.outcomes) for name, part in wholes.items()}
    by_name = {name: part.outcomes for name, part in wholes.items()} | parts_of(answer.outcomes)
    for name, outcomes in by_name.items():
        part = measure(outcomes)
        if part.timed_rows:
            less = quiet[name]
            shares = (part.mean_abs_error, less.mean_abs_error, part.bias, less.mean_top1_regret, less.mean_top3_regret)
            cells = ["-" if share is None else f"{share:.1%}" for share in shares]
            lines.add_row(name, str(part.timed_rows), *cells, *([_calculon(other, outcomes)] if other else []))
    console.print(lines)
    if other is None:
        console.print("Calculon is not installed: its column is left out")
    for reason, number in (skipped | answer.skipped).items():
        console.print(f"{number} rows not predicted: {reason}")
    return [outcome.row for outcome in answer.outcomes]


def _calculon(module: Any, outcomes: Iterable[Outcome]) -> str:
    """Calculon's mean error, and the number of rows that it predicts if these are not all."""
    timed, errors = _timed(outcomes), []
    for row in (outcome.row for outcome in timed):
        software = program_of(row)[1]
        seconds = calculon.step_s(module, row, cluster_of(row, software), software)
        errors += [] if seconds is None else [abs(seconds / (row.step_time_s or 1.0) - 1)]
    number = "" if len(errors) == len(timed) else f" of {len(errors)}"
    return f"{np.mean(errors):.1%}{number}" if errors else "-"


def mean_of(held: Held) -> float:
    """Mean error of the held-out rows."""
    return measure(held.after).mean_abs_error or 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
