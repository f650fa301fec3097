"""State of the page -> what it shows, computed by the functions of ``pipeloom schedule``."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeloom.analysis.comparison import MEMORY_UNIT, microbatches_over_time
from pipeloom.errors import ConfigError, PipeloomError, ScheduleError, ScheduleTextError, UserError
from pipeloom.export.torch_csv import format_torch_csv, parse_torch_csv
from pipeloom.families import FAMILIES
from pipeloom.plotting.timelines import timelines_svg
from pipeloom.report.contents import bubble_contents
from pipeloom.report.over_time import chart
from pipeloom.report.timeline import Unit, timeline_contents
from pipeloom.schedule import PLACEMENTS, Schedule, format_schedule, parse_schedule
from pipeloom.schedule.rules import RULES, rule_name
from pipeloom.terminal.words import count, quoted, unknown_name
from pipeloom.trial import Outcome, Trial, flag, trial_choice, trial_recipe, trial_title, try_out, with_same_work

UNITS = Unit("units", 1.0, 2)
"""Costs have no unit."""
MOST_ACTIONS = 50_000
"""Compute actions of a schedule, before passes add to it: an answer in a few seconds."""
MOST_RANKS = 256
"""More rows than a browser's canvas can hold with all their lanes, or a person can read."""
MOST_NUMBER = 1_000_000
"""Of any number that the page sends."""
TEXT = "text"
"""Name of the field that has a schedule as text."""
BESIDE = "beside"
"""Name of the field that has the number of stages of the schedule beside this one: costs are of a stage of that."""
TYPED = "schedule.txt"
"""The file that the equivalent command line names for a schedule that was typed."""

State = Mapping[str, Any]


@dataclass(frozen=True)
class Download:
    """A file for the browser to keep."""

    name: str
    media_type: str
    body: str


def choices() -> dict[str, Any]:
    """What the page offers: families with what they take, placements, defaults of all fields."""
    return {
        "families": [
            {
                "name": one.name,
                "summary": one.summary,
                "loops": one.loops if one.is_looped else 1,
                "grouped": one.is_grouped,
                "placement": one.placement,
                "trains": one.has_backward,
                "splits": one.splits_backward,
            }
            for one in FAMILIES.values()
        ],
        "placements": list(PLACEMENTS),
        "defaults": {**asdict(Trial()), "family": "breadth-first", TEXT: None},
    }


def answer(state: State, *, with_curves: bool = False) -> dict[str, Any]:
    """What the page shows for a state: the schedule's proof, figures and pictures, or ``problems``.

    Args:
        state: fields of ``Trial``; ``text``, a schedule as text or as PyTorch's CSV in place of a family; and
            ``beside``.
        with_curves: with the memory of each rank over time, a quarter of the work and of the bytes.
    """
    try:
        request, outcome = _outcome(state)
        tree = _contents(request, outcome)
        return tree | {"over_time": _curves(outcome)} if with_curves else tree
    except PipeloomError as error:
        return refusal(error)


def refusal(error: PipeloomError) -> dict[str, Any]:
    """Problems for the page: each a sentence and, where it is about one input, the name of that."""
    if isinstance(error, ConfigError):
        return {"problems": [{"field": field_of(text), "text": text} for text in error.problems]}
    if isinstance(error, ScheduleError):
        place = {"rank": error.rank, "slot": error.slot}
        return {"problems": [{"field": None, "text": str(error), "rule": error.rule, **place}]}
    field = TEXT if isinstance(error, ScheduleTextError) else field_of(str(error))
    return {"problems": [{"field": field, "text": str(error)}]}


def download(state: State, form: str) -> Download:
    """The schedule as a file.

    Args:
        state: as for ``answer``.
        form: ``svg``, ``txt`` or ``csv``.

    Raises:
        UserError: there is no such schedule, or the form cannot hold it.
    """
    request, outcome = _outcome(state)
    name = request.trial.family or "schedule"
    if form == "csv":
        return Download(f"{name}.csv", "text/csv", format_torch_csv(outcome.schedule))
    if form == "txt":
        return Download(f"{name}.txt", "text/plain", format_schedule(outcome.schedule))
    if form != "svg":
        raise UserError(f"expected svg, txt or csv, found {form!r}")
    picture = timelines_svg({_title(request.trial, outcome.schedule): outcome.trace}, unit="units of cost", scale=1.0)
    return Download(f"{name}.svg", "image/svg+xml", picture)


