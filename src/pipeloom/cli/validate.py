"""``pipeloom validate``: predictions compared with published measurements."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pipeloom.accuracy.compare import Comparison, compare, compare_stage_times, rankings
from pipeloom.accuracy.programs import program_of
from pipeloom.accuracy.rows import Row, read_rows
from pipeloom.catalog import load_cluster, load_software, source_of
from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.idle import beside, each, idle_problems, without
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.errors import ConfigError, UserError
from pipeloom.system.garbage import few_collections
from pipeloom.terminal.console import Columns, print_table, table_of, wide_console
from pipeloom.terminal.words import count
from pipeloom.workload.limits import ClusterName, Common, ProgramName
from pipeloom.workload.run import Attention

if TYPE_CHECKING:
    from pipeloom.accuracy.fit import Fit


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom validate``.

    Predicts each row of the table and prints the errors.
    """

    table: Annotated[Path | None, Place("TABLE.csv")] = None
    """Measured layouts. docs/accuracy.md lists the columns."""
    stage_times: Path | None = None
    """Instead: a table of measured stage times, to test the event simulation alone."""
    sets: Common[tuple[str, ...]] = ()
    """Only sets whose names begin with one of these. None: all."""
    models: Common[tuple[str, ...]] = ()
    """Only rows of these models. With --fit these are the rows to fit, and the others are held out. None: all."""
    attentions: tuple[Attention, ...] = ()
    """Only rows with one of these attention kernels, since some sets have runs of two programs. None: all."""
    cluster: Common[ClusterName | None] = None
    """Cluster for every row: a name of the catalog, or a file. None: by the device of the row, also with --fit."""
    software: Common[ProgramName | None] = None
    """Training program for every row: a name of the catalog, or a file. With --fit, the program with
    the initial efficiencies. None: by the set of the row; with --fit general values, which do not depend on held-out
    rows."""
    fit: Common[Annotated[Path | None, Output("file")]] = None
    """Fit a program to the rows and write it to this file, which --software takes. Adjusts the efficiencies of
    the program to minimize the errors of step times."""
    parameters: tuple[str, ...] = ()
    """With --fit: only these efficiencies. None: all that the rows depend on."""
    groups: Common[bool] = False
    """Also print each group of competing layouts, and the layout that is predicted to be the fastest."""
    json: Common[bool] = False
    """Print JSON for programs: summary, sets, and rows that were not predicted; with --fit errors and efficiencies."""
    plot: Common[Annotated[Path | None, Output("picture")]] = None
    """Draw predicted against measured to this .png, .svg or .pdf file."""


COMMAND = Command(
    name="validate",
    options=Options,
    examples={
        "pipeloom validate measured.csv --plot accuracy.svg": "every row, with a picture",
        "pipeloom validate measured.csv --fit program.toml": "fit a training program to the rows",
    },
    idle={
        **each(("sets", "models", "attentions", "cluster", "software", "fit"), beside("stage_times")),
        "parameters": (beside("stage_times"), without("fit")),
        # A fit compares no layouts; --software with its file does.
        "groups": (beside("stage_times"), beside("fit"), beside("json")),
        "plot": (beside("stage_times"), beside("fit")),
    },
)


def run(words: list[str]) -> int:
    """Parse the arguments, predict, print."""
    options, problems = read_flags(COMMAND, words)
    if (options.table is None) == (options.stage_times is None):
        problems.append("expected one table: TABLE.csv, or --stage-times TABLE.csv")
    problems += idle_problems(COMMAND, words)
    skipped: dict[str, int] = {}
    table = None if options.table is None else or_note(lambda: read_rows(Path(options.table or ""), skipped), problems)
    unread = f"; not predicted: {'; '.join(skipped)}" if skipped else ""
    if table is not None:
        problems += [f"no row of {options.table} has {one}{unread}" for one in _unmatched(table, options)]
    if problems:
        raise ConfigError(problems, SOURCE)
    if options.stage_times is not None:
        _print_stage_times(compare_stage_times(options.stage_times), as_json=options.json)
        return 0
    rows = [row for row in table or () if all(any(map(of(row), wanted)) for _, wanted, of in _filters(options))]
    if not rows:
        raise UserError(
            f"no row of {options.table} is left: check --sets, --models and --attentions against its columns{unread}"
        )
    if options.fit is not None:
        _fit(options, rows, skipped)
        return 0
    with few_collections():
        answer = _compare(options, rows)
    answer = replace(answer, skipped=skipped | answer.skipped)
    if not answer.outcomes:
        raise UserError(f"no row of {options.table} can be predicted: {'; '.join(answer.skipped)}")
    _show(options, answer)
    return 0


