"""Schedules whose backwards are split: made of families, the halves for the weights wherever they may stand."""

from contextlib import contextmanager

import hypothesis.strategies as st

from pipeloom.families import FAMILIES, make_schedule
from pipeloom.families.family import Rows, family
from pipeloom.passes import split_backward
from pipeloom.schedule import Kind, Schedule


def moved(schedule, random):
    """The schedule with the backwards split, every half for the weights at a random place behind its other half."""
    rows = []
    for row in split_backward(schedule).rows:
        actions = list(row)
        for half in [action for action in actions if action.kind is Kind.BACKWARD_WEIGHT]:
            actions.remove(half)
            first = actions.index(half._replace(kind=Kind.BACKWARD_INPUT)) + 1
            actions.insert(random.randint(first, len(actions)), half)
        rows.append(tuple(actions))
    return Schedule(tuple(rows), schedule.placement, schedule.num_microbatches)


@st.composite
def split_schedules(draw, families, most_ranks=3, most_microbatches=4):
    """Schedules of families, their backwards split, every half for the weights anywhere behind its other half."""
    name = draw(st.sampled_from(families))
    schedule = make_schedule(
        name,
        pp=draw(st.integers(1, most_ranks)),
        loops=draw(st.integers(1, 2)) if FAMILIES[name].is_looped else 1,
        num_microbatches=draw(st.integers(1, most_microbatches)),
        placement=draw(st.sampled_from(["looped", "v", "linear"])),
    )
    return moved(schedule, draw(st.randoms(use_true_random=False)))


@contextmanager
def split_family(base, delay):
    """Meanwhile there is a family that splits another one's backwards; yields its name."""
    name = f"split-{base}-{delay}"

    @family(name, is_looped=FAMILIES[base].is_looped, splits_backward=True)
    def rule(request):
        """A family with its backwards split."""
        whole = FAMILIES[base].rule(request)
        schedule = split_backward(Schedule(whole.rows, request.placement, request.num_microbatches), delay)
        return Rows(schedule.rows, schedule.peak_stage_inputs)

    try:
        yield name
    finally:
        FAMILIES.remove(name)
