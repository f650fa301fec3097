"""When each action starts and ends, where ranks share resources.

While ``n`` actions run on a resource of capacity ``c``, each progresses at the speed ``min(1, c / n)``. They progress
alike, so each resource keeps its own time, the work that it has done for each of its actions; an action ends when that
has grown by its seconds.

On a resource with turns at most ``c`` actions run, rounded up, and the others wait in a queue. After its turn an action
goes to the end of the queue. What its thread does next, if that can start at once, has the rest of the turn. An action
whose own turn has no end starts at once.

A queue is a linked list: ``line`` has its first and its last node, negative first if it is empty, ``behind`` the node
after each.

An action may pass through a second resource behind the first one. The second one serves it at the rate at which the
first one does, or at its fair share, if that is lower; the difference accumulates as a backlog. The action ends when
both have done its work.
"""

from typing import NamedTuple

import numpy as np

from pipeloom.schedule.kernels.types import Bools, Floats, Ints, Longs

ROUNDING = 1 + 1e-12


class State(NamedTuple):
    """What a walk has reached.

    Attributes:
        starts, ends: of each node; -1 before.
        left: seconds of each node that its resource has yet to do, when it last waited for the resource.
        turn: of each node, seconds of its next turn.
        goal, until: of each node, the work of its resource when the node and its turn end.
        backlog: of each node, seconds that its second resource has yet to do and the first one has done.
        growth: of each backlog in a second.
        is_running: whether each node has its resource.
        running, going: those that have their resource, and those with a second one that have started and not ended.
        size: how many these two are.
        work: of each resource, seconds of work that it would have done for a node that had run on it from the start.
        count: of nodes that run on each resource.
        free: places on each resource for nodes with turns.
        line, behind: the queues.
        room, unserved: of each second resource, what it has left to divide and among how many nodes.
    """

    starts: Floats
    ends: Floats
    left: Floats
    turn: Floats
    goal: Floats
    until: Floats
    backlog: Floats
    growth: Floats
    is_running: Bools
    running: Longs
    going: Longs
    size: Longs
    work: Floats
    count: Floats
    free: Floats
    line: Longs
    behind: Longs
    room: Floats
    unserved: Longs


def walk_sharing(
    num_open: Longs,
    begin: Longs,
    followers: Longs,
    resource: Ints,
    onward: Ints,
    thread: Ints,
    capacity: Floats,
    turn_s: Floats,
    seconds: Floats,
) -> tuple[Floats, Floats]:
    """As ``walk``; of actions that end at the same time, the smaller node goes first.

    Args:
        num_open: for each node how many it waits for.
        begin, followers: the nodes that wait for each node.
        resource, onward: of each node its first resource and its second one, 0 for none.
        thread: of each node.
        capacity: of each resource.
        turn_s: of each node, seconds of a turn at full speed on its resource; infinite if it does not wait for turns.
        seconds: of each node, alone on its resource.
    """
    is_open, is_patient, now = num_open.copy(), np.isfinite(turn_s), 0.0
    state = initial(seconds, turn_s, capacity)
    left, turn, backlog, line, behind = state.left, state.turn, state.backlog, state.line, state.behind
    ready: Longs = np.flatnonzero(is_open == 0)
    for node in ready:
        join(node, not is_patient[node], line[resource[node]], behind)
    while True:
        start(state, ready, now, resource, onward, is_patient)
        going, cleared, clear = state.going[: state.size[1]], 0, np.inf
        place, end = next_end(state, now, resource, capacity)
        if going.size > 0:
            set_growth(state, going, resource, onward, capacity)
            cleared, clear = next_clear(state, now, going)
        if min(end, clear) == np.inf:
            return state.starts, state.ends
        advance(state, going, min(end, clear) - now, capacity)
        now = min(end, clear)
        if clear < end:
            node, ready = cleared, np.zeros(0, np.int64)
            backlog[node] = 0.0  # exactly, or rounding would leave a little of it
        else:
            node = leave_resource(state, place, resource, is_patient)
            ready = np.full(1, node)  # its place is free
            if left[node] > 0.0:
                turn[node] = turn_s[node]
                join(node, False, line[resource[node]], behind)
        if left[node] > 0.0 or backlog[node] > 0.0 or state.is_running[node]:
            continue
        end_node(state, node, now, onward)
        new = opened(followers[begin[node] : begin[node + 1]], is_open)
        # It keeps the rest of its turn if it had its resource to the last.
        rest = state.until[node] - state.work[resource[node]] if ready.size and is_patient[node] else 0.0
        for follower in new:
            is_next = thread[follower] == thread[node] and resource[follower] == resource[node]
            continues = rest > 0.0 and is_patient[follower] and is_next
            turn[follower] = rest if continues else turn[follower]
            join(follower, continues or not is_patient[follower], line[resource[follower]], behind)
        ready = np.append(ready, new)


