"""Checks of what the rule of a family returns or raises; an error names the family, its file and the line."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from typing import Any, TypeVar

from pipeloom.errors import FamilyError, PipeloomError, ScheduleError, place_of, raised_by
from pipeloom.schedule import Action, Kind, Row

_Result = TypeVar("_Result")
_WIDTH = 80
"""Longest repr of a value in a message, in characters."""
_MOST = 5
"""Most problems in one message: a mistake in a loop is in every row."""


@dataclass(frozen=True)
class Rows:
    """The rows that a rule returns.

    Examples:
        >>> from pipeloom import Rows, backward, forward
        >>> Rows([[forward(0, 0), backward(0, 0)]], max_stage_inputs=[1]).max_stage_inputs
        [1]

    Attributes:
        rows: for each rank its compute actions: any sequence of actions; a ``Row`` is the fastest to make.
        max_stage_inputs: for each rank the most stage inputs that it holds; verified.
    """

    rows: Sequence[Sequence[Action]]
    max_stage_inputs: Sequence[int]


@contextmanager
def naming_family(name: str, rule: Callable[..., Any]) -> Iterator[None]:
    """Context in which an exception of a family's rule becomes an error that names the family.

    Raises:
        FamilyError: for any exception that is no ``PipeloomError``; contains it and its line in the family's file.
    """
    try:
        yield
    except PipeloomError as error:
        error.family = name
        if isinstance(error, ScheduleError):
            error.add_note(f"the rows are those of the family '{name}' ({place_of(rule)})")
        raise
    except MemoryError:  # how much memory there is does not depend on the rule
        raise
    except Exception as error:
        wrong = FamilyError(f"the family '{name}' raised {raised_by(error, rule)}")
        wrong.family = name
        raise wrong from error


def checked_rows(name: str, rule: Callable[..., Any], answer: Any) -> Rows:
    """What a rule returned, if it has the right types; whether the schedule is legal is not checked here.

    Raises:
        FamilyError: with what was expected and found.
    """
    problems = list(islice(_problems(answer), _MOST))
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise FamilyError(f"the family '{name}' ({place_of(rule)}) returned no rows of actions:{listed}")
    return answer


def _problems(answer: Any) -> Iterator[str]:
    if not isinstance(answer, Rows):
        yield f"expected Rows(rows, max_stage_inputs), found {_shown(answer)}"
        return
    if not _is_list(answer.rows):
        yield f"rows must be a list with a row for each rank, found {_shown(answer.rows)}"
    else:
        for rank, row in enumerate(answer.rows):
            yield from _row_problems(rank, row)
    limits = answer.max_stage_inputs
    if not _is_list(limits) or not all(_is_whole(limit) for limit in limits):
        yield f"max_stage_inputs must be a list with a whole number for each rank, found {_shown(limits)}"


def _row_problems(rank: int, row: Any) -> Iterator[str]:
    # Arrays of numbers cannot hold anything else, and a check of each would take longer than the rule.
    if isinstance(row, Row):
        return
    if not _is_list(row):
        yield f"the row of rank {rank} must be a list of actions, found {_shown(row)}"
        return
    slot = next((slot for slot, action in enumerate(row) if not _is_action(action)), None)
    if slot is not None:
        wanted = "an action with whole numbers, such as forward(stage, microbatch)"
        yield f"rank {rank}, slot {slot} must be {wanted}, found {_shown(row[slot])}"


def _is_action(found: Any) -> bool:
    if not isinstance(found, Action) or not isinstance(found.kind, Kind):
        return False
    numbers = (found.stage, found.slice) if found.microbatch is None else (found.stage, found.microbatch, found.slice)
    # The type first: the check of an abstract class is slow, and rows have millions of actions.
    return all(type(number) is int or _is_whole(number) for number in numbers)


def _is_whole(found: Any) -> bool:
    # numpy's integers are Integral; so is bool, which is a mistake as a stage.
    return isinstance(found, Integral) and not isinstance(found, bool)


def _is_list(found: Any) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str | bytes)


def _shown(value: Any) -> str:
    try:
        # The repr of a plug-in's value may raise anything, and that is not the error to report.
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
