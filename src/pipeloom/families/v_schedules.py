"""Families on a V placement: each rank has one stage on the way down and one on the way back; rank 0 has both ends.

ZB-V, V-Half and V-Min repeat a building block (arXiv 2405.15362, section 3): the times at which ranks run the forwards
and the input gradients of one micro-batch, where each takes one unit. Each micro-batch follows the previous one after
six units, which is the work of a rank for one micro-batch. The time for which the block keeps inputs sets the memory. A
schedule has no times, so idle time at both ends disappears; weight gradients are inserted afterwards.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from pipeloom.families.family import Request, Rows, family
from pipeloom.families.weight_gradients import rows_with_weight_gradients
from pipeloom.schedule import Kind, Row

# Forward, input gradient and weight gradient, one unit each, on two stages.
_PERIOD = 6


class _Hops(NamedTuple):
    """Units between the actions of neighboring ranks, on the way down (``there``) and on the way ``back``.

    Inputs live for about ``2 P (there + back)`` units on a rank's two stages together, which is ``(there + back) / 6``
    of the activation memory of 1F1B (arXiv 2405.15362, section 3.2).
    """

    there: int
    back: int


def _on_a_v(request: Request) -> list[list[int]]:
    """The closed form for ZB-V: both stages together hold as much as 1F1B."""
    pp, count = request.placement.num_ranks, request.num_microbatches
    there = [min(2 * pp - 1 - rank, count) for rank in range(pp)]
    return [[held, 2 * min(pp, count) - held] for held in there]


def _at_half(request: Request) -> list[list[int]]:
    """The closed form for V-Half: both stages together hold P + 2 inputs, or P + 1."""
    pp, count = request.placement.num_ranks, request.num_microbatches
    most, back = 2 * ((pp + 2) // 2), [1 + (rank + 1) // 2 for rank in range(pp)]
    return [[min(most - held, count), min(held, count)] for held in back]


def _at_least(request: Request) -> list[list[int]]:
    """The closed form for V-Min.

    Where P is not 1 more than a multiple of 3 the block pauses, and short steps end before some ranks hold the most.
    """
    pp, count = request.placement.num_ranks, request.num_microbatches
    found, most = list[list[int]](), 2 * ((pp + 4) // 3)
    for rank in range(pp):
        back = 1 + (rank + (1 if pp % 3 == 1 else 2)) // 3
        unused = (1 if rank == 0 else 2) if pp % 3 == 2 and rank % 3 == 0 else 0
        there = most - back - unused
        is_over = (pp % 3 == 0 and rank == 1 and count <= there) or (pp % 3 == 2 and rank % 3 == 1 and count < there)
        found.append([min(there, count), min(back, count) - (is_over and count >= back)])
    return found


def _in_pairs(request: Request) -> list[list[int]]:
    """The closed form for DualPipe-V: both stages together hold 2 P + 1 inputs."""
    pp, count = request.placement.num_ranks, request.num_microbatches
    return [[min(2 * pp - rank, count), min(rank + 1, count)] for rank in range(pp)]


def _of_one_microbatch(request: Request) -> str | None:
    return "zb-v" if request.num_microbatches == 1 else None


_family = partial(family, is_looped=True, loops=2, placement="v", splits_backward=True)


@_family("zb-v", stage_inputs=_on_a_v)
def zb_v(request: Request) -> Rows:
    """A V in 1F1B's memory; ranks are never idle after their first action (arXiv 2401.10241, section 6)."""
    # One unit there and five back keep (1 + 5) / 6 of 1F1B's inputs, all of its memory (arXiv 2405.15362, section 3.2).
    return _repeated(request, _Hops(1, 5), request.placement.num_ranks, pulls=True)


