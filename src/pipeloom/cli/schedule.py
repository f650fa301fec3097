"""``pipeloom schedule``: what a family's schedule looks like, before anything runs."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from pipeloom.cli.flags import parse_flags
from pipeloom.config import find_problems
from pipeloom.config.file import read_run_file
from pipeloom.errors import ConfigError, UserError
from pipeloom.export.torch_csv import format_torch_csv, parse_torch_csv
from pipeloom.families import FAMILIES
from pipeloom.predict.describe import with_model_sizes
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.recipe import Recipe, Sizes, schedule_text
from pipeloom.schedule import Schedule, format_schedule, read_schedule
from pipeloom.system.files import MOST_SCHEDULE_BYTES, read_text
from pipeloom.terminal.words import count
from pipeloom.trial import Outcome, Trial, flag, trial_choice, trial_problems, trial_recipe, trial_title, try_out


@dataclass(frozen=True, kw_only=True)
class Options(Trial):
    """Print a schedule, its bubble and its memory on a clock of unit costs."""

    family: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="FAMILY")] = None
    """A family by name, or a file with a schedule as text (one row a line) or as PyTorch's CSV (.csv)."""
    run: Path | None = None
    """A run file, whose schedule is printed instead: the one that `pipeloom train` executes. With --format text as the
    file that the run's folder has."""
    format: Literal["text", "json", "torch-csv"] | None = None
    """text: every action of every rank; json for programs; torch-csv for PyTorch's pipelining runtime. None: text,
    without the actions where they are more than a screen shows."""
    json: bool = False
    """The same as --format json."""
    plot: Path | None = None
    """Draw the schedule to this file: .png, .svg or .pdf; prints where it is."""


def run(words: list[str]) -> int:
    """Parse the arguments, make the schedule, print it."""
    families = "\n".join(f"  {item.name:<15}{item.summary}" for item in FAMILIES.values())
    options = parse_flags(Options, words, "schedule", f"{Options.__doc__}\n\nFamilies:\n{families}")
    recipe, sizes = (_recipe(options), None) if options.run is None else _run_recipe(options, options.run)
    outcome = try_out(options, recipe, sizes)
    schedule, trace = outcome.schedule, outcome.trace
    title = trial_title(options, (options.run or Path(options.family or "")).name, schedule)
    if options.plot is not None:
        from pipeloom.plotting.draw import plot_timeline

        plot_timeline(trace, [options.plot], title=title, unit="units of cost")
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
    if options.plot is not None:
        is_data = form in ("json", "torch-csv")
        # Standard output is the data of another program then.
        print(f"{'' if is_data else '# '}picture            {options.plot}", file=sys.stderr if is_data else sys.stdout)
    return 0


def _run_recipe(options: Options, file: Path) -> tuple[Recipe, Sizes]:
    """The recipe of a run file, with the bytes of its stages."""
    problems = [*_option_problems(options), *_unused_problems(options, file, _MAKE)]
    problems += [f"FAMILY {options.family} has no effect with --run; leave one out"] if options.family else []
    config, found = read_run_file(file)
    config, unknown = with_model_sizes(config)
    problems += [*found, *unknown, *find_problems(config, trains=False, is_model_known=not unknown)]
    if problems:
        raise ConfigError(problems, str(file))
    return config.recipe(), sizes_in_training(config)


_SIZES = ("pp", "loops", "microbatches", "group_size", "placement", "keep")
_MAKE = (
    *_SIZES, "slices", "tied", "communication", "receive_buffers", "unshard", "prefetch", "reduce_grad",
    "split_backward", "gradient_buffers", "update", "resident", "balance", "offload", "budget",
)  # fmt: skip
"""Options that define a schedule."""


def _recipe(options: Options) -> Recipe:
    """The recipe of a family with its sizes, or of the schedule of a file."""
    problems = _option_problems(options)
    if options.family is None:
        problems.append("expected FAMILY, a family or a file with a schedule, or --run")
        raise ConfigError(problems, "the command line")
    file = Path(options.family)
    is_family = options.family in FAMILIES or not (os.sep in options.family or file.suffix or _is_file(file))
    problems += trial_choice(options).problems() if is_family else _unused_problems(options, file, _SIZES)
    if problems:
        raise ConfigError(problems, "the command line")
    if is_family:
        return trial_recipe(options)
    return trial_recipe(options, _read_csv(file) if file.suffix == ".csv" else read_schedule(file).schedule)


def _option_problems(options: Options) -> list[str]:
    is_torn = options.json and options.format == "torch-csv"
    return [*(["--json and --format torch-csv disagree; choose one"] if is_torn else []), *trial_problems(options)]


def _unused_problems(options: Options, file: Path, names: Sequence[str]) -> list[str]:
    """Options that have no effect, since a file contains the schedule."""
    flags = ", ".join(flag(name) for name in names if getattr(options, name) != getattr(Options, name))
    return [f"{file} contains the whole schedule, so {flags} has no effect; leave it out"] if flags else []


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
