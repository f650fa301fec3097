"""Strategies of the planner; each module of this package registers some.

Other distributions add strategies through entry points of the group ``pipeloom.strategies`` (docs/extending.md).
"""

from dataclasses import replace

from pipeloom.cost.software import Software
from pipeloom.families import FAMILIES, installed
from pipeloom.planner.question import Question
from pipeloom.planner.strategies import activations, order, slices, swap
from pipeloom.planner.strategies.strategy import STRATEGIES, SearchState, Strategy, naming_strategy
from pipeloom.predict.step import SimulatedStep

__all__ = [
    "STRATEGIES",
    "SearchState",
    "Strategy",
    "activations",
    "hint_of",
    "limit_of",
    "naming_strategy",
    "order",
    "slices",
    "strategy_of",
    "swap",
    "with_frozen",
    "with_strategies",
]


def strategy_of(step: SimulatedStep) -> str:
    """Name of a step's strategy, or ``none``. Strategies of other distributions take precedence."""
    for name in reversed(list(STRATEGIES)):
        with naming_strategy(name):
            if STRATEGIES[name].is_in(step):
                return name
    return "none"


def hint_of(name: str, question: Question) -> str | None:
    """Advice about a strategy for a question without a layout that fits."""
    with naming_strategy(name):
        return STRATEGIES[name].hint(question)


def limit_of(name: str, question: Question) -> str | None:
    """Why a strategy applies to none of the layouts of a question; ``None`` if it may apply."""
    with naming_strategy(name):
        return STRATEGIES[name].limit(question)


def with_strategies(software: Software) -> Software:
    """The program with the strategies of other distributions that name it."""
    known = software.strategies
    more = [name for name, one in STRATEGIES.items() if software.name in one.programs and name not in known]
    return replace(software, strategies=(*known, *more)) if more else software


def with_frozen(software: Software) -> Software:
    """The program with the families and strategies that run stages in which some weights are frozen."""
    return replace(
        software,
        families=tuple(name for name in installed(software.families) if not FAMILIES[name].splits_backward),
        strategies=tuple(name for name in software.strategies if STRATEGIES[name].takes_frozen),
    )
