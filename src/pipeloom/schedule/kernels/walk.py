"""When each action starts and ends: the longest path through what it waits for."""

import numpy as np

from pipeloom.schedule.kernels.types import Floats, Ints, Longs


def walk(waits: Ints, lane: Ints, num_lanes: int, seconds: Floats) -> tuple[Floats, Floats]:
    """Start every action when all that it waits for has ended.

    Lanes run ahead by turns: each until its next action waits for one that has not been reached yet. That one's lane
    wakes it.

    Args:
        waits: [nodes, w], the nodes that each node waits for; negative for none.
        lane: for each node its lane; a lane's nodes run in ascending order.
        num_lanes: number of lanes.
        seconds: of each node.

    Returns:
        Starts and ends; -1 where an action was not reached, because it is on or behind a cycle.
    """
    num_nodes = lane.size
    starts = np.full(num_nodes, -1.0)
    ends = np.full(num_nodes, -1.0)
    following = np.full(num_nodes, -1, np.int32)  # the next node on the same lane
    head = np.full(num_lanes, -1, np.int32)
    # From the end, so that the head of a list is the lane's first node.
    for node in range(num_nodes - 1, -1, -1):
        following[node] = head[lane[node]]
        head[lane[node]] = node
    sleeper = np.full(num_nodes, -1, np.int32)  # a lane that waits for this node
    next_sleeper = np.full(num_lanes, -1, np.int32)  # another one that waits for the same
    # A stack: the lane on top is the first one.
    awake = np.arange(num_lanes)[::-1].copy()
    num_awake = num_lanes
    while num_awake > 0:
        num_awake -= 1
        here = awake[num_awake]
        node = head[here]
        while node >= 0:
            start = 0.0
            blocker = -1
            for number in range(waits.shape[1]):
                needed = waits[node, number]
                if needed >= 0:
                    # One that has not ended is enough to stop; the others are checked when the lane continues.
                    if ends[needed] < 0.0:
                        blocker = needed
                        break
                    start = max(start, ends[needed])
            if blocker >= 0:
                next_sleeper[here] = sleeper[blocker]
                sleeper[blocker] = here
                break
            starts[node] = start
            ends[node] = start + seconds[node]
            woken = sleeper[node]
            while woken >= 0:
                awake[num_awake] = woken
                num_awake += 1
                woken = next_sleeper[woken]
            node = following[node]
        head[here] = node
    return starts, ends


def walk_sharing(
    num_open: Longs, begin: Longs, followers: Longs, resource: Ints, capacity: Floats, seconds: Floats
) -> tuple[Floats, Floats]:
    """As ``walk``, where actions on one resource slow each other down.

    While ``n`` actions run on a resource of capacity ``c``, each progresses at the speed ``min(1, c / n)``. They
    progress alike, so each resource keeps its own time, the work that it has done for each of its actions; an action
    ends when that has grown by its seconds. Of those that end at the same time, the smaller node goes first.

    Args:
        num_open: for each node how many it waits for.
        begin, followers: the nodes that wait for each node.
        resource: of each node.
        capacity: of each resource.
        seconds: of each node, alone on its resource.
    """
    starts, ends = np.full(seconds.size, -1.0), np.full(seconds.size, -1.0)
    is_open = num_open.copy()
    goal = np.zeros(seconds.size)  # the resource's work at which a node ends
    work, count = np.zeros(capacity.size), np.zeros(capacity.size)
    running = np.flatnonzero(is_open == 0)
    num_running = running.size
    running = np.append(running, np.zeros(seconds.size - num_running, running.dtype))
    for node in running[:num_running]:
        starts[node], goal[node] = 0.0, seconds[node]
        count[resource[node]] += 1
    now = 0.0
    while num_running > 0:
        place, end = next_end(now, running[:num_running], resource, capacity, count, work, goal)
        node = running[place]
        for here in range(capacity.size):
            if count[here] > 0:
                work[here] += (end - now) * min(1.0, capacity[here] / count[here])
        # Exactly, or rounding would leave a little of an action that has ended.
        work[resource[node]] = goal[node]
        now = ends[node] = end
        num_running -= 1
        # The last one takes its place: the order of the running nodes does not matter, since ties go by number.
        running[place] = running[num_running]
        count[resource[node]] -= 1
        for follower in followers[begin[node] : begin[node + 1]]:
            is_open[follower] -= 1
            if is_open[follower] == 0:
                here = resource[follower]
                starts[follower], goal[follower] = now, work[here] + seconds[follower]
                running[num_running] = follower
                num_running += 1
                count[here] += 1
    return starts, ends


def next_end(
    now: float, running: Longs, resource: Ints, capacity: Floats, count: Floats, work: Floats, goal: Floats
) -> tuple[int, float]:
    """The place among the running nodes of the one that ends first, and when."""
    place, end = 0, np.inf
    for number in range(running.size):
        node = running[number]
        here = resource[node]
        at = now + (goal[node] - work[here]) / min(1.0, capacity[here] / count[here])
        if at < end or (at == end and node < running[place]):
            place, end = number, at
    return place, end
