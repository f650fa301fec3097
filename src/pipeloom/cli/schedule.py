"""``pipeloom schedule``: what a family's schedule looks like, before anything runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from pipeloom.cost.costs import UniformCosts
from pipeloom.errors import ConfigError, UserError
from pipeloom.generate import FAMILIES, Choice
from pipeloom.report import Summary, summarize
from pipeloom.schedule import Schedule, format_schedule, format_torch_csv, lower, parse_schedule, parse_torch_csv
from pipeloom.simulate import simulate
from pipeloom.trace import Trace
from pipeloom.words import count


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print a schedule, its bubble and its memory on a clock of unit costs."""

    family: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FAMILY")]
    """A family by name, or a file with a schedule as text (one row a line) or as PyTorch's CSV (.csv)."""
    pp: int = 4
    """Pipeline ranks."""
    loops: int = 1
    """Stages on each pipeline rank."""
    microbatches: int = 8
    """Micro-batches of a step."""
    group_size: int | None = None
    """Micro-batches that go through one local stage before the next; hybrid only. None: pp."""
    placement: str | None = None
    """Stage -> rank: looped, v or linear. None: looped."""
    forward: float = 1.0
    """Cost of one stage's forward for one micro-batch."""
    backward: float = 2.0
    """Cost of one stage's backward for one micro-batch."""
    transfer: float = 0.0
    """Cost of moving one tensor between two ranks; draws on the rank's lane for that edge, not on its compute."""
    communication: bool = False
    """Add the sends and receives."""
    receive_buffers: int = 2
    """Receives posted ahead for each directed edge; with --communication."""
    format: Literal["text", "json", "torch-csv"] = "text"
    """text for people; json for programs; torch-csv for PyTorch's pipelining runtime."""
    json: bool = False
    """The same as --format json."""
    plot: Path | None = None
    """Draw the schedule to this file: .png, .svg or .pdf."""


def run(words: list[str]) -> int:
    """Parse the arguments, make the schedule, print it."""
    families = "\n".join(f"  {item.name:<15}{item.summary}" for item in FAMILIES.values())
    options = tyro.cli(
        Options, args=words, prog="pipeloom schedule", description=f"{Options.__doc__}\n\nFamilies:\n{families}"
    )
    schedule = _schedule(options)
    if options.communication or options.transfer:
        schedule = lower(schedule, options.receive_buffers)
    costs = UniformCosts(options.forward, options.backward, options.transfer)
    trace = simulate(schedule, costs)
    if options.plot is not None:
        _plot(options, schedule, trace)
    form: str = "json" if options.json else options.format
    if form == "torch-csv":
        print(format_torch_csv(schedule), end="")
    elif form == "json":
        print(_one_row_a_line(to_json(schedule, summarize(trace))))
    else:
        _print_text(options, schedule, summarize(trace))
    return 0


def to_json(schedule: Schedule, summary: Summary) -> dict[str, Any]:
    """What ``--json`` prints.

    Keys: ``rows`` (for each pipeline rank its actions), ``rank_by_stage``, ``num_microbatches``, ``level``,
    ``makespan``, ``bubble_overhead`` (idle / ideal), ``bubble_fraction`` (idle / total), ``peak_stage_inputs``
    (for each rank), ``gradients_final_at`` (for each stage; null where nothing trains).
    """
    return {
        "rows": [[str(action) for action in row] for row in schedule.rows],
        "rank_by_stage": list(schedule.placement.rank_by_stage),
        "num_microbatches": schedule.num_microbatches,
        "level": schedule.level.value,
        "makespan": summary.makespan_s,
        "bubble_overhead": summary.bubble_overhead,
        "bubble_fraction": summary.bubble_fraction,
        "peak_stage_inputs": list(schedule.peak_stage_inputs),
        "gradients_final_at": [summary.gradients_final_s.get(stage) for stage in range(schedule.num_stages)],
    }


def _one_row_a_line(tree: dict[str, Any]) -> str:
    rows = ",\n    ".join(json.dumps(row) for row in tree["rows"])
    rest = json.dumps({key: value for key, value in tree.items() if key != "rows"})
    return f'{{"rows": [\n    {rows}\n], {rest[1:]}'


def _option_problems(options: Options) -> list[str]:
    is_torn = options.json and options.format == "torch-csv"
    problems = ["--json and --format torch-csv disagree; choose one"] if is_torn else []
    return problems + [
        f"--{name} must be {'above' if name != 'transfer' else 'at least'} 0, found {value:g}"
        for name, value in (
            ("forward", options.forward),
            ("backward", options.backward),
            ("transfer", options.transfer),
        )
        if not (0 < value < float("inf") or (name == "transfer" and value == 0))
    ]


def _schedule(options: Options) -> Schedule:
    file, problems = Path(options.family), _option_problems(options)
    is_family = options.family in FAMILIES or not (_is_file(file) or file.suffix or len(file.parts) > 1)
    choice = Choice(
        family=options.family,
        pp=options.pp,
        num_microbatches=options.microbatches,
        loops=options.loops,
        group_size=options.group_size,
        placement=options.placement,
    )
    if is_family:
        problems += choice.problems()
    if problems:
        raise ConfigError(problems, "the command line")
    if is_family:
        return choice.make()
    _refuse_family_options(options, file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the schedule {file}: {error}") from error
    return parse_torch_csv(text) if file.suffix == ".csv" else parse_schedule(text)


def _refuse_family_options(options: Options, file: Path) -> None:
    names = ("pp", "loops", "microbatches", "group_size", "placement")
    given = [name for name in names if getattr(options, name) != getattr(Options, name)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{file} says what the schedule is, so {flags} has no effect; leave it out")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _title(options: Options, schedule: Schedule) -> str:
    backward = f", backward {options.backward:g}" if schedule.first_backward_stage < schedule.num_stages else ""
    return (
        f"{Path(options.family).name}: {count(schedule.num_stages, 'stage')} on "
        f"{count(schedule.num_ranks, 'pipeline rank')}, {count(schedule.num_microbatches, 'micro-batch')}; "
        f"forward {options.forward:g}{backward}"
    )


def _plot(options: Options, schedule: Schedule, trace: Trace) -> None:
    from pipeloom.plot import plot_timeline

    assert options.plot is not None
    plot_timeline(trace, [options.plot], title=_title(options, schedule), unit="units of cost")


def _print_text(options: Options, schedule: Schedule, summary: Summary) -> None:
    print(f"# {_title(options, schedule)}")
    print(format_schedule(schedule))
    print(f"# makespan           {summary.makespan_s:g}")
    print(f"# bubble overhead    {summary.bubble_overhead:.5g} (idle / ideal)")
    print(f"# bubble fraction    {summary.bubble_fraction:.5g} (idle / total)")
    print(f"# peak stage inputs  {' '.join(map(str, schedule.peak_stage_inputs))} (by rank)")
    if summary.gradients_final_s:
        final = " ".join(f"{time:g}" for time in summary.gradients_final_s.values())
        print(f"# gradients final at {final} (by stage)")