def _show(options: Options, answer: Comparison) -> None:
    """Print and draw errors."""
    if options.plot is not None:
        from pipeloom.accuracy.compare import parts_of

        # matplotlib is slow to import.
        from pipeloom.plotting.charts import plot_accuracy

        points = {
            name: [(o.row.step_time_s, o.step_time_s) for o in part if o.row.step_time_s is not None]
            for name, part in parts_of(answer.outcomes).items()
        }
        plot_accuracy(points, options.plot)
    tree = answer.to_json()
    if options.json:
        print(json.dumps(tree, indent=2))
    else:
        _print_table(tree)
        if options.groups:
            _print_groups(answer)


_Filter = tuple[str, tuple[str, ...], Callable[[Row], Callable[[str], bool]]]
"""A flag, its values, and from a row to whether it has a value."""


def _filters(options: Options) -> list[_Filter]:
    """The filters of rows that are given."""
    found: list[_Filter] = [
        ("--sets", options.sets, lambda row: row.set_name.startswith),
        ("--models", options.models, lambda row: row.run.shape.name.__eq__),
        ("--attentions", options.attentions, lambda row: row.run.attention.__eq__),
    ]
    return [one for one in found if one[1]]


def _unmatched(rows: Sequence[Row], options: Options) -> Iterator[str]:
    """Values of filters that no row has, with their flag."""
    for flag, values, of in _filters(options):
        if wrong := [value for value in dict.fromkeys(values) if not any(of(row)(value) for row in rows)]:
            yield f"{flag} {' '.join(wrong)}"


def _compare(options: Options, rows: Sequence[Row]) -> Comparison:
    cluster = load_cluster(options.cluster) if options.cluster else None
    software = load_software(options.software) if options.software else None
    return compare(rows, cluster, software)


def _fit(options: Options, chosen: list[Row], skipped: dict[str, int]) -> None:
    """Fit a program to rows, write and print it."""
    from pipeloom.accuracy.fit import first_guess, fit, write
    from pipeloom.accuracy.prior import shipped

    assert options.fit is not None
    prior = shipped()
    if options.software:
        name, start = options.software, load_software(options.software)
    else:
        name, software = program_of(chosen[0])
        # Not from the program's own values: they may have been fitted to the rows that are now held out.
        start = first_guess(software, prior)
        others = sorted({other for row in chosen if (other := program_of(row)[0]) != name})
        if others:
            raise UserError(
                f"the rows belong to several programs ({', '.join([name, *others])}), and one file holds one: "
                "choose rows with --sets and --attentions, or take one program for all with --software"
            )
    cluster = load_cluster(options.cluster) if options.cluster else None
    result = fit(chosen, cluster, start, options.parameters, prior=prior)
    assert options.table is not None
    write(result, options.fit, options.table.name, source_of("software", name))
    if options.json:
        print(json.dumps(_fit_to_json(name, result, options.fit) | {"skipped": skipped}, indent=2))
        return
    print(
        f"{name} on {result.cluster.name}: {len(result.rows)} rows, mean absolute error {result.error_before:.2%} "
        f"before and {result.error_after:.2%} after; written to {options.fit}"
    )
    for parameter, began in result.starts.items():
        edge = "  at the edge of what is possible" if parameter in result.at_bounds else ""
        print(f"  {parameter:<20}{began:>10.4g} -> {getattr(result.software.efficiency, parameter):<10.4g}{edge}")
    _print_skipped(skipped)