@_family("v-half", stage_inputs=_at_half, same_as=_of_one_microbatch)
def v_half(request: Request) -> Rows:
    """A V in half of 1F1B's memory, with half of its bubble (arXiv 2405.15362, section 3.3)."""
    # (1 + 2) / 6: half.
    return _repeated(request, _Hops(1, 2), (request.placement.num_ranks + 2) // 2)


@_family("v-min", stage_inputs=_at_least, same_as=_of_one_microbatch)
def v_min(request: Request) -> Rows:
    """A V in a third of 1F1B's memory, with two thirds of its bubble (arXiv 2405.15362, section 3.3)."""
    # (1 + 1) / 6: a third.
    return _repeated(request, _Hops(1, 1), (request.placement.num_ranks + 4) // 3)


def _repeated(request: Request, hops: _Hops, most_microbatches: int, *, pulls: bool = False) -> Rows:
    """The block of each micro-batch, six units after that of the one before.

    A rank holds as much as both of its stages keep of ``most_microbatches``. With ``pulls`` ranks fill the way in with
    forwards of later blocks.
    """
    pp, count = request.placement.num_ranks, request.num_microbatches
    orders = []
    for rank, times in enumerate(_block(pp, hops)):
        there, back = request.local_stages(rank)
        at = np.add.outer(times, _PERIOD * np.arange(count))
        actions = Row.join(
            [
                Row.grid(Kind.FORWARD, [there, back], range(count)),
                Row.grid(Kind.BACKWARD_INPUT, [back, there], range(count)),
            ]
        )
        # Only the order of the times remains: a row has no times, and pauses at both ends close up by themselves.
        orders.append(actions.take(np.argsort(at.reshape(-1))))
    return rows_with_weight_gradients(request.placement, orders, [2 * min(most_microbatches, count)] * pp, pulls=pulls)


def _block(pp: int, hops: _Hops) -> list[tuple[int, int, int, int]]:
    """For each rank the times of its two forwards and its two input gradients, distinct modulo the period.

    The pauses at the turns of the V are the shortest for which such a block exists.
    """
    there, back = (hop * (pp - 1) for hop in hops)
    # Shortest sum first; six units are enough, since a pause of a whole period shifts nothing within it.
    for pauses in sorted(product(range(1, _PERIOD + 1), repeat=3), key=lambda pauses: (sum(pauses), pauses)):
        last_forward = there + pauses[0] + back
        last_input = last_forward + pauses[1] + there
        block = [
            (
                hops.there * rank,
                last_forward - hops.back * rank,
                last_forward + pauses[1] + hops.there * rank,
                last_input + pauses[2] + back - hops.back * rank,
            )
            for rank in range(pp)
        ]
        # Equal remainders would put two actions of a rank into one unit, of this block and of a later one.
        if all(len({at % _PERIOD for at in times}) == len(times) for times in block):
            return block
    raise AssertionError(f"no block of {hops} on {pp} ranks")


@_family("dualpipe-v", stage_inputs=_in_pairs)
def dualpipe_v(request: Request) -> Rows:
    """DualPipe cut in half, a V that pairs a forward with a whole backward (arXiv 2412.19437, 3.2.1; DualPipeV).

    DualPipe's pairs overlap, which hides the messages of one behind the compute of the other; a row is a sequence, so
    here they follow each other. Backwards are split only on the way in and out.
    """
    pp, count = request.placement.num_ranks, request.num_microbatches
    # The rule needs 2 P micro-batches for warm-up and drain; with fewer, the surplus ones are removed afterwards.
    orders = [_paired(request.local_stages(rank), pp, rank, max(count, 2 * pp)) for rank in range(pp)]
    # Leaving whole micro-batches out keeps the order of the others, so it cannot create a deadlock.
    rows = [row.take(row.microbatch < count) for row in orders]
    return Rows(rows, [min(2 * pp + 1, 2 * count)] * pp)


def _paired(stages: Sequence[int], pp: int, rank: int, count: int) -> Row:
    there, back = stages
    behind = pp - rank - 1
    forwards = (Kind.FORWARD, there), (Kind.FORWARD, back)
    inputs = (Kind.BACKWARD_INPUT, there), (Kind.BACKWARD_INPUT, back)
    weights = (Kind.BACKWARD_WEIGHT, there), (Kind.BACKWARD_WEIGHT, back)
    whole = (Kind.BACKWARD, there), (Kind.BACKWARD, back)
    # The eight steps of DualPipeV (DeepSeek's dualpipev.py, PyTorch's ScheduleDualPipeV), in their order.
    steps = [forwards[0]] * (2 * behind) + [forwards[0], forwards[1]] * (rank + 1)
    steps += [inputs[1], weights[1], forwards[1]] * behind
    steps += [forwards[0], whole[1], forwards[1], whole[0]] * (count - 2 * pp + rank + 1)
    steps += [whole[1], forwards[1], whole[0]] * behind
    out = [1, 0] * (rank + 1)
    steps += [whole[way] for way in out[: rank + 1]] + [inputs[way] for way in out[rank + 1 :]]
    waiting = [weights[way] for way in out[rank + 1 :]] + [weights[0]] * behind
    for weight in waiting[:behind]:
        steps += [weight, inputs[0]]
    return _numbered(steps + waiting[behind:])


def _numbered(steps: Sequence[tuple[Kind, int]]) -> Row:
    """Actions by kind and stage, for which each stage takes its micro-batches in ascending order.

    A weight gradient belongs to the oldest input gradient of its stage that waits for it.
    """
    number = {step: n for n, step in enumerate(dict.fromkeys(steps))}
    which = np.array([number[step] for step in steps])
    kind = np.array([kind.code for kind, _ in number], np.int32)[which]
    stage = np.array([stage for _, stage in number], np.int32)[which]
    microbatch = np.zeros_like(kind)
    for own in {stage for _, stage in number}:
        for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT)):
            places = np.flatnonzero((stage == own) & np.isin(kind, [one.code for one in kinds]))
            microbatch[places] = np.arange(len(places))
        inputs, weights = (
            np.flatnonzero((stage == own) & (kind == one.code)) for one in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        # The n-th of one is for the micro-batch of the n-th of the other: oldest first.
        microbatch[weights] = microbatch[inputs]
    return Row(kind, stage, microbatch, np.zeros_like(kind))
