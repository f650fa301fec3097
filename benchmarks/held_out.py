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
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from rich.console import Console
from rich.table import Table

from pipeloom.accuracy.compare import Outcome, cluster_of, compare, measure, program_of, rankings
from pipeloom.accuracy.fit import first_guess, fit
from pipeloom.accuracy.rows import Row, read_rows

ACCURACY = Path(__file__).parents[1] / "src" / "pipeloom" / "catalog" / "accuracy.toml"

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


def errors_of(outcomes: Sequence[Outcome], regrets: Sequence[float], weights: Sequence[float] = ()) -> dict[str, Any]:
    """The fields that every entry of the file has; weighted as told, otherwise every prediction counts the same."""
    errors = np.array([outcome.error for outcome in outcomes])
    weight = np.array(weights) if weights else np.ones(len(errors))
    order = np.argsort(np.abs(errors))
    share = np.cumsum(weight[order]) / weight.sum()
    found = {
        "mean_abs_error": float(np.average(np.abs(errors), weights=weight)),
        "p90_abs_error": float(np.abs(errors)[order][np.searchsorted(share, 0.9 - 1e-9)]),
        "bias": float(np.average(errors, weights=weight)),
    }
    if regrets:
        found |= {"median_regret": float(np.median(regrets)), "worst_regret": max(regrets)}
    rounded = {name: round(value, 4) for name, value in found.items()}
    return {"rows": len({id(outcome.row) for outcome in outcomes}), "groups": len(regrets), **rounded}


def _timed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.error is not None]


def programs(answers: Sequence[Held]) -> list[dict[str, Any]]:
    """For each program and device the errors of everything that was held out."""
    entries = []
    for name in dict.fromkeys(held.split.program for held in answers):
        own = [held for held in answers if held.split.program == name]
        outcomes = _timed(outcome for held in own for outcome in held.after)
        regrets = [ranking.regret for held in own for ranking in rankings(held.after)]
        entries.append(
            {
                "program": name,
                "device": own[0].device,
                "predictions": len(outcomes),
                "splits": [f"{held.split.fitted} -> {held.split.held_out}" for held in own],
                **errors_of(outcomes, regrets),
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
        timed = {name: _timed(part) for name, part in parts.items()}
        means = {name: round(measure(part).mean_abs_error or 0.0, 4) for name, part in sorted(timed.items()) if part}
        outcomes = [outcome for part in timed.values() for outcome in part]
        weights = [1 / len(part) for part in timed.values() for _ in part]
        regrets = [ranking.regret for part in parts.values() for ranking in rankings(part)]
        entries.append({"device": device, **errors_of(outcomes, regrets, weights), "mean_abs_error_of": means})
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
    """Compute and print the lines that were asked for."""
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
