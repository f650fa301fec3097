"""What each action waits for: the one dependency relation, on numbers."""

import numpy as np

from pipeloom.schedule.kernels.types import Bools, Ints, Longs, Shape
from pipeloom.schedule.kinds import KINDS, NUM_COMPUTE, NUM_KEYED, Group, Kind

FORWARD = Kind.FORWARD.code
BACKWARD = Kind.BACKWARD.code
BACKWARD_INPUT = Kind.BACKWARD_INPUT.code
BACKWARD_WEIGHT = Kind.BACKWARD_WEIGHT.code
RECOMPUTE = Kind.RECOMPUTE.code
SEND_F = Kind.SEND_F.code
RECV_F = Kind.RECV_F.code
SEND_B = Kind.SEND_B.code
RECV_B = Kind.RECV_B.code
UNSHARD = Kind.UNSHARD.code
RUNS_BESIDE = tuple(kind.lane != "compute" for kind in KINDS)
"""For each code whether its kind is communication."""
SOURCE = tuple(
    FORWARD if kind.group is Group.MOVE_OUT else kind.partner.code if kind.group is Group.MOVE_BACK else -1
    for kind in KINDS
)
"""For each code of a move the kind on the same stage whose result it uses; -1 for others."""
ABSENT = -2
"""In place of a node: the schedule lacks the action that is needed."""
NUM_WAITS = 5
"""Most actions that one action waits for: three for data, the one before it on its lane, one for its place."""


def key_of(kind: int, stage: int, microbatch: int, part: int, shape: Shape) -> int:
    """The number of an action among all that name a micro-batch.

    Args:
        kind: below ``NUM_KEYED``.
        stage, microbatch, part: of the action.
        shape: numbers of stages, micro-batches and token slices.
    """
    return ((kind * shape[0] + stage) * shape[1] + microbatch) * shape[2] + part


def place(kind: Ints, stage: Ints, microbatch: Ints, part: Ints, shape: Shape) -> Ints:
    """For each key the node of its action, ``ABSENT`` where there is none."""
    node_of = np.full(NUM_KEYED * shape[0] * shape[1] * shape[2], ABSENT, np.int32)
    for node in range(kind.size):
        if kind[node] < NUM_KEYED:
            node_of[key_of(kind[node], stage[node], microbatch[node], part[node], shape)] = node
    return node_of


def input_gradient(stage: int, microbatch: int, part: int, shape: Shape, is_split: Bools) -> int:
    """The key of the action that makes the gradient for a stage's input: the backward, or its input gradient."""
    kind = BACKWARD_INPUT if is_split[stage, microbatch, part] else BACKWARD
    return key_of(kind, stage, microbatch, part, shape)


def needs(
    kind: int,
    stage: int,
    microbatch: int,
    part: int,
    shape: Shape,
    is_received: Bools,
    is_split: Bools,
    keeper: Ints,
    is_recomputed: Bools,
    found: Longs,
) -> int:
    """Write the keys of the actions whose results an action uses to ``found``; their number.

    Args:
        kind, stage, microbatch, part: of the action.
        shape: numbers of stages, micro-batches and token slices.
        is_received: for each stage whether its output reaches the next stage by a receive.
        is_split: for each stage, micro-batch and slice whether the backward is split into halves.
        keeper: for each stage, micro-batch and slice the kind of the action after which the rank has what was kept of
            the forward: itself, or what brings it back.
        is_recomputed: for each stage, micro-batch and slice whether the backward needs the forward computed again.
        found: takes up to three keys.
    """
    count = 0
    if kind == FORWARD:
        if stage > 0:
            source = key_of(RECV_F, stage, microbatch, part, shape)
            if not is_received[stage - 1]:
                source = key_of(FORWARD, stage - 1, microbatch, part, shape)
            found[count] = source
            count += 1
        if part > 0:  # keys and values of the earlier slice, on the same stage
            found[count] = key_of(FORWARD, stage, microbatch, part - 1, shape)
            count += 1
    elif kind in (BACKWARD, BACKWARD_INPUT):
        # A recomputation waits for what was kept itself, so the backward need not.
        kept = RECOMPUTE if is_recomputed[stage, microbatch, part] else keeper[stage, microbatch, part]
        found[count] = key_of(kept, stage, microbatch, part, shape)
        count += 1
        if stage + 1 < shape[0]:
            source = key_of(RECV_B, stage, microbatch, part, shape)
            if not is_received[stage]:
                source = input_gradient(stage + 1, microbatch, part, shape, is_split)
            found[count] = source
            count += 1
        if part + 1 < shape[2]:  # gradients for keys and values from the later slice
            found[count] = input_gradient(stage, microbatch, part + 1, shape, is_split)
            count += 1
    elif kind == RECOMPUTE:
        found[0] = key_of(keeper[stage, microbatch, part], stage, microbatch, part, shape)
        count = 1
    else:
        found[0] = source_of(kind, stage, microbatch, part, shape, is_split)
        count = int(found[0] >= 0)
    return count


