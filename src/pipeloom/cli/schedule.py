"""``pipeloom schedule``: prints, draws and exports a schedule."""

import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.idle import each, given_in, idle_problems
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.config import decided_problems, in_order
from pipeloom.config.file import open_run_file
from pipeloom.errors import ConfigError, UserError
from pipeloom.export.torch_csv import format_torch_csv, parse_torch_csv
from pipeloom.families import FAMILIES
from pipeloom.predict.describe import with_model_sizes
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.recipe import Recipe, Sizes, schedule_text
from pipeloom.schedule import Schedule, format_schedule, read_schedule
from pipeloom.system.files import MOST_SCHEDULE_BYTES, read_text
from pipeloom.terminal.words import count, quoted
from pipeloom.trace import Trace
from pipeloom.trial import (
    STAGE_COSTS,
    Outcome,
    Trial,
    flag,
    trial_choice,
    trial_problems,
    trial_recipe,
    trial_title,
    try_out,
    with_same_work,
)
from pipeloom.workload.limits import Common, Names


@dataclass(frozen=True, kw_only=True)
class Options(Trial):
    """Options of ``pipeloom schedule``.

    Costs are in any unit of time; the forward of a stage takes 1 by default.
    """

    family: Annotated[str | None, Place("FAMILY"), Names("families")] = None
    """Name of a schedule, or a file with one: text with one row per rank, or PyTorch's CSV (.csv)."""
    run: Common[Path | None] = None
    """Print the schedule of this run file instead, which `pipeloom train` executes. With --format text it has the
    format of schedule.txt in a run folder."""
    format: Common[Literal["text", "json", "torch-csv"] | None] = None
    """Output format. text: every action of every rank. json: for programs. torch-csv: for PyTorch's pipelining runtime.
    None: text, without the actions if they do not fit the screen."""
    json: bool = False
    """The same as --format json."""
    plot: Common[Annotated[Path | None, Output("picture")]] = None
    """Draw the schedule to this .png, .svg or .pdf file."""
    beside: Common[Annotated[str | None, Names("families")]] = None
    """With --plot: another schedule, drawn below the first. Its stages cost so much that ranks do the same work."""


def _without_clock(options: Options) -> str:
    """That a form without times has no use for costs, unless they place moves or are drawn."""
    form = "json" if options.json else options.format
    is_timed = options.plot is not None or options.balance or options.offload
    if is_timed or not (form == "torch-csv" or (form == "text" and options.run is not None)):
        return ""
    return f"with --format {form}" + (" of a run" if form == "text" else "")


COMMAND = Command(
    name="schedule",
    options=Options,
    examples={
        "pipeloom schedule 1f1b --pp 4 --num-microbatches 8": "actions, bubble, memory",
        "pipeloom schedule breadth-first --loops 4 --plot both.svg --beside 1f1b": "a picture of both",
        "pipeloom schedule --run run.toml": "the schedule that a run executes",
    },
    idle=each(STAGE_COSTS, _without_clock),
    repeatable=("keep",),
)


def run(words: list[str]) -> int:
    """Parse the arguments, make the schedule, print it."""
    options, problems = read_flags(COMMAND, words)
    problems += idle_problems(COMMAND, words)
    checked = given_in(COMMAND, words)
    made = or_note(lambda: _recipes(_first_of_two(options), checked), problems)
    if problems or made is None:
        raise ConfigError(problems, SOURCE)
    recipe, sizes = made
    outcome = try_out(options, recipe, sizes, checked)
    schedule = outcome.schedule
    title = trial_title(options, (options.run or Path(options.family or "")).name, schedule)
    other = None if options.beside is None else _tried_beside(options, options.beside, schedule)
    form = "json" if options.json else options.format
    if form == "torch-csv":
        print(format_torch_csv(schedule), end="")
    elif form == "text" and options.run is not None:
        print(schedule_text(recipe, schedule, sizes), end="")
    elif form == "json":
        tree = to_json(outcome)
        rows = ",\n    ".join(json.dumps(row) for row in tree.pop("rows"))
        # A row a line: json.dumps writes all on one line, or each action on its own.
        print(f'{{"rows": [\n    {rows}\n], {json.dumps(tree)[1:]}')
    else:
        _print_text(title, schedule, outcome.lines(), is_whole=form == "text")
        if other is not None:
            print()
            _print_text(other[0], other[1].schedule, other[1].lines(), is_whole=form == "text")
    if options.plot is not None:
        panels = [(title, outcome), *([] if other is None else [other])]
        traces = {name: one.trace for name, one in panels}
        # Standard output is the data of another program with these forms.
        _draw(options.plot, traces, sys.stderr if form in ("json", "torch-csv") else sys.stdout)
    return 0


def _is_looped(name: str | None) -> bool:
    """Whether a name is a family of any number of loops."""
    return name in FAMILIES and FAMILIES[name].is_looped and FAMILIES[name].loops is None


def _first_of_two(options: Options) -> Options:
    """The options of the first schedule: of two, loops are for the one that takes several."""
    is_others = options.family in FAMILIES and not _is_looped(options.family) and _is_looped(options.beside)
    return replace(options, loops=None) if is_others else options


def _draw(file: Path, traces: dict[str, Trace], output: TextIO) -> None:
    from pipeloom.plotting.timelines import plot_timelines

    plot_timelines(traces, [file], unit="units of cost")
    print(f"{'# ' if output is sys.stdout else ''}picture            {file}", file=output)


