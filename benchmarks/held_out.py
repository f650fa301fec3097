"""How good predictions are on rows that no calibration has seen: the table of docs/accuracy.md, computed anew.

    python benchmarks/held_out.py TABLE.csv [PART ...]

Each line fits a program, from general values, on some rows of a table of measurements, as ``pipeloom validate --fit``
does, and predicts others. A PART keeps the lines whose name contains it. Some minutes for all of them.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeloom.validate.compare import cluster_of, compare, program_of
from pipeloom.validate.fit import first_guess, fit
from pipeloom.validate.measures import Measures, measure
from pipeloom.validate.rows import Row, read_rows

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


def held_out(split: Split, rows: list[Row]) -> tuple[int, tuple[Measures, Measures]]:
    """Rows fitted; measures of the held-out rows with general values and with those that were fitted."""
    own = [row for row in rows if program_of(row)[0] == split.program]
    fitted = [row for row in own if split.is_fitted(row) and row.is_ok and row.step_time_s is not None]
    if split.program == "vtrain-single":
        fitted = fitted[::5]
    tested = [row for row in own if split.is_held_out(row)]
    start = first_guess(program_of(fitted[0])[1])
    cluster = cluster_of(fitted[0], start)
    result = fit(fitted, cluster, start)
    before, after = (measure(compare(tested, cluster, program).outcomes) for program in (start, result.software))
    return len(fitted), (before, after)


def main(words: list[str]) -> None:
    """Compute and print the lines that were asked for."""
    rows = read_rows(Path(words[0]))
    console = Console(width=150)
    table = Table("program", "fitted on", "rows", "predicted", "rows", "unfitted", "error", "bias", "ranks", "regret")
    for split in splits():
        if words[1:] and not any(part in split.program for part in words[1:]):
            continue
        count, (before, after) = held_out(split, rows)
        shares = (before.mean_abs_error, after.mean_abs_error, after.bias)
        ranks = "-" if after.rank_correlation is None else f"{after.rank_correlation:.3f}"
        regret = "-" if after.mean_top1_regret is None else f"{after.mean_top1_regret:.1%}"
        cells = [str(count), split.held_out, str(after.timed_rows), *(f"{share or 0:.1%}" for share in shares)]
        table.add_row(split.program, split.fitted, *cells, ranks, regret)
        console.print(f"{split.program}: {split.fitted} -> {split.held_out}: {after.mean_abs_error or 0:.1%}")
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
