"""Schedules to draw from: families and any legal order on one rank."""

import hypothesis.strategies as st
from families import named_sizes

from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import lower
from pipeloom.passes.recompute import recompute_beyond
from pipeloom.schedule import Action, Kind, Placement, Schedule


@st.composite
def family_schedules(draw, trains=True):
    """A family's schedule with its sends and receives."""
    names = sorted(name for name, family in FAMILIES.items() if family.has_backward or not trains)
    name, fits = draw(named_sizes(most_loops=4, names=names))
    sizes = {"pp": draw(st.integers(1, 4)), "num_microbatches": draw(st.integers(1, 9))}
    return lower(make_schedule(name, **sizes, **fits), draw(st.integers(1, 3)))


@st.composite
def one_rank_schedules(draw, most_stages=4, most_microbatches=3):
    """Any legal order of a few stages and micro-batches on one rank; some backwards split."""
    stages, count = draw(st.integers(1, most_stages)), draw(st.integers(1, most_microbatches))
    queues = []
    for microbatch in range(count):
        queue = [Action(Kind.FORWARD, stage, microbatch) for stage in range(stages)]
        for stage in reversed(range(stages)):
            is_split = draw(st.booleans())
            queue.append(Action(Kind.BACKWARD_INPUT if is_split else Kind.BACKWARD, stage, microbatch))
        queues.append(queue)
    row, weights = [], []
    while any(queues) or weights:
        source = draw(st.sampled_from([queue for queue in [*queues, weights] if queue]))
        action = source.pop(0)
        row.append(action)
        if action.kind is Kind.BACKWARD_INPUT:
            weights.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
    return Schedule((tuple(row),), Placement.linear(1, stages), count)


@st.composite
def any_schedules(draw):
    """A family's compute actions, some recomputed or none, with its communication or without."""
    names = sorted(name for name, family in FAMILIES.items() if family.has_backward)
    name, fits = draw(named_sizes(names=names))
    sizes = {"pp": draw(st.integers(1, 8)), "num_microbatches": draw(st.integers(1, 16))}
    schedule = make_schedule(name, **sizes, **fits)
    if draw(st.booleans()):
        room = [draw(st.integers(1, max(1, peak))) for peak in schedule.peak_stage_inputs]
        schedule = recompute_beyond(schedule, room, [1.0] * schedule.num_stages, [0.0] * schedule.num_stages)
    return lower(schedule) if draw(st.booleans()) else schedule
