"""Kernels that make rows by running ranks on a clock: insertion of weight gradients, and list scheduling."""

from typing import NamedTuple

import numpy as np

from pipeloom.schedule.kernels.types import Bools, Floats, Ints, Longs
from pipeloom.schedule.kernels.waits import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

NEVER = np.inf
EXACT = 1 + 1e-12
"""Tolerance for rounding in sums of memory."""


class World(NamedTuple):
    """Seconds and memory of stages, and the memory limits of ranks.

    Attributes:
        stages: [rank, number] -> stage, ascending.
        owner: for each stage its rank.
        seconds: [0, stage] of forwards, [1, stage] of input gradients, [2, stage] of weight gradients.
        over_s: for each boundary the seconds of a message; 0 where both stages are on one rank.
        kept: for each stage the memory that a micro-batch takes from its forward to the end of the input gradient.
        pending: for each stage the memory that it takes from there to the end of the weight gradient.
        reserve: for each stage the memory that later stages of its rank need for one micro-batch.
        room: for each rank its memory limit.
    """

    stages: Ints
    owner: Ints
    seconds: Floats
    over_s: Floats
    kept: Floats
    pending: Floats
    reserve: Floats
    room: Floats


class State(NamedTuple):
    """Progress of the ranks.

    Attributes:
        kind, stage, microbatch, starts: [rank, slot] of the actions that have run; start -1 for a slot that is empty.
        count: for each rank the number of its actions that have run.
        end: [0, stage, micro-batch] end times of forwards, [1, ...] of input gradients; ``NEVER`` before they run.
        waiting: for each rank the slot of its oldest input gradient whose weight gradient has not run, or a slot
            before it.
        clock, held: for each rank the time at which it is free, and the memory in use.
        turn: for each rank its clock; ``NEVER`` at the end of its row, or while the time of its next input is unknown.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    starts: Floats
    count: Longs
    end: Floats
    waiting: Longs
    clock: Floats
    held: Floats
    turn: Floats


def begin(num_ranks: int, num_stages: int, num_microbatches: int) -> State:
    """The state before any action."""
    # A forward and two halves of a backward for each stage and micro-batch; every rank has as many stages.
    shape = num_ranks, 3 * num_stages // num_ranks * num_microbatches
    return State(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.full(shape, -1.0),
        np.zeros(num_ranks, np.int64),
        np.full((2, num_stages, num_microbatches), NEVER),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.zeros(num_ranks),
    )


def earliest(state: State) -> int:
    """The rank with the smallest turn; -1 if no rank can continue."""
    # argmin returns the first of equal ones, so that the same input makes the same rows. For a thousand ranks a linear
    # search takes less time than a heap in Python.
    rank = int(state.turn.argmin())
    return rank if state.turn[rank] < NEVER else -1


def go_on(state: State, rank: int) -> None:
    """Schedule a rank's next choice for the time at which it is free."""
    state.turn[rank] = state.clock[rank] if state.count[rank] < state.kind.shape[1] else NEVER


def has_pending(state: State, rank: int) -> bool:
    """Whether a rank has a weight gradient to run; advances ``waiting`` to the oldest."""
    while state.waiting[rank] < state.count[rank] and state.kind[rank, state.waiting[rank]] != BACKWARD_INPUT:
        state.waiting[rank] += 1
    return state.waiting[rank] < state.count[rank]


def ready_at(half: int, stage: int, microbatch: int, end: Floats, over_s: Floats) -> float:
    """Time at which the inputs of a forward (0) or an input gradient (1) arrive; ``NEVER`` while unknown."""
    if half == 0:
        return 0.0 if stage == 0 else end[0, stage - 1, microbatch] + over_s[stage - 1]
    ready = end[0, stage, microbatch]
    if stage + 1 < end.shape[1]:
        ready = max(ready, end[1, stage + 1, microbatch] + over_s[stage])
    return ready


