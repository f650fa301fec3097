"""Zero-bubble schedules: backwards in two halves, of which the second fills what would be bubbles."""

from collections.abc import Sequence

import numpy as np

from pipeloom.generate.family import Request, Rows, family
from pipeloom.generate.one_forward_one_backward import alternate
from pipeloom.generate.order import in_turn, runs, up_to
from pipeloom.generate.weave import weave
from pipeloom.schedule import Kind, Row
from pipeloom.schedule.row import CODE


@family("zb-h1", is_looped=False, instead="interleaved-zb", splits_backward=True)
def zb_h1(request: Request) -> Rows:
    """1F1B with split backwards, in 1F1B's memory: P inputs on every rank (arXiv 2401.10241, section 2.2.1)."""
    return _one_stage(request, ahead=1)


@family("zb-h2", is_looped=False, instead="interleaved-zb", splits_backward=True)
def zb_h2(request: Request) -> Rows:
    """1F1B with split backwards and twice the warm-up: no bubble with 2 P - 1 inputs (arXiv 2401.10241, 2.2.2)."""
    return _one_stage(request, ahead=2)


def _one_stage(request: Request, ahead: int) -> Rows:
    """Rank ``r`` begins with ``ahead (P - r - 1)`` forwards, and holds ``ahead (P - 1) + 1`` inputs at most."""
    pp, microbatches = request.placement.num_ranks, range(request.num_microbatches)
    orders = [
        in_turn(
            Row.grid(Kind.FORWARD, [rank], microbatches),
            Row.grid(Kind.BACKWARD_INPUT, [rank], microbatches),
            min(ahead * (pp - rank - 1), request.num_microbatches),
        )
        for rank in range(pp)
    ]
    return _woven(request, orders, [min(ahead * (pp - 1) + 1, request.num_microbatches)] * pp)


@family("interleaved-zb", is_looped=True, splits_backward=True)
def interleaved_zb(request: Request) -> Rows:
    """Depth-first with split backwards and half its warm-up, ZB-H1 with loops (PyTorch: InterleavedZeroBubble)."""
    whole = alternate(request, hops_back=1)
    orders = [_of_inputs(Row.of(row)) for row in whole.rows]
    return _woven(request, orders, [max(whole.max_stage_inputs)] * len(orders))


def _of_inputs(row: Row) -> Row:
    """The row with gradients of inputs in place of whole backwards."""
    kind = np.where(row.is_kind(Kind.BACKWARD), np.int32(CODE[Kind.BACKWARD_INPUT]), row.kind)
    return Row(kind, *row.arrays[1:])


@family("zb-v", is_looped=True, loops=2, placement="v", splits_backward=True)
def zb_v(request: Request) -> Rows:
    """Two half stages on each rank, there and back: no bubble in 1F1B's memory (arXiv 2401.10241, section 6)."""
    pp = request.placement.num_ranks
    count = max(request.num_microbatches, 2 * pp - 1)
    orders = []
    for rank in range(pp):
        there, back = request.local_stages(rank)
        rest = count - 2 * pp + rank + 1
        forwards = runs(
            Kind.FORWARD,
            [there] * (2 * (pp - rank) - 1)
            + [back, there] * rank
            + [back] * (pp - rank)
            + [there, back] * rest
            + [back] * (pp - rank - 1),
        )
        inputs = runs(
            Kind.BACKWARD_INPUT, [back] * (pp - rank) + [there, back] * (count - pp + rank) + [there] * (pp - rank)
        )
        orders.append(in_turn(forwards, inputs, 2 * pp - 1))
    most = 2 * min(pp, request.num_microbatches)
    return _woven(request, up_to(orders, request.num_microbatches), [most] * pp)


def _woven(request: Request, orders: Sequence[Row], most_inputs: Sequence[int]) -> Rows:
    return Rows(weave(orders, request.placement, most_inputs).rows, most_inputs)
