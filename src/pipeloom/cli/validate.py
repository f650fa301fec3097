"""``pipeloom validate``: predictions held against published measurements."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeloom.catalog import load_cluster, load_software
from pipeloom.errors import UserError
from pipeloom.validate.compare import Comparison, cluster_of, compare, compare_stage_times, program_of
from pipeloom.validate.measures import Measures, measure
from pipeloom.validate.rows import Row, read_rows


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict every row of a table of measurements and say how far off the predictions are."""

    table: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE.csv")] = None
    """Measured layouts; docs/accuracy.md lists the columns."""
    stage_times: Path | None = None
    """Instead: a table of measured stage times, which tests the event simulation alone."""
    sets: tuple[str, ...] = ()
    """Only sets whose names begin with one of these."""
    models: tuple[str, ...] = ()
    """Only these models. With --fit: the rows to fit; the others are held out."""
    cluster: str | None = None
    """A cluster of the catalog or a file, for every row. None: chosen by the row's device."""
    software: str | None = None
    """A program of the catalog or a file, for every row. None: chosen by the row's set."""
    fit: Path | None = None
    """Calibrate the program's efficiencies on the rows and write them to this file."""
    parameters: tuple[str, ...] = ()
    """With --fit: only these efficiencies. None: all."""
    json: bool = False
    """Print JSON: summary, sets, and rows that were not predicted."""
    plot: Path | None = None
    """Draw predicted against measured to this file: .png, .svg or .pdf."""


def run(words: list[str]) -> int:
    """Parse the arguments, predict, print."""
    options = tyro.cli(Options, args=words, prog="pipeloom validate", description=Options.__doc__)
    if (options.table is None) == (options.stage_times is None):
        raise UserError("expected one table: TABLE.csv, or --stage-times TABLE.csv")
    if options.stage_times is not None:
        _print_stage_times(compare_stage_times(options.stage_times), as_json=options.json)
        return 0
    assert options.table is not None
    rows = [
        row
        for row in read_rows(options.table)
        if not options.sets or any(row.set_name.startswith(begin) for begin in options.sets)
    ]
    if options.fit is not None:
        return _fit(options, rows)
    if options.models:
        rows = [row for row in rows if row.run.shape.name in options.models]
    if not rows:
        raise UserError(f"no row of {options.table} is in the sets and models that were asked for")
    answer = _compare(options, rows)
    if options.plot is not None:
        from pipeloom.plot import plot_accuracy
        from pipeloom.validate.compare import parts_of

        points = {
            name: [(o.row.step_time_s, o.step_time_s) for o in part if o.row.step_time_s is not None]
            for name, part in parts_of(answer.outcomes).items()
        }
        plot_accuracy(points, options.plot)
    if options.json:
        print(json.dumps(answer.to_json(), indent=2))
    else:
        _print_table(answer)
    return 0


def _compare(options: Options, rows: Sequence[Row]) -> Comparison:
    cluster = load_cluster(options.cluster) if options.cluster else None
    software = load_software(options.software) if options.software else None
    return compare(rows, cluster, software)


def _fit(options: Options, rows: list[Row]) -> int:
    from pipeloom.validate.fit import fit, to_toml

    assert options.fit is not None
    chosen = [row for row in rows if not options.models or row.run.shape.name in options.models]
    if not chosen:
        raise UserError("no row is left to fit: check --sets and --models")
    name, software = program_of(chosen[0])
    if options.software:
        name, software = options.software, load_software(options.software)
    else:
        chosen = [row for row in chosen if program_of(row)[0] == name]
    cluster = load_cluster(options.cluster) if options.cluster else cluster_of(chosen[0], software)
    result = fit(chosen, cluster, software, options.parameters)
    sets = ", ".join(sorted({f"{row.set_name}/{row.run.shape.name}" for row in chosen}))
    try:
        options.fit.write_text(to_toml(result, f"pipeloom validate --fit on {sets}:"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {options.fit}: {error}") from error
    print(f"{name}: fitted on {result.rows} rows, mean absolute error {result.mean_abs_error:.2%}, in {options.fit}")
    return 0


_HEADER = ("rows", "timed", "mean", "median", "p90", "bias", "ranks", "regret", "oom", "memory")


def _print_table(answer: Comparison) -> None:
    parts = {"all": measure(answer.outcomes), **answer.by_set}
    width = max(map(len, parts))
    print(" " * width + "".join(f"{name:>9}" for name in _HEADER))
    for name, part in parts.items():
        print(f"{name:<{width}}" + "".join(f"{cell:>9}" for cell in _cells(part)))
    print("# mean, median, p90: |predicted / measured - 1| of the step time; regret: of the layout ranked first")
    for schedule, count in answer.skipped.items():
        print(f"# {count} rows were not predicted: no family makes the schedule '{schedule}' in their size")


def _cells(part: Measures) -> list[str]:
    shares = (part.mean_abs_error, part.median_abs_error, part.p90_abs_error, part.bias)
    later = (part.mean_top1_regret, part.oom_agreement, part.memory_mean_abs_error)
    ranks = "-" if part.rank_correlation is None else f"{part.rank_correlation:.3f}"
    return [str(part.rows), str(part.timed_rows), *map(_percent, shares), ranks, *map(_percent, later)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _print_stage_times(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    for row in answer["rows"]:
        print(f"measured {row['measured_s']:.4f} s, predicted {row['predicted_s']:.4f} s, {row['error']:+.2%}")
    print(f"# largest error {answer['summary']['max_abs_error']:.2%}")
