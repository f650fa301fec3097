"""Families on a V: each rank has a stage on the way there and one on the way back, so the first rank has both ends.

ZB-V, V-Half and V-Min repeat a building block (arXiv 2405.15362, section 3): when the ranks run the forwards and the
gradients of inputs of one micro-batch, on a clock on which each takes one unit. Every micro-batch follows the one
before by six units, in which a rank does everything that it has to do for one. How long the block keeps inputs decides
the memory. What stands still at the beginning and the end is squeezed out, since a schedule has no times, and the
gradients of weights are woven in.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from pipeloom.families.family import Request, Rows, family
from pipeloom.families.weave import woven
from pipeloom.schedule import Kind, Row

# Forward, gradient of the input and gradient of the weights, one unit each, on two stages.
_PERIOD = 6


class _Hops(NamedTuple):
    """Units from a rank's action to that of the next rank, on the way there and on the way back.

    Inputs live for about ``2 P (there + back)`` units on a rank's two stages together, so that ``(there + back) / 6``
    of what 1F1B holds is held (arXiv 2405.15362, section 3.2).
    """

    there: int
    back: int


def _on_a_v(request: Request) -> list[list[int]]:
    """The closed form for ZB-V: the way there as far as it goes, on both stages together what 1F1B holds."""
    pp, count = request.placement.num_ranks, request.num_microbatches
    there = [min(2 * pp - 1 - rank, count) for rank in range(pp)]
    return [[held, 2 * min(pp, count) - held] for held in there]


def _at_half(request: Request) -> list[list[int]]:
    """The closed form for V-Half: P + 2 inputs together, or P + 1; every other rank has one more on the way back."""
    pp, count = request.placement.num_ranks, request.num_microbatches
    most, back = 2 * ((pp + 2) // 2), [1 + (rank + 1) // 2 for rank in range(pp)]
    return [[min(most - held, count), min(held, count)] for held in back]


def _at_least(request: Request) -> list[list[int]]:
    """The closed form for V-Min: on every third rank one input more on the way back; pauses leave room unused.

    Where the block pauses (P is not 1 more than a multiple of 3), short steps are over before some ranks hold the most.
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
    """The closed form for DualPipe-V: 2 P + 1 together, one less on the way there from rank to rank."""
    pp, count = request.placement.num_ranks, request.num_microbatches
    return [[min(2 * pp - rank, count), min(rank + 1, count)] for rank in range(pp)]


def _of_one_microbatch(request: Request) -> str | None:
    return "zb-v" if request.num_microbatches == 1 else None


_family = partial(family, is_looped=True, loops=2, placement="v", splits_backward=True)


@_family("zb-v", stage_inputs=_on_a_v)
def zb_v(request: Request) -> Rows:
    """A V in 1F1B's memory, in which ranks never stand still once they have begun (arXiv 2401.10241, section 6)."""
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
    return woven(request.placement, orders, [2 * min(most_microbatches, count)] * pp, pulls=pulls)


def _block(pp: int, hops: _Hops) -> list[tuple[int, int, int, int]]:
    """For each rank when it runs its two forwards and its two gradients of inputs, no two at once in any period.

    The pauses at the turns of the V are the shortest for which there is such a block.
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
    # The rule needs 2 P micro-batches for its way in and out; with fewer, those too many are left out afterwards.
    orders = [_paired(request.local_stages(rank), pp, rank, max(count, 2 * pp)) for rank in range(pp)]
    # Leaving whole micro-batches out keeps every order between the others, so no new deadlock can come of it.
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

    A gradient of weights belongs to the oldest gradient of the input of its stage that waits for it.
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