def source_of(kind: int, stage: int, microbatch: int, part: int, shape: Shape, is_split: Bools) -> int:
    """The key of the one action whose result a half backward or communication uses; -1 for none."""
    if kind == BACKWARD_WEIGHT:
        return key_of(BACKWARD_INPUT, stage, microbatch, part, shape)
    if kind == SEND_F:
        return key_of(FORWARD, stage, microbatch, part, shape)
    if kind == SEND_B:
        return input_gradient(stage, microbatch, part, shape, is_split)
    if kind == RECV_F:
        return key_of(SEND_F, stage - 1, microbatch, part, shape)
    if kind == RECV_B:
        return key_of(SEND_B, stage + 1, microbatch, part, shape)
    if SOURCE[kind] >= 0:
        return key_of(SOURCE[kind], stage, microbatch, part, shape)
    return -1


def find_waits(
    kind: Ints,
    stage: Ints,
    microbatch: Ints,
    part: Ints,
    first: Longs,
    lane: Ints,
    num_lanes: int,
    node_of: Ints,
    shape: Shape,
    is_received: Bools,
    is_split: Bools,
    keeper: Ints,
    is_recomputed: Bools,
) -> Ints:
    """For each node the nodes that have to end before it starts.

    Args:
        kind, stage, microbatch, part, first: the columns of a schedule.
        lane: for each node its lane, numbered over all ranks.
        num_lanes: number of lanes.
        node_of: from ``place``.
        shape, is_received, is_split, keeper, is_recomputed: see ``needs``.

    Returns:
        [nodes, NUM_WAITS]: three for data, then the action before it on its lane, then what its place in the
        row demands; -1 for none, ``ABSENT`` for one that the schedule lacks.
    """
    waits = np.full((kind.size, NUM_WAITS), -1, np.int32)
    last_on_lane = np.full(num_lanes, -1, np.int32)
    last_unshard = np.full(shape[0], -1, np.int32)
    found = np.zeros(3, np.int64)
    for rank in range(first.size - 1):
        last_compute = -1
        for node in range(first[rank], first[rank + 1]):
            code, here = kind[node], stage[node]
            count = needs(
                code, here, microbatch[node], part[node], shape, is_received, is_split, keeper, is_recomputed, found
            )
            for number in range(count):
                waits[node, number] = node_of[found[number]]
            waits[node, 3] = last_on_lane[lane[node]]
            last_on_lane[lane[node]] = node
            # Communication is posted when the compute action before it has ended (docs/design.md).
            if code >= NUM_COMPUTE:
                waits[node, 4] = last_compute
            elif code != BACKWARD_WEIGHT:  # which does not need the weights
                waits[node, 4] = last_unshard[here]
            if not RUNS_BESIDE[code]:
                last_compute = node
            if code == UNSHARD:
                last_unshard[here] = node
    return waits