def _recipes(options: Options, checked: Collection[str]) -> tuple[Recipe, Sizes | None]:
    """The recipe of the options, or that of a run file with the bytes of its stages.

    Args:
        options: of the command.
        checked: names of those on the command line, which must have an effect.
    """
    return (_recipe(options, checked), None) if options.run is None else _run_recipe(options, options.run, checked)


def _tried_beside(options: Options, family: str, first: Schedule) -> tuple[str, Outcome]:
    """The title and the outcome of another family with the sizes of the options and the same work for each rank."""
    loops = options.loops if _is_looped(family) else None
    trial = replace(options, family=family, loops=loops, placement=None, group_size=None, keep=None)
    trial = with_same_work(trial, trial.pp * trial_choice(trial).loops, first.num_stages)
    # Options are for both, and have an effect on the first.
    outcome = try_out(trial, trial_recipe(trial, checked=()), checked=())
    return trial_title(trial, family, outcome.schedule), outcome


def _run_recipe(options: Options, file: Path, checked: Collection[str]) -> tuple[Recipe, Sizes]:
    """The recipe of a run file, with the bytes of its stages."""
    problems = [*_option_problems(options, checked), *_unused_problems("the run", _MAKE, checked)]
    problems += [f"FAMILY {options.family} has no effect with --run; leave one out"] if options.family else []
    config, found, given = open_run_file(file)
    config, unknown = with_model_sizes(config, given)
    problems += in_order([*found, *unknown, *decided_problems(config, trains=False, is_model_known=not unknown)])
    if problems:
        raise ConfigError(problems, str(file))
    return config.recipe(), sizes_in_training(config)


_SIZES = ("pp", "loops", "num_microbatches", "group_size", "placement", "keep")
_MAKE = (
    *_SIZES, "slices", "tied", "communication", "receive_buffers", "unshard", "prefetch", "reduce_grad",
    "split_backward", "gradient_buffers", "update", "resident", "balance", "offload", "budget",
)  # fmt: skip
"""Options that define a schedule."""


def _recipe(options: Options, checked: Collection[str]) -> Recipe:
    """The recipe of a family with its sizes, or of the schedule of a file."""
    problems = _option_problems(options, checked)
    if options.family is None:
        problems.append("expected FAMILY, a family or a file with a schedule, or --run")
        raise ConfigError(problems, SOURCE)
    file = Path(options.family)
    if file.suffix == ".toml":
        raise ConfigError([f"{file} is a run file by its name; write --run {quoted(file)}"], SOURCE)
    is_family = options.family in FAMILIES or not (os.sep in options.family or file.suffix or _is_file(file))
    problems += trial_choice(options).problems() if is_family else _unused_problems(str(file), _SIZES, checked)
    if problems:
        raise ConfigError(problems, SOURCE)
    if is_family:
        return trial_recipe(options, checked=checked)
    given = _read_csv(file) if file.suffix == ".csv" else read_schedule(file).schedule
    return trial_recipe(options, given, checked)


def _option_problems(options: Options, checked: Collection[str]) -> list[str]:
    is_torn = options.json and options.format not in (None, "json")
    problems = [f"--json and --format {options.format} disagree; choose one"] if is_torn else []
    if options.communication and options.plot is not None:
        problems.append("--communication adds messages, which --plot does not draw; leave one of them out")
    if options.beside is not None:
        if options.plot is None:
            problems.append("--beside has no effect without --plot; give both or leave it out")
        if options.run is not None or options.family not in FAMILIES:
            problems.append("--beside compares two families, and a file or a run has sizes of its own; leave it out")
        if options.beside not in FAMILIES:
            problems.append(f"--beside: {FAMILIES.unknown(options.beside)}")
    return [*problems, *trial_problems(options, checked)]


def _unused_problems(where: str, names: Sequence[str], checked: Collection[str]) -> list[str]:
    """Options that have no effect, since a file contains the schedule."""
    flags = [flag(name) for name in names if name in checked]
    has, them = ("has", "it") if len(flags) == 1 else ("have", "them")
    what = f"so {', '.join(flags)} {has} no effect; leave {them} out"
    return [f"{where} contains the whole schedule, {what}"] if flags else []


def _read_csv(file: Path) -> Schedule:
    text = read_text(file, "the schedule", MOST_SCHEDULE_BYTES)
    try:
        return parse_torch_csv(text)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def to_json(outcome: Outcome) -> dict[str, Any]:
    """What ``--json`` prints: ``rows`` (for each pipeline rank its actions), and the figures of the outcome."""
    return {"rows": [[str(action) for action in row] for row in outcome.schedule.rows], **outcome.figures}


_SCREEN = 8000
"""Characters of rows that are printed unasked: a screen of 200 columns and 40 lines."""
_MOST_WORDS = 32
"""Values by rank or by stage that are printed beside rows that are not."""


def _print_text(title: str, schedule: Schedule, lines: dict[str, str], *, is_whole: bool) -> None:
    rows = format_schedule(schedule)
    is_whole = is_whole or len(rows) <= _SCREEN
    left_out = (
        f"# rows               {schedule.num_actions:,} actions on {count(schedule.num_ranks, 'rank')}, more than a "
        "screen shows; --format text > FILE writes them all\n"
    )
    print(f"# {title}\n{rows if is_whole else left_out}")
    for name, value in lines.items():
        print(f"# {name:<18} {value if is_whole else _shortened(value)}")


def _shortened(line: str) -> str:
    """A line of many values with those in its middle left out; what follows them in brackets stays."""
    values, bracket, rest = line.partition(" (")
    words = values.split(" ")
    if len(words) <= _MOST_WORDS:
        return line
    half = _MOST_WORDS // 2
    return f"{' '.join([*words[:half], '...', *words[-half:]])}{bracket}{rest}"
