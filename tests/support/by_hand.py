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


def assert_refused(refused, good, fault):
    """A right schedule with one fault is refused by a rule, which shows the place and the rows.

    Args:
        refused: of ``maker``.
        good: rows of the right schedule.
        fault: the rank that it is on, its text, what stands there instead; the rule, rank and slot of the refusal, and
            a part of the message.
    """
    rank, old, new, rule, at_rank, at_slot, words = fault
    assert good[rank].count(old) == 1
    rows = [row.replace(old, new) if number == rank else row for number, row in enumerate(good)]
    error = refused(*rows)
    assert (error.rule, error.rank) == (rule, at_rank)
    assert error.slot == at_slot or rule == "acyclic"  # every action of a circle is as good a place
    headline, *picture = str(error).splitlines()
    assert headline.startswith(f"schedule breaks rule '{rule}' at rank {at_rank}")
    assert words in headline
    (marked,) = [line for line in picture if line.startswith(f"> rank {at_rank}: ")]
    assert error.slot is None or f">{rows[at_rank].split()[error.slot]}<" in marked
    others = [number for number in range(len(good)) if number != at_rank]
    assert all(any(line.startswith(f"  rank {number}: ") for line in picture) for number in others)
