"""When each action starts and ends, where ranks share resources.

While ``n`` actions run on a resource of capacity ``c``, each progresses at the speed ``min(1, c / n)``. They progress
alike, so each resource keeps its own time, the work that it has done for each of its actions; an action ends when that
has grown by its seconds.

On a resource with turns at most ``c`` actions run, rounded up, and the others wait in a queue. After its turn an action
goes to the end of the queue. What its thread does next, if that can start at once, has the rest of the turn. An action
whose own turn has no end starts at once.

A queue is a linked list: ``line`` has its first and its last node, negative first if it is empty, ``behind`` the node
after each.
"""

import numpy as np

from pipeloom.schedule.kernels.types import Bools, Floats, Ints, Longs


def walk_sharing(
    num_open: Longs,
    begin: Longs,
    followers: Longs,
    resource: Ints,
    thread: Ints,
    capacity: Floats,
    turn_s: Floats,
    seconds: Floats,
) -> tuple[Floats, Floats]:
    """As ``walk``; of actions that end at the same time, the smaller node goes first.

    Args:
        num_open: for each node how many it waits for.
        begin, followers: the nodes that wait for each node.
        resource: of each node.
        thread: of each node.
        capacity: of each resource.
        turn_s: of each node, seconds of a turn at full speed on its resource; infinite if it does not wait for turns.
        seconds: of each node, alone on its resource.
    """
    starts, ends = np.full(seconds.size, -1.0), np.full(seconds.size, -1.0)
    is_open, left, turn = num_open.copy(), seconds.copy(), turn_s.copy()
    goal, until = np.zeros(seconds.size), np.zeros(seconds.size)  # the resource's work when action and turn end
    work, count = np.zeros(capacity.size), np.zeros(capacity.size)
    free, is_patient = np.ceil(capacity), np.isfinite(turn_s)
    running, num_running, now = np.zeros(seconds.size, np.int64), 0, 0.0
    ready: Longs = np.flatnonzero(is_open == 0)
    line, behind = queues(ready, resource, is_patient, capacity.size)
    while True:
        for here in resource[ready]:
            while line[here, 0] >= 0 and (free[here] > 0 or not is_patient[line[here, 0]]):
                node = leave(line[here], behind)
                starts[node] = now if starts[node] < 0.0 else starts[node]
                goal[node], until[node] = work[here] + left[node], work[here] + turn[node]
                running[num_running] = node
                num_running, count[here], free[here] = num_running + 1, count[here] + 1, free[here] - is_patient[node]
        if num_running == 0:
            break
        place, end = next_end(now, running[:num_running], resource, capacity, count, work, goal, until)
        node, here = running[place], resource[running[place]]
        advance(work, end - now, capacity, count)
        # Exactly, or rounding would leave a little of what has ended.
        work[here], now = min(goal[node], until[node]), end
        num_running, count[here], free[here] = num_running - 1, count[here] - 1, free[here] + is_patient[node]
        # Their order does not matter, since ties go by number.
        running[place] = running[num_running]
        ready = np.full(1, node)  # its place is free
        if until[node] < goal[node]:
            left[node], turn[node] = goal[node] - until[node], turn_s[node]
            join(node, False, line[here], behind)
            continue
        ends[node] = end
        ready = np.append(ready, opened(followers[begin[node] : begin[node + 1]], is_open))
        for follower in ready[1:]:
            has_rest = is_patient[node] and is_patient[follower] and until[node] > work[here]
            continues = has_rest and resource[follower] == here and thread[follower] == thread[node]
            turn[follower] = until[node] - work[here] if continues else turn[follower]
            join(follower, continues or not is_patient[follower], line[resource[follower]], behind)
    return starts, ends


def queues(ready: Longs, resource: Ints, is_patient: Bools, num_resources: int) -> tuple[Longs, Longs]:
    """The queues of all resources, with those that are ready at the begin."""
    line, behind = np.full((num_resources, 2), -1), np.full(resource.size, -1)
    for node in ready:
        join(node, not is_patient[node], line[resource[node]], behind)
    return line, behind


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


def advance(work: Floats, seconds: float, capacity: Floats, count: Floats) -> None:
    """Let each resource that is in use work for some seconds."""
    for here in range(capacity.size):
        if count[here] > 0:
            work[here] += seconds * min(1.0, capacity[here] / count[here])


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


def next_end(
    now: float,
    running: Longs,
    resource: Ints,
    capacity: Floats,
    count: Floats,
    work: Floats,
    goal: Floats,
    until: Floats,
) -> tuple[int, float]:
    """The place among the running nodes of the one whose action or turn ends first, and when."""
    place, end = 0, np.inf
    for number in range(running.size):
        node = running[number]
        here = resource[node]
        at = now + (min(goal[node], until[node]) - work[here]) / min(1.0, capacity[here] / count[here])
        if at < end or (at == end and node < running[place]):
            place, end = number, at
    return place, end