def _fit_to_json(name: str, result: "Fit", file: Path) -> dict[str, Any]:
    """What ``--fit --json`` prints, without the rows that were skipped."""
    return {
        "program": name,
        "cluster": result.cluster.name,
        "rows": len(result.rows),
        "error_before": result.error_before,
        "error_after": result.error_after,
        "file": str(file),
        "efficiencies": {
            parameter: {
                "before": began,
                "after": getattr(result.software.efficiency, parameter),
                "is_at_bound": parameter in result.at_bounds,
            }
            for parameter, began in result.starts.items()
        },
    }


def _share(value: float) -> str:
    return f"{value:.1%}"


_COLUMNS: Columns = {
    "rows": ("rows", str),
    "timed_rows": ("timed", str),
    "mean_abs_error": ("mean", _share),
    "median_abs_error": ("median", _share),
    "p90_abs_error": ("p90", _share),
    "bias": ("bias", _share),
    "rank_correlation": ("ranks", "{:.3f}".format),
    "mean_top1_regret": ("regret", _share),
    "mean_top3_regret": ("of 3", _share),
    "oom_agreement": ("oom", _share),
    "memory_mean_abs_error": ("memory", _share),
}


def _print_table(tree: dict[str, Any]) -> None:
    whole, quiet = tree["summary"], tree["undisturbed"]
    lines = {"all": whole}
    if num_disturbed := whole["rows"] - quiet["rows"]:
        lines["undisturbed"] = quiet
    if num_observed := tree["observed"]["rows"]:
        lines |= {"observed": tree["observed"], "others": tree["physics"]}
    for name, part in tree["sets"].items():
        lines[name] = part
        if name in tree["undisturbed_sets"]:
            lines[f"{name}, undisturbed"] = tree["undisturbed_sets"][name]
    print_table(wide_console(), table_of(lines, _COLUMNS))
    oom = "; in {} a layout that ran out of memory was ranked before it".format(whole["oom_first"])
    print("# mean, median, p90: |predicted / measured - 1| of the step time; regret: how much slower, as measured, the")
    print("# layout ranked first is than the fastest, mean over groups of one set, model, sequence length, number of")
    print(
        "# devices, batch, precision and kernels "
        f"({count(whole['groups'], 'group')}{oom if whole['oom_first'] else ''})"
    )
    print("# of 3: the same for the fastest of the three that are ranked first")
    if num_disturbed:
        print(f"# undisturbed: without {count(num_disturbed, 'run')} that disagrees with its neighbors in the table")
    if num_observed:
        print(f"# observed: {count(num_observed, 'row')} whose prediction contains an observation about this model")
    _print_skipped(tree["skipped"])


def _print_skipped(skipped: dict[str, int]) -> None:
    for reason, number in skipped.items():
        print(f"# {count(number, 'row')} not predicted: {reason}")


def _print_groups(answer: Comparison) -> None:
    for ranking in rankings(answer.outcomes):
        group, regret = ranking.group, ranking.regret
        norm = "fused norm" if group.fused_norm else "plain norm"
        print(
            f"{group.set_name}/{group.model}, {group.seq} tokens, {group.devices} devices, batch {group.global_batch}, "
            f"{group.attention}, {norm}, {group.precision}: {ranking.layouts} layouts, regret {regret:.1%}"
        )
        for name, row in (("first", ranking.first), *([("fastest", ranking.fastest)] if regret > 0 else [])):
            run = row.run
            more = " sequence parallel" * run.sequence_parallel
            more += f" {run.recompute} recomputation" * (run.recompute != "none")
            print(
                f"  {name:<9}{row.step_time_s:.3f} s: {run.axes.words(joint=' ')} loops {run.loops} "
                f"micro-batch {run.micro_batch} {row.schedule} shard {run.shard}{more}"
            )
        if ranking.is_first_oom:
            print("  one that ran out of memory was predicted to fit and to be faster")


def _print_stage_times(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    for row in answer["rows"]:
        print(f"measured {row['measured_s']:.4f} s, predicted {row['predicted_s']:.4f} s, {row['error']:+.2%}")
    print(f"# largest error {answer['summary']['max_abs_error']:.2%}")
