"""Where sends and receives go in a compute-only schedule."""

import numpy as np

from pipeloom.schedule.kernels.types import Bools, Ints, Longs
from pipeloom.schedule.kernels.waits import BACKWARD, BACKWARD_INPUT, FORWARD, RECV_B, RECV_F, SEND_B, SEND_F


def message_of(kind: int, stage: int, crosses: Bools, first_backward_stage: int) -> tuple[int, int]:
    """The kind of the send that follows a compute action, -1 for none; and the stage that receives."""
    if kind == FORWARD:
        if crosses[stage]:
            return SEND_F, stage + 1
    # Stages below it are frozen: they take no gradient.
    elif kind in (BACKWARD, BACKWARD_INPUT) and stage > first_backward_stage and crosses[stage - 1]:
        return SEND_B, stage - 1
    return -1, stage


def find_messages(
    kind: Ints,
    stage: Ints,
    microbatch: Ints,
    part: Ints,
    first: Longs,
    owner: Ints,
    crosses: Bools,
    first_backward_stage: int,
    user_of: Ints,
) -> tuple[Ints, Ints, Longs]:
    """The messages of a compute-only schedule, edge by edge, on each in the order in which they are sent.

    Args:
        kind, stage, microbatch, part, first: the columns of a schedule.
        owner: for each stage its rank.
        crosses: for each stage whether the next one is on another rank.
        first_backward_stage: stages from it on train.
        user_of: [2, stage, micro-batch, slice] -> node of the forward, and of the action that uses the gradient.

    Returns:
        For each message the node that makes it and the node that uses it; and for each directed edge the number of its
        first message, behind them the number of all. Edges are in the order in which they first occur.
    """
    num_ranks = first.size - 1
    edge_of = np.full((num_ranks, num_ranks), -1, np.int32)
    count = np.zeros(num_ranks * num_ranks + 1, np.int64)
    num_edges = 0
    for rank in range(num_ranks):
        for node in range(first[rank], first[rank + 1]):
            sent, receiver = message_of(kind[node], stage[node], crosses, first_backward_stage)
            if sent >= 0:
                other = owner[receiver]
                if edge_of[rank, other] < 0:
                    edge_of[rank, other] = num_edges
                    num_edges += 1
                # One place further, so that the sums are where each edge begins.
                count[edge_of[rank, other] + 1] += 1
    begin = np.cumsum(count[: num_edges + 1])
    free = begin.copy()
    makers = np.zeros(begin[num_edges], np.int32)
    users = np.zeros(begin[num_edges], np.int32)
    for rank in range(num_ranks):
        for node in range(first[rank], first[rank + 1]):
            sent, receiver = message_of(kind[node], stage[node], crosses, first_backward_stage)
            if sent >= 0:
                edge = edge_of[rank, owner[receiver]]
                side = 0 if sent == SEND_F else 1
                makers[free[edge]] = node
                users[free[edge]] = user_of[side, receiver, microbatch[node], part[node]]
                free[edge] += 1
    return makers, users, begin


def post(users: Ints, begin: Longs, first_node: Longs, receive_buffers: int) -> Ints:
    """For each message the node before which its receive is posted.

    Receive ``k`` of an edge needs a buffer: all but ``receive_buffers - 1`` of the earlier ones are used. It must
    precede its user, and before the user of every later receive, since receives stay in order.

    Args:
        users: for each message the node that uses it.
        begin: for each edge the number of its first message, behind them the number of all.
        first_node: for each edge the first node of the receiving rank.
        receive_buffers: receives that may be posted and unused at once.
    """
    posted = users.copy()
    latest_uses = np.zeros(receive_buffers, np.int32)  # the largest so far, ascending
    for edge in range(begin.size - 1):
        # From the last one: a receive precedes the user of every later one, since they stay in order.
        for number in range(begin[edge + 1] - 2, begin[edge] - 1, -1):
            posted[number] = min(posted[number], posted[number + 1])
        earliest = first_node[edge]
        for number in range(begin[edge], begin[edge + 1]):
            count = number - begin[edge]
            if count >= receive_buffers:
                earliest = max(earliest, latest_uses[0] + 1)
            posted[number] = min(posted[number], earliest)
            earliest = posted[number]
            remember(latest_uses, min(count, receive_buffers), users[number])
    return posted


def remember(largest: Ints, count: int, value: int) -> None:
    """Insert a value into the ascending largest values, of which there are ``count``; the smallest falls out."""
    if count == largest.size:
        if value <= largest[0]:
            return
        place = 0
        while place + 1 < count and largest[place + 1] < value:
            largest[place] = largest[place + 1]
            place += 1
    else:
        place = count
        while place > 0 and largest[place - 1] > value:
            largest[place] = largest[place - 1]
            place -= 1
    largest[place] = value


def insert(
    kind: Ints, stage: Ints, microbatch: Ints, part: Ints, first: Longs, makers: Ints, users: Ints, posted: Ints
) -> tuple[Ints, Longs]:
    """The rows with sends and receives in them.

    Args:
        kind, stage, microbatch, part, first: the columns of a compute-only schedule.
        makers, users, posted: for each message its nodes, edge by edge.

    Returns:
        The columns of the lowered schedule.
    """
    num_nodes = kind.size
    num_before = np.zeros(num_nodes + 1, np.int64)  # receives posted before a node
    has_send = np.zeros(num_nodes, np.bool_)
    for number in range(makers.size):
        num_before[posted[number]] += 1
        has_send[makers[number]] = True
    begin = np.zeros(num_nodes + 1, np.int64)  # where a node's group begins
    for node in range(num_nodes):
        begin[node + 1] = begin[node] + num_before[node] + 1 + has_send[node]
    size = begin[num_nodes]
    columns = np.zeros((4, size), np.int32)
    for node in range(num_nodes):
        put(columns, begin[node] + num_before[node], kind[node], stage[node], microbatch[node], part[node])
    num_filled = np.zeros(num_nodes, np.int64)
    for number in range(makers.size):
        maker, user, before = makers[number], users[number], posted[number]
        is_forward = kind[maker] == FORWARD
        sent, taken = (SEND_F, RECV_F) if is_forward else (SEND_B, RECV_B)
        # The last place of a node's group: its receives, itself, its send.
        put(columns, begin[maker + 1] - 1, sent, stage[maker], microbatch[maker], part[maker])
        put(columns, begin[before] + num_filled[before], taken, stage[user], microbatch[user], part[user])
        num_filled[before] += 1
    return columns, begin[first]


def put(columns: Ints, place: int, kind: int, stage: int, microbatch: int, part: int) -> None:
    """Write one action."""
    columns[0, place] = kind
    columns[1, place] = stage
    columns[2, place] = microbatch
    columns[3, place] = part