def initial(seconds: Floats, turn_s: Floats, capacity: Floats) -> State:
    """The state before the first node starts, with empty queues."""
    nodes, resources = seconds.size, capacity.size
    return State(
        np.full(nodes, -1.0),
        np.full(nodes, -1.0),
        seconds.copy(),
        turn_s.copy(),
        np.zeros(nodes),
        np.zeros(nodes),
        np.zeros(nodes),
        np.zeros(nodes),
        np.zeros(nodes, np.bool_),
        np.zeros(nodes, np.int64),
        np.zeros(nodes, np.int64),
        np.zeros(2, np.int64),
        np.zeros(resources),
        np.zeros(resources),
        np.ceil(capacity),
        np.full((resources, 2), -1),
        np.full(nodes, -1),
        np.zeros(resources),
        np.zeros(resources, np.int64),
    )


def start(state: State, ready: Longs, now: float, resource: Ints, onward: Ints, is_patient: Bools) -> None:
    """Let those that wait for the resources of some nodes have them, as far as there is room."""
    starts, goal, until, work, size = state.starts, state.goal, state.until, state.work, state.size
    for here in resource[ready]:
        line = state.line[here]
        while line[0] >= 0 and (state.free[here] > 0 or not is_patient[line[0]]):
            node = leave(line, state.behind)
            if starts[node] < 0.0:
                starts[node] = now
                if onward[node] > 0:
                    state.going[size[1]] = node
                    size[1] += 1
            goal[node], until[node] = work[here] + state.left[node], work[here] + state.turn[node]
            state.running[size[0]], state.is_running[node] = node, True
            size[0] += 1
            state.count[here] += 1
            state.free[here] -= is_patient[node]


def leave_resource(state: State, place: int, resource: Ints, is_patient: Bools) -> int:
    """Take a node, the next one that ends or whose turn does, from its resource; the place is among the running."""
    node = state.running[place]
    here = resource[node]
    # Exactly, or rounding would leave a little of what has ended.
    state.work[here] = min(state.goal[node], state.until[node])
    state.left[node] = state.goal[node] - state.work[here]
    state.count[here] -= 1
    state.free[here] += is_patient[node]
    state.is_running[node] = False
    # Their order does not matter, since ties go by number.
    state.size[0] -= 1
    state.running[place] = state.running[state.size[0]]
    return node


def end_node(state: State, node: int, now: float, onward: Ints) -> None:
    """Note when a node has ended, and let it leave those that continue on a second resource."""
    state.ends[node] = now
    if onward[node] > 0:
        state.size[1] -= 1
        for place in range(state.size[1]):
            if state.going[place] == node:
                state.going[place] = state.going[state.size[1]]


def opened(followers: Longs, is_open: Longs) -> Longs:
    """Those that have waited for one more node only, which has just ended."""
    found = np.zeros(followers.size, np.int64)
    number = 0
    for follower in followers:
        is_open[follower] -= 1
        if is_open[follower] == 0:
            found[number] = follower
            number += 1
    return found[:number]


