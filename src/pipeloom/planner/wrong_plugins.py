"""Work for a question without the plug-ins that turn out to be wrong while it is done."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pipeloom.errors import PipeloomError
from pipeloom.families import FAMILIES
from pipeloom.planner.question import Question
from pipeloom.planner.strategies import STRATEGIES

_Result = TypeVar("_Result")


def without_wrong_plugins(question: Question, work: Callable[[Question], _Result]) -> _Result:
    """What work returns; it begins again without each installed family or strategy that raises or breaks a rule.

    Args:
        question: if its limits name the plug-in, the error is raised.
        work: is called with the question.

    Raises:
        PipeloomError: of the work, if it is none of such a plug-in.
    """
    while True:
        try:
            return work(question)
        except PipeloomError as error:
            if not _leaves_out(question, error):
                raise
        question = replace(question)  # a question caches names of families


def _leaves_out(question: Question, error: PipeloomError) -> bool:
    """Whether an error is one of a plug-in that can be left out, which is done."""
    limits = question.limits
    for registry, name, named in (
        (FAMILIES, error.family, limits.families),
        (STRATEGIES, error.strategy, limits.strategies),
    ):
        if name is not None and name not in (named or ()):
            return registry.leave_out(name, error)
    return False
