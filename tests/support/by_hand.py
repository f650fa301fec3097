"""Schedules written by hand, right and wrong."""

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.schedule import Action, Schedule


def maker(placement_of, **settings):
    """How to build schedules from the text of their rows, and how to see why they are refused.

    Args:
        placement_of: the placement for a number of rows.
        settings: of every schedule that names no others.
    """

    def build(*rows, **changes):
        actions = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
        return Schedule(actions, **({"placement": placement_of(len(rows)), "num_microbatches": 2} | settings | changes))

    def refused(*rows, **changes):
        with pytest.raises(ScheduleError) as caught:
            build(*rows, **changes)
        return caught.value

    return build, refused