def command_of(state: State) -> str:
    """The command that prints the same: ``pipeloom schedule ...``."""
    return _command(_request(state))


def _command(request: "_Request") -> str:
    trial = request.trial
    words = ["pipeloom", "schedule", *([TYPED] if request.given is not None else [trial.family or ""])]
    for field in fields(Trial):
        value = getattr(trial, field.name)
        if field.name == "family" or value == field.default:
            continue
        values = value if isinstance(value, tuple) else (value,)
        words += [flag(field.name)] if value is True else [flag(field.name), *map(str, values)]
    return quoted(*words)


@dataclass(frozen=True)
class _Request:
    """What a state describes.

    Attributes:
        trial: the family with its sizes, and the costs of its stages.
        given: a schedule in place of the family.
        beside: number of stages of the schedule beside it.
    """

    trial: Trial
    given: Schedule | None
    beside: int | None

    @property
    def num_stages(self) -> int:
        """Stages of the schedule."""
        if self.given is not None:
            return self.given.num_stages
        return self.trial.pp * trial_choice(self.trial).loops


def _request(state: State) -> _Request:
    trial, text = _read(state)
    request = _Request(trial, None if text is None else _parsed(text), state.get(BESIDE))
    # Sizes below 1 are refused where the schedule is made.
    if request.beside is None or request.num_stages < 1:
        return request
    return replace(request, trial=with_same_work(trial, request.num_stages, request.beside))


def _outcome(state: State) -> tuple[_Request, Outcome]:
    request = _request(state)
    trial, given = request.trial, request.given
    # Before anything is made of it: a request must not keep the machine busy.
    sizes = (trial.pp, trial.loops or 1, trial.num_microbatches, trial.slices, 3)
    num_actions = trial.slices * given.num_actions if given is not None else prod(max(size, 1) for size in sizes)
    num_ranks = given.num_ranks if given is not None else trial.pp
    for name, number, what, most in (
        ("num_microbatches", num_actions, "about {:,} actions", MOST_ACTIONS),
        ("pp", num_ranks, "{:,} pipeline ranks", MOST_RANKS),
    ):
        if number > most:
            found, flagged = what.format(number), flag(name) if given is None else flag(TEXT)
            problem = f"{flagged}: {found} are more than the playground draws, {most:,}; use `pipeloom schedule`"
            raise ConfigError([problem])
    return request, try_out(trial, trial_recipe(trial, given))


_TRIAL = TypeAdapter(Trial)


def _read(state: State) -> tuple[Trial, str | None]:
    """The trial of a state, and its schedule as text.

    Raises:
        ConfigError: with a sentence for each field that is unknown or has a wrong value.
    """
    known = [field.name for field in fields(Trial)]
    every = [*known, TEXT, BESIDE]
    problems = [unknown_name("field", name[:60], every) for name in state if name not in every]
    text, beside = state.get(TEXT), state.get(BESIDE)
    if beside is not None and (type(beside) is not int or beside < 1):
        problems.append(f"{flag(BESIDE)} must be a number of stages, at least 1, found {beside!r:.60}")
    if text is not None and not isinstance(text, str):
        problems.append(f"--{TEXT} must be text, found {text!r:.60}")
    for name, value in state.items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, int | float) and abs(one) > MOST_NUMBER for one in values):
            problems.append(f"{flag(name)} must be at most {MOST_NUMBER:,} in the playground, found {value!r:.60}")
    wrong: dict[str, str] = {}
    chosen = {name: value for name, value in state.items() if name in known}
    try:
        trial = _TRIAL.validate_json(json.dumps(chosen), strict=True)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            name = str(one["loc"][0])
            # Of a field with several possible types each has a line; the first is enough.
            wrong.setdefault(name, f"{flag(name)}: {one['msg'].lower()}, found {chosen[name]!r:.60}")
        problems += wrong.values()
        trial = Trial()
    if not problems and (trial.family is None) == (text is None):
        problems.append("--family: expected a family or a schedule as text, and not both")
    if problems:
        raise ConfigError(problems, "the page")
    return trial, text