def advance(state: State, going: Longs, seconds: float, capacity: Floats) -> None:
    """Let each resource that is in use work for some seconds."""
    work, count, backlog, growth = state.work, state.count, state.backlog, state.growth
    for here in range(capacity.size):
        if count[here] > 0:
            work[here] += seconds * speed(capacity[here], count[here])
    for node in going:
        backlog[node] = max(0.0, backlog[node] + seconds * growth[node])


def speed(capacity: float, count: float) -> float:
    """At which each of the nodes on a resource progresses."""
    return min(1.0, capacity / count)


def join(node: int, is_first: bool, line: Longs, behind: Longs) -> None:
    """Let a node wait at the begin or the end of a queue."""
    if line[0] < 0:
        line[0], line[1], behind[node] = node, node, -1
    elif is_first:
        line[0], behind[node] = node, line[0]
    else:
        behind[line[1]], line[1], behind[node] = node, node, -1


def leave(line: Longs, behind: Longs) -> int:
    """Take the first node of a queue."""
    node = line[0]
    line[0] = behind[node]
    return node


def next_end(state: State, now: float, resource: Ints, capacity: Floats) -> tuple[int, float]:
    """The place among the running nodes of the one whose action or turn ends first, and when; infinite for none."""
    running, goal, until, work, count = state.running, state.goal, state.until, state.work, state.count
    place, end = 0, np.inf
    for number in range(state.size[0]):
        node = running[number]
        here = resource[node]
        at = now + (min(goal[node], until[node]) - work[here]) / speed(capacity[here], count[here])
        if at < end or (at == end and node < running[place]):
            place, end = number, at
    return place, end


def set_growth(state: State, going: Longs, resource: Ints, onward: Ints, capacity: Floats) -> None:
    """Set the rates at which backlogs grow: each second resource gives its nodes max-min fair shares of its capacity.

    A node without a backlog demands the rate at which its first resource serves it, a node with a backlog the rate 1.
    Capacity that a node does not demand is divided among the others.
    """
    growth, room, unserved = state.growth, state.room, state.unserved
    for node in going:
        room[onward[node]], unserved[onward[node]] = capacity[onward[node]], 0
    for node in going:
        growth[node] = np.nan
        unserved[onward[node]] += 1
    is_changed = True
    while is_changed:
        is_changed = False
        for node in going:
            if np.isnan(growth[node]):
                here, comes = onward[node], supply(node, resource, capacity, state.count, state.is_running)
                needs = 1.0 if state.backlog[node] > 0.0 else comes
                if needs * unserved[here] <= room[here] * ROUNDING:
                    growth[node] = comes - needs
                    room[here] = max(0.0, room[here] - needs)
                    unserved[here] -= 1
                    is_changed = True
    for node in going:
        if np.isnan(growth[node]):
            share = room[onward[node]] / unserved[onward[node]]
            growth[node] = supply(node, resource, capacity, state.count, state.is_running) - share


def supply(node: int, resource: Ints, capacity: Floats, count: Floats, is_running: Bools) -> float:
    """Seconds of a node's work that its first resource does in a second."""
    return speed(capacity[resource[node]], count[resource[node]]) if is_running[node] else 0.0


def next_clear(state: State, now: float, going: Longs) -> tuple[int, float]:
    """The node whose backlog is cleared first, and when; infinite for none."""
    found, clear = 0, np.inf
    for node in going:
        at = np.inf
        if state.backlog[node] > 0.0 and state.growth[node] < 0.0:
            at = now - state.backlog[node] / state.growth[node]
        elif state.backlog[node] == 0.0 and state.left[node] == 0.0 and not state.is_running[node]:
            at = now  # cleared at the same time as another
        if at < clear or (at == clear and node < found):
            found, clear = node, at
    return found, clear