def run(world: World, state: State, rank: int, half: int, stage: int, microbatch: int) -> None:
    """Run a forward (0), an input gradient (1) or a weight gradient (2) now."""
    slot, now = state.count[rank], state.clock[rank]
    kind = FORWARD if half == 0 else BACKWARD_INPUT if half == 1 else BACKWARD_WEIGHT
    state.kind[rank, slot], state.stage[rank, slot], state.microbatch[rank, slot] = kind, stage, microbatch
    state.starts[rank, slot] = now
    state.count[rank] += 1
    state.clock[rank] = now + world.seconds[half, stage]
    go_on(state, rank)
    if half == 2:
        state.held[rank] -= world.pending[stage]
        return
    state.held[rank] += world.kept[stage] if half == 0 else world.pending[stage] - world.kept[stage]
    state.end[half, stage, microbatch] = state.clock[rank]
    neighbor = stage + 1 if half == 0 else stage - 1
    if 0 <= neighbor < world.owner.size:
        # The neighbor may have waited for this output, so it chooses again.
        go_on(state, world.owner[neighbor])


def run_pending(world: World, state: State, rank: int) -> None:
    """Run the oldest weight gradient that has not run."""
    slot = state.waiting[rank]
    state.waiting[rank] += 1
    run(world, state, rank, 2, state.stage[rank, slot], state.microbatch[rank, slot])


def wait(state: State, rank: int, ready: float) -> None:
    """Stay idle until ``ready``; if that is unknown, until a neighbor's action wakes the rank."""
    if ready < NEVER:
        state.clock[rank] = ready
    state.turn[rank] = ready


class Order(NamedTuple):
    """Rows of forwards and input gradients, joined.

    Attributes:
        kind, stage, microbatch: of every action.
        first: for each rank the number of its first action; behind them the number of all.
        place: for each rank its next action.
        is_done: whether an action was run before its turn.
        ahead: for each rank the action from which the search for a forward of its first stage continues.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    first: Longs
    place: Longs
    is_done: Bools
    ahead: Longs


def insert_weight_gradients(world: World, state: State, order: Order, patience: float, pulls: bool) -> None:
    """Run rows on a clock, and insert a weight gradient wherever a rank would be idle or has no memory.

    Every rank runs its row in order. Where the next action cannot start yet, or has no memory for its input, the rank
    runs its oldest weight gradient.

    Args:
        world: seconds, memory and limits.
        state: as ``begin`` returns it. A rank that has not finished its row afterwards lacked memory, or deadlocked.
        order: the rows.
        patience: a weight gradient runs first only if the next action starts at least this fraction of it later.
        pulls: whether an idle rank runs the next forward of its first stage out of turn.
    """
    while True:
        rank = earliest(state)
        if rank < 0:
            return
        # Actions that ran out of turn are skipped.
        while order.place[rank] < order.first[rank + 1] and order.is_done[order.place[rank]]:
            order.place[rank] += 1
        node, now, is_pending = order.place[rank], state.clock[rank], has_pending(state, rank)
        if node == order.first[rank + 1]:
            if is_pending:
                run_pending(world, state, rank)
            else:
                # The end of its row.
                state.turn[rank] = NEVER
            continue
        half = 0 if order.kind[node] == FORWARD else 1
        ready, is_full = ready_at(half, order.stage[node], order.microbatch[node], state.end, world.over_s), False
        if half == 0:
            is_full = state.held[rank] + world.kept[order.stage[node]] > world.room[rank] * EXACT
        ahead = ahead_of(world, state, order, rank) if pulls and (ready > now or is_full) else -1
        if ahead >= 0:
            order.is_done[ahead] = True
            run(world, state, rank, 0, order.stage[ahead], order.microbatch[ahead])
        elif is_pending and (is_full or is_far(world, state, rank, ready, patience)):
            run_pending(world, state, rank)
        elif is_full:
            state.turn[rank] = NEVER
        elif ready > now:
            wait(state, rank, ready)
        else:
            order.place[rank] += 1
            run(world, state, rank, half, order.stage[node], order.microbatch[node])


def is_far(world: World, state: State, rank: int, ready: float, patience: float) -> bool:
    """Whether an action that starts at ``ready`` leaves time for the oldest weight gradient."""
    taken = world.seconds[2, state.stage[rank, state.waiting[rank]]]
    # With patience 0 the wait must still exceed rounding.
    return ready - state.clock[rank] >= max(patience * taken, 1e-12 * taken)


def ahead_of(world: World, state: State, order: Order, rank: int) -> int:
    """The next forward of a rank's first stage that can run out of turn and leaves memory for later stages; else -1."""
    here, end = world.stages[rank, 0], order.first[rank + 1]
    # The search continues where it ended before: all searches of a rank together read its row once.
    node = max(order.ahead[rank], order.place[rank] + 1)
    while node < end and (order.is_done[node] or order.kind[node] != FORWARD or order.stage[node] != here):
        node += 1
    order.ahead[rank] = node
    if node == end:
        return -1
    has_room = state.held[rank] + world.kept[here] + world.reserve[here] <= world.room[rank] * EXACT
    ready = ready_at(0, here, order.microbatch[node], state.end, world.over_s)
    return node if has_room and ready <= state.clock[rank] else -1


