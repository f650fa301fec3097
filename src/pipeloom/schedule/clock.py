"""Start and end times of a schedule's actions, for passes that depend on them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Facts, Seconds
from pipeloom.schedule.kinds import KINDS, STAGE_KINDS
from pipeloom.schedule.schedule import Schedule

SecondsOf = Callable[[Action], float]
"""Action -> seconds on its lane; the same for all micro-batches. ``ActionCosts.seconds`` is one."""


def nominal_s(action: Action) -> float:
    """Nominal seconds: a forward takes 1, a backward 2, a move of activations 1."""
    return action.kind.nominal_s


def seconds_of_all(facts: Facts, seconds_of: SecondsOf, *, ignores_microbatch: bool = True) -> Seconds:
    """Seconds of every action.

    Args:
        facts: of the schedule.
        seconds_of: of one action.
        ignores_microbatch: whether they are the same for all micro-batches, so that one call for each stage is enough.
    """
    if not ignores_microbatch:
        return np.array([seconds_of(action) for row in facts.rows for action in row], np.float64)
    kind, stage, _, part = facts.columns[:4]
    table = np.zeros((len(KINDS), facts.shape[0], facts.shape[2]))
    for where in np.argwhere(occurring(facts)).tolist():
        table[tuple(where)] = seconds_of(example(*where))
    return table[kind, stage, part]


def occurring(facts: Facts) -> NDArray[np.bool_]:
    """[kind, stage, slice] whether the schedule has such an action."""
    kind, stage, _, part = facts.columns[:4]
    occurs = np.zeros((len(KINDS), facts.shape[0], facts.shape[2]), np.bool_)
    occurs[kind, stage, part] = True
    return occurs


def example(code: int, stage: int, part: int) -> Action:
    """An action of a kind by its code, on a stage, of a token slice."""
    kind = KINDS[code]
    return Action(kind, stage, None if kind in STAGE_KINDS else 0, part)


def times(schedule: Schedule, seconds_of: SecondsOf) -> tuple[Seconds, Seconds]:
    """Starts and ends of all actions, row after row."""
    return schedule.graph.times(seconds_of_all(schedule.facts, seconds_of))
