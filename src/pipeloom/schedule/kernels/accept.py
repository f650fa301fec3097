"""Whether a schedule keeps every rule of its level: yes or no, in one pass for each group of rules.

The rules are written to be read in ``pipeloom.schedule.verify``, which also says what is wrong and where. This is their
fast form for large schedules; tests hold both equal.
"""

import numpy as np

from pipeloom.schedule.kernels.types import Bools, Ints, Longs, Shape
from pipeloom.schedule.kinds import LOAD_OF, NUM_COMPUTE, NUM_KEYED, Kind

FORWARD = Kind.FORWARD.code
BACKWARD = Kind.BACKWARD.code
BACKWARD_INPUT = Kind.BACKWARD_INPUT.code
BACKWARD_WEIGHT = Kind.BACKWARD_WEIGHT.code
RECOMPUTE = Kind.RECOMPUTE.code
SEND_F = Kind.SEND_F.code
RECV_F = Kind.RECV_F.code
SEND_B = Kind.SEND_B.code
RECV_B = Kind.RECV_B.code
MOVES = tuple((out.code, back.code) for out, back in LOAD_OF.items())
UNSHARD = Kind.UNSHARD.code
RESHARD = Kind.RESHARD.code
REDUCE_GRAD = Kind.REDUCE_GRAD.code
SWAP_IN = Kind.SWAP_IN.code
SWAP_OUT = Kind.SWAP_OUT.code
UPDATE = Kind.UPDATE.code
NO_MICROBATCH = -(2**31)


def belongs(
    kind: Ints, stage: Ints, microbatch: Ints, part: Ints, first: Longs, owner: Ints, shape: Shape, num_kinds: int
) -> bool:
    """Whether every action may be on its rank: kinds of the level, numbers in range, stages that the rank holds.

    Args:
        kind, stage, microbatch, part, first: the columns of a schedule.
        owner: for each stage its rank.
        shape: numbers of stages, micro-batches and token slices.
        num_kinds: kinds that the level has: the first ones.
    """
    for rank in range(first.size - 1):
        for node in range(first[rank], first[rank + 1]):
            if kind[node] >= num_kinds or not 0 <= stage[node] < shape[0] or owner[stage[node]] != rank:
                return False
            if kind[node] >= NUM_KEYED:
                if microbatch[node] != NO_MICROBATCH or part[node] != 0:
                    return False
            elif not (0 <= microbatch[node] < shape[1] and 0 <= part[node] < shape[2]):
                return False
    return True


def is_unique(kind: Ints, stage: Ints, microbatch: Ints, part: Ints, shape: Shape) -> bool:
    """Whether no action recurs, but for those that concern a whole stage."""
    seen = np.zeros(NUM_KEYED * shape[0] * shape[1] * shape[2], np.bool_)
    for node in range(kind.size):
        if kind[node] < NUM_KEYED:
            key = ((kind[node] * shape[0] + stage[node]) * shape[1] + microbatch[node]) * shape[2] + part[node]
            if seen[key]:
                return False
            seen[key] = True
    return True


def computes(node_of: Ints, shape: Shape, first_backward_stage: int) -> bool:
    """Whether every micro-batch goes forward and, where stages train, back once, in this order on its rank; what is
    recomputed, in between.

    Args:
        node_of: [kind, stage, micro-batch, slice] -> node, negative for none.
        shape: numbers of stages, micro-batches and token slices.
        first_backward_stage: stages from it on train.
    """
    for stage in range(shape[0]):
        for microbatch in range(shape[1]):
            for part in range(shape[2]):
                forward = node_of[FORWARD, stage, microbatch, part]
                whole = node_of[BACKWARD, stage, microbatch, part]
                half = node_of[BACKWARD_INPUT, stage, microbatch, part]
                other = node_of[BACKWARD_WEIGHT, stage, microbatch, part]
                if forward < 0:
                    return False
                if stage < first_backward_stage:
                    if whole >= 0 or half >= 0 or other >= 0:
                        return False
                elif whole >= 0:
                    if half >= 0 or other >= 0 or whole < forward:
                        return False
                elif half < forward or other < half:  # also if one is missing
                    return False
                again = node_of[RECOMPUTE, stage, microbatch, part]
                if again >= 0 and not forward < again < max(whole, half):
                    return False
    return True


