"""Rows from a list of priorities: every rank runs the best of what it can."""

import numpy as np

from pipeloom.schedule.kernels.types import Floats, Ints, Longs
from pipeloom.schedule.kernels.waits import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

NEVER = np.inf
BACKWARD_FIRST, IN_TURN, FORWARD_FIRST = range(3)
LATER_FIRST, OLDER_FIRST, EARLIER_FIRST = range(3)


def listing(
    stages: Ints,
    owner: Ints,
    num_microbatches: int,
    seconds: Floats,
    over_s: Floats,
    kept: Floats,
    pending: Floats,
    reserve: Floats,
    room: Floats,
    rule: Longs,
    patience: float,
) -> tuple[Ints, Ints, Ints, Floats]:
    """Rows of forwards and of both halves of backwards, made on a clock.

    A rank that is free runs the best forward or first half that it can; where there is none, or no room, it runs the
    oldest second half. A forward needs room for its input, and beside it for one input of each later stage of the
    rank, so that a micro-batch that is under way always comes to the end.

    Args:
        stages: [rank, number] -> stage, ascending.
        owner: for each stage its rank.
        num_microbatches: of the step.
        seconds: [0, stage] of forwards, [1, stage] of first halves, [2, stage] of second halves.
        over_s: for each boundary the seconds of moving a tensor over it.
        kept: for each stage what a micro-batch keeps there from its forward to the end of the first half.
        pending: for each stage what it keeps from there to the end of the second half.
        reserve: for each stage the room that later stages of its rank need.
        room: for each rank.
        rule: what goes first of forwards and backwards; of the forwards; of the backwards; and, where a rank has run
            all forwards of its first stage, of forwards and backwards.
        patience: the least part of a second half's seconds that anything else must be away for it to run first.

    Returns:
        Kind, stage and micro-batch of every action, rank by rank, and when each starts; a start of -1 says that
        a rank came to no end.
    """
    num_ranks, num_local = stages.shape
    num_stages, size = owner.size, 3 * num_local * num_microbatches
    out_kind, out_stage = np.zeros(num_ranks * size, np.int32), np.zeros(num_ranks * size, np.int32)
    out_microbatch, starts = np.zeros(num_ranks * size, np.int32), np.full(num_ranks * size, -1.0)
    end = np.full((2, num_stages, num_microbatches), NEVER)  # of forwards and of first halves
    done = np.zeros((2, num_stages), np.int64)
    queue_stage = np.zeros((num_ranks, num_local * num_microbatches), np.int32)  # open second halves, oldest first
    queue_microbatch = np.zeros((num_ranks, num_local * num_microbatches), np.int32)
    begin, stop = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    count, clock, held = np.zeros(num_ranks, np.int64), np.zeros(num_ranks), np.zeros(num_ranks)
    is_blocked, was_forward = np.zeros(num_ranks, np.bool_), np.zeros(num_ranks, np.bool_)
    while True:
        rank = -1
        for other in range(num_ranks):
            if count[other] < size and not is_blocked[other] and (rank < 0 or clock[other] < clock[rank]):
                rank = other
        if rank < 0:
            return out_kind, out_stage, out_microbatch, starts
        now = clock[rank]
        best = np.full(2, -1)
        soonest, is_full = NEVER, False
        for number in range(num_local):
            here = stages[rank, number]
            for half in range(2):
                turn = done[half, here]
                if turn == num_microbatches:
                    continue
                ready = ready_at(half, here, turn, end, over_s)
                if half == 0 and ready < NEVER and held[rank] + kept[here] + reserve[here] > room[rank] * (1 + 1e-12):
                    is_full = is_full or ready <= now
                    continue
                if ready > now:
                    soonest = min(soonest, ready)
                elif best[half] < 0 or goes_first(rule[1 + half], here, best[half], turn, done[half, best[half]]):
                    best[half] = here
        is_tail = done[0, stages[rank, 0]] == num_microbatches
        half = choose(best, rule[3] if is_tail else rule[0], was_forward[rank])
        slot = rank * size + count[rank]
        if half < 0 and begin[rank] < stop[rank]:
            here, turn = queue_stage[rank, begin[rank]], queue_microbatch[rank, begin[rank]]
            if soonest - now < patience * seconds[2, here] and not is_full:
                clock[rank] = soonest
                continue
            begin[rank] += 1
            held[rank] -= pending[here]
            kind, taken = BACKWARD_WEIGHT, seconds[2, here]
        elif half < 0:
            is_blocked[rank] = soonest == NEVER
            clock[rank] = now if is_blocked[rank] else soonest
            continue
        else:
            here = best[half]
            turn = done[half, here]
            done[half, here] += 1
            kind, taken = FORWARD, seconds[half, here]
            neighbor = here + 1
            was_forward[rank] = half == 0
            if half == 0:
                held[rank] += kept[here]
            else:
                kind, neighbor = BACKWARD_INPUT, here - 1
                held[rank] += pending[here] - kept[here]
                queue_stage[rank, stop[rank]], queue_microbatch[rank, stop[rank]] = here, turn
                stop[rank] += 1
            end[half, here, turn] = now + taken
            if 0 <= neighbor < num_stages:
                is_blocked[owner[neighbor]] = False
        out_kind[slot], out_stage[slot], out_microbatch[slot], starts[slot] = kind, here, turn, now
        count[rank] += 1
        clock[rank] = now + taken


def ready_at(half: int, stage: int, microbatch: int, end: Floats, over_s: Floats) -> float:
    """When what a forward or a first half uses has come to its rank; ``NEVER`` while nobody knows."""
    if half == 0:
        return 0.0 if stage == 0 else end[0, stage - 1, microbatch] + over_s[stage - 1]
    ready = end[0, stage, microbatch]
    if stage + 1 < end.shape[1]:
        ready = max(ready, end[1, stage + 1, microbatch] + over_s[stage])
    return ready


def goes_first(order: int, stage: int, other: int, microbatch: int, other_microbatch: int) -> bool:
    """Whether a stage's next action goes before that of another stage, which comes earlier in the model."""
    if order == LATER_FIRST:
        return stage > other
    if order == OLDER_FIRST:
        return microbatch < other_microbatch or (microbatch == other_microbatch and stage > other)
    return stage < other


def choose(best: Longs, order: int, was_forward: bool) -> int:
    """0 for the forward, 1 for the backward, -1 where there is neither."""
    if best[0] < 0 or best[1] < 0:
        return 0 if best[0] >= 0 else 1 if best[1] >= 0 else -1
    if order == IN_TURN:
        return 1 if was_forward else 0
    return 1 if order == BACKWARD_FIRST else 0