BACKWARD_FIRST, IN_TURN, FORWARD_FIRST = range(3)
LATER_FIRST, OLDER_FIRST, EARLIER_FIRST = range(3)


def list_schedule(world: World, state: State, rule: Longs, patience: float, keeps_room: bool) -> None:
    """List scheduling: a free rank runs the action of highest priority among those that can start.

    Where neither a forward nor an input gradient can start, or memory is full, it runs its oldest weight gradient.

    Args:
        world: seconds, memory and limits.
        state: as ``begin`` returns it. A rank that has not finished its row afterwards lacked memory.
        rule: priorities between forwards and backwards; among forwards; among backwards; and, after a rank has run all
            forwards of its first stage, between forwards and backwards.
        patience: a weight gradient runs first only if everything else starts at least this fraction of it later.
        keeps_room: whether a forward must leave memory for an input of each later stage of its rank, so that every
            micro-batch can reach its backward.
    """
    num_microbatches = state.end.shape[2]
    done = np.zeros((2, world.owner.size), np.int64)
    was_forward = np.zeros(state.count.size, np.bool_)
    while True:
        rank = earliest(state)
        if rank < 0:
            return
        best = np.full(2, -1)
        soonest, is_full = find_best(world, state, rank, rule, done, best, keeps_room)
        # A rule of its own for the end, when no further micro-batch enters the rank.
        is_tail = done[0, world.stages[rank, 0]] == num_microbatches
        half = choose(best, rule[3] if is_tail else rule[0], was_forward[rank])
        if half >= 0:
            here = best[half]
            done[half, here] += 1
            was_forward[rank] = half == 0
            run(world, state, rank, half, here, done[half, here] - 1)
        elif has_pending(state, rank) and (is_full or is_far(world, state, rank, soonest, patience)):
            run_pending(world, state, rank)
        else:
            wait(state, rank, soonest)


def find_best(
    world: World, state: State, rank: int, rule: Longs, done: Longs, best: Longs, keeps_room: bool
) -> tuple[float, bool]:
    """Write the stages of the forward and the input gradient of highest priority that can start to ``best``.

    Returns:
        The time at which the next one can start, and whether a forward that could start lacks memory.
    """
    soonest, is_full, now = NEVER, False, state.clock[rank]
    for here in world.stages[rank]:
        for half in range(2):
            # A stage takes its micro-batches in ascending order.
            turn = done[half, here]
            if turn == state.end.shape[2]:
                continue
            ready = ready_at(half, here, turn, state.end, world.over_s)
            more = world.kept[here] + (world.reserve[here] if keeps_room else 0.0)
            if half == 0 and ready < NEVER and state.held[rank] + more > world.room[rank] * EXACT:
                is_full = is_full or ready <= now
            elif ready > now:
                soonest = min(soonest, ready)
            elif best[half] < 0 or goes_first(rule[1 + half], here, best[half], turn, done[half, best[half]]):
                best[half] = here
    return soonest, is_full


def goes_first(order: int, stage: int, other: int, microbatch: int, other_microbatch: int) -> bool:
    """Whether a stage's next action has priority over that of ``other``, an earlier stage of the model."""
    if order == LATER_FIRST:
        return stage > other
    if order == OLDER_FIRST:
        return microbatch < other_microbatch or (microbatch == other_microbatch and stage > other)
    return stage < other


def choose(best: Longs, order: int, was_forward: bool) -> int:
    """0 for the forward, 1 for the backward, -1 if there is neither."""
    if best[0] < 0 or best[1] < 0:
        return 0 if best[0] >= 0 else 1 if best[1] >= 0 else -1
    if order == IN_TURN:
        return 1 if was_forward else 0
    return 1 if order == BACKWARD_FIRST else 0