def sends(node_of: Ints, number_on_lane: Ints, shape: Shape, crosses: Bools, first_backward_stage: int) -> bool:
    """Whether the tensors that change rank, and no others, are sent after they are made, taken in the order sent, and
    received before they are used.

    Args:
        node_of: see ``computes``.
        number_on_lane: for each node how many stand before it on its lane.
        shape: numbers of stages, micro-batches and token slices.
        crosses: for each stage whether the next one is on another rank.
        first_backward_stage: stages from it on train.
    """
    for stage in range(shape[0]):
        goes_on = crosses[stage]
        goes_back = stage > 0 and stage > first_backward_stage and crosses[stage - 1]
        for microbatch in range(shape[1]):
            for part in range(shape[2]):
                made = node_of[FORWARD, stage, microbatch, part]
                sent = node_of[SEND_F, stage, microbatch, part]
                if (sent >= 0) != goes_on or (sent >= 0 and sent < made):
                    return False
                if stage + 1 < shape[0]:
                    taken = node_of[RECV_F, stage + 1, microbatch, part]
                    used = node_of[FORWARD, stage + 1, microbatch, part]
                    if (taken >= 0) != goes_on or (taken >= 0 and taken > used):
                        return False
                    if goes_on and number_on_lane[sent] != number_on_lane[taken]:
                        return False
                made = max(node_of[BACKWARD, stage, microbatch, part], node_of[BACKWARD_INPUT, stage, microbatch, part])
                sent = node_of[SEND_B, stage, microbatch, part]
                if (sent >= 0) != goes_back or (sent >= 0 and sent < made):
                    return False
                if stage > 0:
                    taken = node_of[RECV_B, stage - 1, microbatch, part]
                    used = max(
                        node_of[BACKWARD, stage - 1, microbatch, part],
                        node_of[BACKWARD_INPUT, stage - 1, microbatch, part],
                    )
                    if (taken >= 0) != goes_back or (taken >= 0 and taken > used):
                        return False
                    if goes_back and number_on_lane[sent] != number_on_lane[taken]:
                        return False
    return not has_strangers(node_of, shape)


def swaps(node_of: Ints, shape: Shape, first_backward_stage: int) -> bool:
    """Whether what is evicted is loaded again, and both happen between the forward and the backward that needs it.

    Args:
        node_of: see ``computes``.
        shape: numbers of stages, micro-batches and token slices.
        first_backward_stage: stages from it on train.
    """
    for stage in range(shape[0]):
        for microbatch in range(shape[1]):
            for part in range(shape[2]):
                made = node_of[FORWARD, stage, microbatch, part]
                used = node_of[RECOMPUTE, stage, microbatch, part]
                if used < 0:
                    used = max(
                        node_of[BACKWARD, stage, microbatch, part], node_of[BACKWARD_INPUT, stage, microbatch, part]
                    )
                num_ways = 0
                for tier in MOVES:
                    out = node_of[tier[0], stage, microbatch, part]
                    back = node_of[tier[1], stage, microbatch, part]
                    if out < 0 and back < 0:
                        continue
                    num_ways += 1
                    if stage < first_backward_stage or not made < out < back < used:
                        return False
                if num_ways > 1:
                    return False
    return True


def has_strangers(node_of: Ints, shape: Shape) -> bool:
    """Whether something is received by the first stage from before it, or by the last one from behind it."""
    last = shape[0] - 1
    for microbatch in range(shape[1]):
        for part in range(shape[2]):
            if node_of[RECV_F, 0, microbatch, part] >= 0 or node_of[RECV_B, last, microbatch, part] >= 0:
                return True
    return False


def gathers(kind: Ints, stage: Ints, first: Longs, num_stages: int, max_gathered: int) -> bool:
    """Whether stages that are ever gathered are so when they compute, and never more at once than promised.

    Args:
        kind, stage, first: columns of a schedule.
        num_stages: of the pipeline.
        max_gathered: the most stages that a rank may have gathered.
    """
    is_sharded = np.zeros(num_stages, np.bool_)
    for node in range(kind.size):
        if kind[node] == UNSHARD:
            is_sharded[stage[node]] = True
    is_gathered = np.zeros(num_stages, np.bool_)
    for rank in range(first.size - 1):
        count = 0
        for node in range(first[rank], first[rank + 1]):
            here = stage[node]
            if kind[node] == UNSHARD:
                if is_gathered[here]:
                    return False
                is_gathered[here] = True
                count += 1
                if count > max_gathered:
                    return False
            elif kind[node] == RESHARD:
                if not is_gathered[here]:
                    return False
                is_gathered[here] = False
                count -= 1
            elif (
                kind[node] < NUM_COMPUTE
                and kind[node] != BACKWARD_WEIGHT
                and is_sharded[here]
                and not is_gathered[here]
            ):
                return False
    return True


