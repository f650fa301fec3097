"""What precedes an action: on its stage, and on its lane."""

import numpy as np

from pipeloom.schedule.kernels.types import Bools, Bytes, Ints

ON, OFF, LOOK = 1, 2, 3
"""What a kind does to its stage's state; 0 is nothing."""


def states(kind: Ints, stage: Ints, role: Ints, num_stages: int) -> tuple[Bytes, Bools]:
    """What state an action finds its stage in, where some kinds switch it on and others off.

    Args:
        kind, stage: columns of a schedule; a stage's actions are all on one rank.
        role: for each code of a kind what it does to its stage's state.
        num_stages: of the pipeline; all begin off.

    Returns:
        For each node ``ON`` or ``OFF``, and 0 where its kind has no role; and the states at the end.
    """
    is_on = np.zeros(num_stages, np.bool_)
    found = np.zeros(kind.size, np.int8)
    for node in range(kind.size):
        what = role[kind[node]]
        if what > 0:
            found[node] = ON if is_on[stage[node]] else OFF
            if what <= OFF:
                is_on[stage[node]] = what == ON
    return found, is_on


def number_on_lanes(lane: Ints, num_lanes: int) -> Ints:
    """For each node how many precede it on its lane."""
    count = np.zeros(num_lanes, np.int32)
    numbers = np.zeros(lane.size, np.int32)
    for node in range(lane.size):
        numbers[node] = count[lane[node]]
        count[lane[node]] += 1
    return numbers
