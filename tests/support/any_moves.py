"""Schedules that swap what stages keep, made by hand: any micro-batches, at any legal place."""

from dataclasses import replace

import hypothesis.strategies as st
from orders import family_schedules

from pipeloom.passes import lower
from pipeloom.passes.recompute import recompute_beyond
from pipeloom.schedule import Action, Kind
from pipeloom.schedule.kinds import COMPUTE_KINDS, LOAD_OF
from pipeloom.schedule.row import Row

BACKWARDS = {Kind.BACKWARD, Kind.BACKWARD_INPUT}


def mirrored(num_ranks):
    """Partners from both ends; a rank in the middle is its own, and must not evict."""
    return tuple(reversed(range(num_ranks)))


def places(row):
    """For each (stage, micro-batch, slice) of a row the slots of its forward and of what needs what that keeps."""
    forward, backward = {}, {}
    for slot, action in enumerate(row):
        if action.kind is Kind.FORWARD:
            forward[action[1:]] = slot
        elif action.kind in BACKWARDS | {Kind.RECOMPUTE}:
            backward.setdefault(action[1:], slot)
    return {key: (slot, backward[key]) for key, slot in forward.items() if key in backward}


def insert_moves(schedule, swaps):
    """The schedule with swaps.

    Args:
        schedule: with communication.
        swaps: (rank, kind that moves out, (stage, micro-batch, slice), behind which slot it moves out, behind which
            it comes back), the slots of the row without swaps.
    """
    rows = []
    for rank, row in enumerate(schedule.rows):
        own = [swap[1:] for swap in swaps if swap[0] == rank]
        new = [(after, 0, Action(kind, *key)) for kind, key, after, _ in own]
        new += [(before, 1, Action(LOAD_OF[kind], *key)) for kind, key, _, before in own]
        new.sort(key=lambda one: one[:2])
        rows.append(row.insert([after for after, _, _ in new], Row.of([action for _, _, action in new])))
    swapped = replace(schedule, partners=mirrored(schedule.num_ranks))
    return swapped.with_rows(rows, schedule.level)


def move_newest(schedule, keep, kind=Kind.EVICT, ranks=None):
    """Where a rank holds more than ``keep`` parts after a forward, the newest leaves; back one compute action early."""
    swaps = []
    for rank, row in enumerate(schedule.rows):
        partner = mirrored(schedule.num_ranks)[rank]
        if (kind is Kind.EVICT and partner == rank) or (ranks is not None and rank not in ranks):
            continue
        found, held = places(row), []
        compute = [slot for slot, action in enumerate(row) if action.kind in COMPUTE_KINDS]
        for slot in compute:
            action = row[slot]
            if action.kind is Kind.FORWARD and action[1:] in found:
                held.append(action[1:])
                _, end = found[action[1:]]
                before = compute[max(0, compute.index(end) - 2)]
                if len(held) > keep and before > slot:
                    swaps.append((rank, kind, held.pop(), slot, before))
            elif action.kind in BACKWARDS and action[1:] in held:
                held.remove(action[1:])
    return insert_moves(schedule, swaps)


@st.composite
def moving_schedules(draw):
    """A family's schedule in which some parts leave and come back somewhere between forward and backward."""
    schedule = draw(family_schedules())
    if draw(st.booleans()):
        room = [draw(st.integers(1, max(1, peak))) for peak in schedule.peak_stage_inputs]
        schedule = lower(recompute_beyond(schedule, room, [1.0] * schedule.num_stages, [0.0] * schedule.num_stages))
    swaps = []
    for rank, row in enumerate(schedule.rows):
        has_partner = mirrored(schedule.num_ranks)[rank] != rank
        for key, (begin, end) in places(row).items():
            if draw(st.booleans()):
                kind = draw(st.sampled_from([Kind.EVICT, Kind.OFFLOAD] if has_partner else [Kind.OFFLOAD]))
                out = draw(st.integers(begin, end - 1))
                swaps.append((rank, kind, key, out, draw(st.integers(out, end - 1))))
    return insert_moves(schedule, swaps)