def _parsed(text: str) -> Schedule:
    # No action has a comma; rows of PyTorch's CSV have some, but for those of a single action; comments may have some.
    is_csv = any("," in line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return parse_torch_csv(text) if is_csv else parse_schedule(text)


_FIELDS: tuple[tuple[str, str | None], ...] = (
    ("no field '", None),
    ("no schedule '", "family"),
    ("group size", "group_size"),
    ("token slice", "slices"),
    ("placement", "placement"),
    ("keep", "keep"),
    ("loops", "loops"),
    ("stage on each rank", "loops"),
    ("stages on each rank", "loops"),
    ("micro-batch", "num_microbatches"),
    ("receive", "receive_buffers"),
    ("budget", "budget"),
    ("norm of the whole gradient", "update"),
    ("resident", "resident"),
    ("pp ", "pp"),
)
"""Words of sentences that name no flag, in the order in which they decide -> the input that a sentence is about."""


def field_of(sentence: str) -> str | None:
    """The input at which a problem is shown; ``None`` if it is about no single one."""
    known = {field.name for field in fields(Trial)} | {TEXT}
    for name in re.findall(r"--([a-z][a-z-]*)", sentence):
        if name.replace("-", "_") in known:
            return name.replace("-", "_")
    return next((field for words, field in _FIELDS if re.search(rf"\b{words}", sentence)), None)


def _title(trial: Trial, schedule: Schedule) -> str:
    return trial_title(trial, trial.family or TYPED, schedule)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _same_work(request: _Request) -> str | None:
    """What costs and a budget are of, where a schedule with other stages is beside this one."""
    if request.beside is None or request.beside == request.num_stages:
        return None
    trial = request.trial
    limit = "" if trial.budget is None else f", memory limit {trial.budget:g}"
    return (
        f"Costs and a memory limit are of the {count(request.beside, 'stage')} of A. The "
        f"{count(request.num_stages, 'stage')} here are the same model: forward {trial.forward:g}, backward "
        f"{trial.backward:g}{limit}."
    )


def _contents(request: _Request, outcome: Outcome) -> dict[str, Any]:
    trial, schedule, trace = request.trial, outcome.schedule, outcome.trace
    loops = schedule.num_stages / schedule.num_ranks
    figures, traces = outcome.figures, {"simulated": trace}
    return {
        "title": _title(trial, schedule),
        "command": _command(request),
        "num_stages": schedule.num_stages,
        "same_work": _same_work(request),
        "headline": [
            ["makespan", f"{figures['makespan']:g}", "units of cost"],
            ["bubble", f"{100 * figures['bubble_fraction']:.2f}%", "idle / total"],
            ["bubble overhead", f"{100 * figures['bubble_overhead']:.2f}%", "idle / ideal"],
            ["peak memory", f"{max(figures['memory'], default=0):g}", "micro-batches, of the rank with the most"],
        ],
        "lines": list(outcome.lines().items()),
        "proof": {
            "actions": schedule.num_actions,
            "rules": [[rule_name(rule), (rule.__doc__ or "").splitlines()[0]] for rule in RULES[schedule.level.value]],
        },
        "timeline": timeline_contents(traces, {"simulated": trial.family or TYPED}, UNITS),
        "bubble": bubble_contents({"simulated": outcome.accounts}, traces, _number, UNITS.name),
        "memory": {
            "by_rank": figures["memory"],
            # Given in stage inputs, of which a rank has one for each of its stages.
            "budget": None if trial.budget is None else trial.budget / loops,
            "unit": MEMORY_UNIT,
        },
    }


def _curves(outcome: Outcome) -> dict[str, Any]:
    inputs = {"simulated": [curve.points for curve in microbatches_over_time(outcome.schedule, outcome.trace)]}
    note = f"What a rank holds for backwards, in {MEMORY_UNIT}; what its partner evicted to it included."
    traces = {"simulated": outcome.trace}
    return chart("Memory over time", note, inputs, traces, peak="peak {:g}".format, unit=UNITS)
