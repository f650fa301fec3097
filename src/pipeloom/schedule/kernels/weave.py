"""Where the second halves of split backwards go in rows of forwards and first halves."""

import numpy as np

from pipeloom.schedule.kernels.types import Floats, Ints, Longs
from pipeloom.schedule.kernels.waits import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

NEVER = np.inf


def weave(
    kind: Ints,
    stage: Ints,
    microbatch: Ints,
    first: Longs,
    owner: Ints,
    num_microbatches: int,
    seconds: Floats,
    over_s: Floats,
    kept: Floats,
    pending: Floats,
    room: Floats,
    patience: float,
    reserve: Floats,
) -> tuple[Ints, Ints, Ints, Floats]:
    """Run rows on a clock, and put a gradient of weights wherever a rank would stand still or has no room.

    Every rank runs its row in order. Where the next action cannot start yet, or has no room for its input, the rank
    runs the second half of its oldest backward that waits for it.

    Args:
        kind, stage, microbatch: forwards and first halves of backwards, all rows joined.
        first: for each rank the number of its first action; behind them the number of all.
        owner: for each stage its rank.
        num_microbatches: of the step.
        seconds: [kind, stage] of forwards, of first halves (at ``1``) and of second halves (at ``2``).
        over_s: for each boundary between two stages the seconds of moving a tensor over it; 0 on one rank.
        kept: for each stage what a micro-batch keeps there from its forward to the end of the first half.
        pending: for each stage what it keeps from there to the end of the second half.
        room: for each rank how much it can keep.
        patience: the least part of a second half's seconds that the next action must be away for it to run first.
        reserve: for each stage the room that a forward leaves which a rank runs before its turn because it would stand
            still otherwise; infinite for none.

    Returns:
        Kind, stage and micro-batch of every action, the rows joined (half as many more than came in), and when each
        starts; a start of -1 says that a rank came to no end, since it had no room.
    """
    num_ranks, num_stages = first.size - 1, owner.size
    total = kind.size + kind.size // 2
    out_kind, out_stage = np.zeros(total, np.int32), np.zeros(total, np.int32)
    out_microbatch, starts = np.zeros(total, np.int32), np.full(total, -1.0)
    forward_end = np.full((num_stages, num_microbatches), NEVER)
    input_end = np.full((num_stages, num_microbatches), NEVER)
    place, waiting = first[:-1].copy(), first[:-1].copy()  # the next action; the next whose second half is open
    out = first[:-1] + first[:-1] // 2
    clock, held = np.zeros(num_ranks), np.zeros(num_ranks)
    is_blocked = np.zeros(num_ranks, np.bool_)
    is_done = np.zeros(kind.size, np.bool_)  # before its turn
    while True:
        rank = -1
        for other in range(num_ranks):
            is_open = place[other] < first[other + 1] or waiting[other] < first[other + 1]
            if is_open and not is_blocked[other] and (rank < 0 or clock[other] < clock[rank]):
                rank = other
        if rank < 0:
            return out_kind, out_stage, out_microbatch, starts
        while place[rank] < first[rank + 1] and is_done[place[rank]]:
            place[rank] += 1
        node, now = place[rank], clock[rank]
        while waiting[rank] < node and kind[waiting[rank]] == FORWARD:
            waiting[rank] += 1
        ready, is_full = now, False
        if node < first[rank + 1]:
            ready = ready_at(kind[node], stage[node], microbatch[node], forward_end, input_end, over_s)
            is_full = kind[node] == FORWARD and held[rank] + kept[stage[node]] > room[rank] * (1 + 1e-12)
        is_last = node == first[rank + 1]
        if not is_last and (ready > now or is_full):
            other = node  # the next forward of the first stage
            while other < first[rank + 1]:
                if not is_done[other] and kind[other] == FORWARD and stage[other] == stage[first[rank]]:
                    break
                other += 1
            if other < first[rank + 1] and other != node:
                here = stage[other]
                has_room = held[rank] + kept[here] + reserve[here] <= room[rank] * (1 + 1e-12)
                if has_room and ready_at(FORWARD, here, microbatch[other], forward_end, input_end, over_s) <= now:
                    node, ready, is_full = other, now, False
                    is_done[other] = True
        runs_weight = is_last or is_full
        if waiting[rank] < node:
            here = stage[waiting[rank]]
            runs_weight = runs_weight or ready - now >= max(patience * seconds[2, here], 1e-12)
        if waiting[rank] >= node and (is_last or is_full):
            is_blocked[rank] = True  # nothing is left, or nothing will make room
            if is_last:
                waiting[rank] = first[rank + 1]
        elif runs_weight:
            here, number = stage[waiting[rank]], microbatch[waiting[rank]]
            out_kind[out[rank]], out_stage[out[rank]], out_microbatch[out[rank]] = BACKWARD_WEIGHT, here, number
            starts[out[rank]] = now
            clock[rank] = now + seconds[2, here]
            held[rank] -= pending[here]
            waiting[rank] += 1
            out[rank] += 1
        elif ready > now:
            clock[rank] = ready
            is_blocked[rank] = ready == NEVER
            if is_blocked[rank]:
                clock[rank] = now
        else:
            here, number = stage[node], microbatch[node]
            out_kind[out[rank]], out_stage[out[rank]], out_microbatch[out[rank]] = kind[node], here, number
            starts[out[rank]] = now
            if node == place[rank]:
                place[rank] += 1
            out[rank] += 1
            if kind[node] == FORWARD:
                clock[rank] = now + seconds[0, here]
                forward_end[here, number] = clock[rank]
                held[rank] += kept[here]
                neighbor = here + 1
            else:
                clock[rank] = now + seconds[1, here]
                input_end[here, number] = clock[rank]
                held[rank] += pending[here] - kept[here]
                neighbor = here - 1
            if 0 <= neighbor < num_stages:
                is_blocked[owner[neighbor]] = False


def ready_at(kind: int, stage: int, microbatch: int, forward_end: Floats, input_end: Floats, over_s: Floats) -> float:
    """When what an action uses has come to its rank; ``NEVER`` while nobody knows."""
    if kind == FORWARD:
        return 0.0 if stage == 0 else forward_end[stage - 1, microbatch] + over_s[stage - 1]
    ready = forward_end[stage, microbatch]
    if kind == BACKWARD_INPUT and stage + 1 < forward_end.shape[0]:
        ready = max(ready, input_end[stage + 1, microbatch] + over_s[stage])
    return ready
