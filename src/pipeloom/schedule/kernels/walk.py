"""When each action starts and ends: the longest path through what it waits for."""

import numpy as np

from pipeloom.schedule.kernels.types import Floats, Ints


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
