"""The definition of a strategy of the planner, and the registry of strategies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.errors import PipeloomError, StrategyError, raised_by
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.question import Question
from pipeloom.planner.space import Arrangement, Leaf
from pipeloom.predict.step import SimulatedStep
from pipeloom.registry import Registry


class SearchState(NamedTuple):
    """State of a search after the layouts without strategies are decided.

    Attributes:
        arrangements: of the question, within its limits.
        infeasible: leaves that do not fit, or fit with fewer layers recomputed.
        fastest_s: seconds of the fastest step so far; infinite without one.
    """

    arrangements: Iterable[Arrangement]
    infeasible: Sequence[Leaf]
    fastest_s: float


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A change of layouts that saves memory or time and that no bound covers.

    Attributes:
        summary: one line for users.
        without: title of the best layout without it, if the best of all uses it.
        applies: state of the search -> leaves to which it may be applied. The search sets their ``strategy`` before it
            estimates and builds them.
        estimate: leaf -> estimated seconds of its step; infinite if the strategy does not help. Only the leaves with
            the lowest estimates are built.
        least: leaf -> lower bound of its estimate, which takes less time.
        build: leaf -> candidate; ``None`` if it does not fit.
        is_in: whether a step uses it.
        refine: candidate of the answer -> further steps, if they take too long for every candidate.
        hint: question without a layout that fits -> advice about the strategy.
        limit: question -> why the strategy applies to none of its layouts; ``None`` if it may apply.
        takes_frozen: whether it may be applied where some weights are frozen.
        programs: names of training programs that run it although their files do not name it.
    """

    summary: str
    without: str
    applies: Callable[[SearchState], Iterable[Leaf]]
    estimate: Callable[[Leaf], float]
    build: Callable[[Leaf], Candidate | None]
    is_in: Callable[[SimulatedStep], bool]
    least: Callable[[Leaf], float] = lambda _: 0.0
    refine: Callable[[Candidate], Iterable[SimulatedStep]] = lambda _: ()
    hint: Callable[[Question], str | None] = lambda _: None
    limit: Callable[[Question], str | None] = lambda _: None
    takes_frozen: bool = True
    programs: tuple[str, ...] = ()


@contextmanager
def naming_strategy(name: str) -> Iterator[None]:
    """Context in which an exception of a strategy of a plug-in or a script becomes an error that names the strategy.

    Raises:
        StrategyError: contains the exception and its line in the strategy's file.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        applies = STRATEGIES[name].applies
        is_own = getattr(applies, "__module__", "").startswith("pipeloom.")
        # An error that names a family is the family's, also while the layouts of a strategy are simulated.
        if is_own or (isinstance(error, PipeloomError) and (error.family or error.strategy)):
            raise
        wrong = StrategyError(f"the strategy '{name}' raised {raised_by(error, applies)}")
        wrong.strategy = name
        raise wrong from error


STRATEGIES: Registry[Strategy] = Registry("strategy", "pipeloom.strategies", Strategy)
"""Every strategy by name."""


def one_rank_limit(question: Question) -> str | None:
    """The ``limit`` of strategies that need several pipeline ranks."""
    return None if question.may_divide("pp") else "every layout has one pipeline rank"
