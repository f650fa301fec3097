"""Strategies of the planner: every module of this folder adds some; the search names none.

Other distributions add theirs through entry points of the group ``pipeloom.strategies`` (docs/extending.md).
"""

from dataclasses import replace

from pipeloom.cost.software import Software
from pipeloom.planner.strategies import activations, slices, swap
from pipeloom.planner.strategies.strategy import STRATEGIES, Left, Strategy
from pipeloom.predict.step import SimulatedStep

__all__ = [
    "STRATEGIES",
    "Left",
    "Strategy",
    "activations",
    "slices",
    "strategy_of",
    "swap",
    "with_strategies",
]


def strategy_of(step: SimulatedStep) -> str:
    """The name of the strategy that a step has, those of others first; ``none`` for a plain one."""
    return next((name for name in reversed(list(STRATEGIES)) if STRATEGIES[name].is_in(step)), "none")


def with_strategies(software: Software) -> Software:
    """The program with the strategies of other distributions that it runs."""
    more = [name for name, one in STRATEGIES.items() if software.name in one.programs and name not in software.ways]
    return replace(software, ways=(*software.ways, *more)) if more else software
