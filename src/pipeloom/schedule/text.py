"""Schedules as text: what they promise, a line ``name = values`` each, then a row a line.

Every action is named as PyTorch names it (``2F0``). Placement, counts and level are read off the actions. Lines
``recipe.name = value`` define how a run's schedule was made.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeloom.calls import checked
from pipeloom.errors import ScheduleTextError, UserError
from pipeloom.schedule.action import Action
from pipeloom.schedule.file import PROMISES, ScheduleFile
from pipeloom.schedule.kinds import COMPUTE_KINDS, Kind
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Promise, Schedule
from pipeloom.system.files import MOST_SCHEDULE_BYTES, read_text
from pipeloom.terminal.words import count, unknown_name

_FOR_EACH = frozenset({"max_stage_inputs", "stage_sizes", "partners"})
"""Promises that are a number for each rank or stage."""
_RECIPE = "recipe."
_MOST_DIGITS = 15
"""Of a promised number, such as bytes; sums of some thousands of them are below 2 ** 63."""
_MOST_SHOWN = 60
_MOST_PROBLEMS = 20
_MOST_MISSING = 100_000
"""Largest number of missing forwards that the rules report one by one."""


@checked
def format_schedule(schedule: Schedule, recipe: Mapping[str, str] | None = None) -> str:
    """What is promised, then one line for each pipeline rank, actions separated by spaces.

    Examples:
        >>> from pipeloom import format_schedule, make_schedule
        >>> print(format_schedule(make_schedule("gpipe", pp=2, num_microbatches=2)))
        max_stage_inputs = 2 2
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        <BLANKLINE>

    Args:
        schedule: any.
        recipe: how it was made, by name.
    """
    head = {f"{_RECIPE}{name}": value for name, value in (recipe or {}).items()}
    for name in PROMISES:
        promised: Promise = getattr(schedule, name)
        if promised is not None:
            head[name] = " ".join(map(str, promised)) if isinstance(promised, tuple) else str(promised)
    rows = [" ".join(map(str, row)) for row in schedule.rows]
    return "\n".join([*(f"{name} = {value}" for name, value in head.items()), *rows, ""])


@checked
def parse_schedule(text: str) -> Schedule:
    r"""Read a schedule that is written as text, and verify it: a row of actions for each pipeline rank, a rank a line.

    ``format_schedule`` writes such text; ``parse_schedule_file`` also returns how a file's schedule was made.

    Examples:
        >>> from pipeloom import parse_schedule
        >>> parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
        Schedule(2 stages on 2 ranks, 2 micro-batches, 8 actions, level compute)
        >>> parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1")
        Traceback (most recent call last):
        ...
        pipeloom.errors.ScheduleError: ...

    Raises:
        ScheduleTextError: a line promises nothing or has something that is no action, or the rows name no placement.
        ScheduleError: the rows break a rule; names the rule and the place, and shows the rows around it.
    """
    return parse_schedule_file(text).schedule


def parse_schedule_file(text: str, name: str = "the schedule file") -> ScheduleFile:
    """Read what ``format_schedule`` writes. Lines that begin with ``#`` are comments.

    Args:
        text: of the file.
        name: of the file, for later messages.

    Raises:
        ScheduleTextError: a line promises nothing or has something that is no action, or the rows name no placement.
        ScheduleError: the rows break a rule.
    """
    problems: list[str] = []
    head: dict[str, str] = {}
    lines: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        # No action begins with it.
        if not words or words[0].startswith("#"):
            continue
        # No action is an equals sign, so that a promise cannot be taken for a row.
        if len(words) > 1 and words[1] == "=":
            problems += _head_problems(number, words, head, has_rows=bool(lines))
            head[words[0]] = " ".join(words[2:])
        else:
            lines.append(words)
    rows, wrong = _rows(lines)
    _refuse([*problems, *wrong])
    recipe = {key.removeprefix(_RECIPE): value for key, value in head.items() if key.startswith(_RECIPE)}
    promises = {key: _promise(key, head[key]) for key in PROMISES if key in head}
    return ScheduleFile(schedule_from_rows(rows, promises), recipe, name)


def read_schedule(file: Path) -> ScheduleFile:
    """Read a file that has a schedule as text.

    Raises:
        UserError: it cannot be read, or as ``parse_schedule_file``; names the file.
    """
    text = read_text(file, "the schedule", MOST_SCHEDULE_BYTES)
    try:
        return parse_schedule_file(text, str(file))
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _head_problems(line: int, words: Sequence[str], head: Mapping[str, str], *, has_rows: bool) -> list[str]:
    name, values = words[0], words[2:]
    problems: list[str] = []
    if name.startswith(_RECIPE):
        if not re.fullmatch(r"[a-z_]+", name.removeprefix(_RECIPE)):
            problems.append(f"expected a name such as {_RECIPE}family, found {name[:_MOST_SHOWN]!r}")
    elif name not in PROMISES:
        problems.append(unknown_name("promise", name[:_MOST_SHOWN], PROMISES))
    elif not values or (len(values) > 1 and name not in _FOR_EACH) or not all(map(_is_number, values)):
        wanted = "whole numbers" if name in _FOR_EACH else "one whole number"
        problems.append(f"{name} must be {wanted} of at most {_MOST_DIGITS} digits, found {_short(values)!r}")
    if name in head:
        problems.append(f"{name} is there a second time")
    if has_rows:
        problems.append(f"{name[:_MOST_SHOWN]} must precede the rows")
    return [f"line {line}: {problem}" for problem in problems]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _short(values: Sequence[str]) -> str:
    text = " ".join(values)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _promise(name: str, text: str) -> Promise:
    numbers = tuple(map(int, text.split()))
    return numbers if name in _FOR_EACH else numbers[0]


def schedule_from_cells(lines: Sequence[Sequence[str]]) -> Schedule:
    """A schedule from the text of its actions, row by row.

    Raises:
        ScheduleTextError: a cell is no action, or the rows name no placement.
        ScheduleError: the rows break a rule.
    """
    rows, problems = _rows(lines)
    _refuse(problems)
    return schedule_from_rows(rows)


def _rows(lines: Sequence[Sequence[str]]) -> tuple[list[Row], list[str]]:
    """The rows, without what is no action, and a sentence for each of that."""
    problems: list[str] = []
    rows: list[Row] = []
    explained: set[str] = set()
    for rank, cells in enumerate(lines):
        row: list[Action] = []
        for slot, cell in enumerate(cells):
            try:
                row.append(Action.parse(cell))
            except ScheduleTextError as error:
                # What an action is, once: it names all kinds.
                found, is_none, expected = str(error).partition(" is no action: ")
                problem = f"{found} is no action" if is_none and expected in explained else str(error)
                problems.append(f"row {rank}, cell {slot}: {problem}")
                explained.add(expected)
        rows.append(Row.of(row))
    return rows, problems


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise ScheduleTextError("\n".join([*problems[:_MOST_PROBLEMS], *more]))


def schedule_from_rows(rows: Sequence[Row], promises: Mapping[str, Any] | None = None) -> Schedule:
    """A schedule whose placement, counts and level are read off its rows.

    Args:
        rows: one for each pipeline rank.
        promises: what it promises, by attribute.

    Raises:
        ScheduleTextError: no row runs a forward, or some stage has none.
        ScheduleError: the rows break a rule.
    """
    all_rows = Row.join(rows) if rows else Row.of([])
    is_forward = all_rows.is_kind(Kind.FORWARD)
    if not is_forward.any():
        raise ScheduleTextError("expected rows of actions such as '0F0 0F1 0B0 0B1', found no forward at all")
    sizes = [1 + int(numbers.max()) for numbers in (all_rows.stage, all_rows.microbatch, all_rows.slice)]
    _check_sizes(sizes, int(is_forward.sum()))
    placement = _placement(rows)
    backward = all_rows.stage[all_rows.is_kind(*COMPUTE_KINDS - {Kind.FORWARD, Kind.RECOMPUTE})]
    return Schedule(
        rows=tuple(rows),
        placement=placement,
        num_microbatches=sizes[1],
        num_slices=sizes[2],
        level=Level.COMPUTE if all_rows.is_kind(*COMPUTE_KINDS).all() else Level.COMMUNICATION,
        first_backward_stage=int(backward.min(initial=placement.num_stages)),
        **(promises or {}),
    )


def _check_sizes(sizes: Sequence[int], num_forwards: int) -> None:
    """Refuse rows that lack most of the forwards that their largest numbers imply, before memory for all is allocated.

    Every stage runs each micro-batch, slice by slice. Where few are missing, the rules name them and show the place.
    """
    for what, size in zip(("stages", "micro-batches", "token slices"), sizes, strict=True):
        if size - num_forwards > _MOST_MISSING:
            found = f"number {size - 1} in rows of {count(num_forwards, 'forward')}"
            raise ScheduleTextError(f"expected {what} that count up from 0, found {found}")
    wanted = math.prod(sizes)
    if wanted - num_forwards > _MOST_MISSING:
        numbers = " x ".join(f"{size:,}" for size in sizes)
        raise ScheduleTextError(
            f"expected a forward of every stage for every micro-batch and token slice, which is {numbers} = "
            f"{wanted:,}, found {num_forwards:,}"
        )


def _placement(rows: Sequence[Row]) -> Placement:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for stage in dict.fromkeys(row.stage[row.is_kind(Kind.FORWARD)].tolist()):
            owner.setdefault(stage, rank)
    missing = [stage for stage in range(max(owner) + 1) if stage not in owner]
    if missing:
        raise ScheduleTextError(f"expected forwards of every stage 0..{max(owner)}, found none of {missing}")
    return Placement(tuple(owner[stage] for stage in range(len(owner))))