def reduces(kind: Ints, stage: Ints, first: Longs, num_stages: int, gradient_buffers: int) -> bool:
    """Whether every contribution is reduced once, if any is, and never more stages wait for it than there is room for.

    Args:
        kind, stage, first: columns of a schedule.
        num_stages: of the pipeline.
        gradient_buffers: the most stages that may have an unreduced gradient.
    """
    is_open = np.zeros(num_stages, np.bool_)  # whether a stage has an unreduced gradient
    is_any = False
    for rank in range(first.size - 1):
        count = 0
        for node in range(first[rank], first[rank + 1]):
            here = stage[node]
            if kind[node] == REDUCE_GRAD:
                if not is_open[here]:
                    return False
                is_open[here] = False
                is_any = True
                count -= 1
            elif kind[node] in (BACKWARD, BACKWARD_WEIGHT) and not is_open[here]:
                is_open[here] = True
                count += 1
                if count > gradient_buffers:
                    return False
    return not (is_any and is_open.any())


def swaps_stages(kind: Ints, stage: Ints, first: Longs, sizes: Longs, max_resident: int) -> bool:
    """Whether stages that are ever swapped are on the device when they are used, are not where the rows end, and never
    take more room than promised.

    Args:
        kind, stage, first: columns of a schedule.
        sizes: for each stage the room that it takes.
        max_resident: the room of a rank.
    """
    is_swapped = np.zeros(sizes.size, np.bool_)
    for node in range(kind.size):
        if kind[node] == SWAP_IN:
            is_swapped[stage[node]] = True
    is_here = np.zeros(sizes.size, np.bool_)
    for rank in range(first.size - 1):
        taken = 0
        for node in range(first[rank], first[rank + 1]):
            here = stage[node]
            if kind[node] == SWAP_IN:
                if is_here[here]:
                    return False
                is_here[here] = True
                taken += sizes[here]
                if taken > max_resident:
                    return False
            elif kind[node] == SWAP_OUT:
                if not is_here[here]:
                    return False
                is_here[here] = False
                taken -= sizes[here]
            elif is_swapped[here] and not is_here[here] and uses_stage(kind[node]):
                return False
    return not is_here.any()


def uses_stage(kind: int) -> bool:
    """Whether an action of a kind takes its stage's weights or gradient."""
    return kind < NUM_COMPUTE or kind in (REDUCE_GRAD, UPDATE)


def updates(kind: Ints, stage: Ints, num_stages: int, first_backward_stage: int) -> bool:
    """Whether each stage that trains is updated once, if any is, behind all that adds to its gradient or reduces it, or
    all of them before their first use.

    Args:
        kind, stage: columns of a schedule.
        num_stages: of the pipeline.
        first_backward_stage: stages from it on train.
    """
    is_used, is_updated = np.zeros(num_stages, np.bool_), np.zeros(num_stages, np.bool_)
    is_any = is_deferred = False
    for node in range(kind.size):
        here = stage[node]
        if kind[node] == UPDATE:
            if is_updated[here] or here < first_backward_stage or (is_any and is_used[here] == is_deferred):
                return False
            is_deferred = not is_used[here]
            is_updated[here] = is_any = True
        elif uses_stage(kind[node]):
            is_used[here] = True
            is_final = kind[node] in (BACKWARD, BACKWARD_WEIGHT, REDUCE_GRAD)
            if is_updated[here] and not is_deferred and is_final:
                return False
    return not is_any or bool(is_updated[first_backward_stage:].all())


def number_on_lanes(lane: Ints, num_lanes: int) -> Ints:
    """For each node how many stand before it on its lane."""
    count = np.zeros(num_lanes, np.int32)
    numbers = np.zeros(lane.size, np.int32)
    for node in range(lane.size):
        numbers[node] = count[lane[node]]
        count[lane[node]] += 1
    return numbers
