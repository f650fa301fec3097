"""Zero-bubble schedules: backwards are split, and weight gradients fill what would be bubbles."""

from pipeloom.families.family import HeldInputs, Request, Rows, StageInputs, family
from pipeloom.families.one_forward_one_backward import alternate, in_turn, inputs_in_turn
from pipeloom.families.weight_gradients import rows_with_weight_gradients, without_weight_gradients
from pipeloom.schedule import PLACEMENTS, Kind, Row


def _on_one_stage(ahead: int) -> StageInputs:
    """The closed form: every rank holds the same."""

    def inputs(request: Request) -> list[list[int]]:
        pp = request.placement.num_ranks
        return [[min(ahead * (pp - 1) + 1, request.num_microbatches)]] * pp

    return inputs


@family("zb-h1", is_looped=False, instead="interleaved-zb", splits_backward=True, stage_inputs=_on_one_stage(1))
def zb_h1(request: Request) -> Rows:
    """1F1B with split backwards, in 1F1B's memory: P inputs on every rank (arXiv 2401.10241, section 2.2.1)."""
    return _one_stage(request, ahead=1)


def _of_few_microbatches(request: Request) -> str | None:
    """With two micro-batches or fewer the longer warm-up never ends, so the rows are the same."""
    return "zb-h1" if request.num_microbatches <= 2 else None


@family(
    "zb-h2",
    is_looped=False,
    instead="interleaved-zb",
    splits_backward=True,
    stage_inputs=_on_one_stage(2),
    same_as=_of_few_microbatches,
)
def zb_h2(request: Request) -> Rows:
    """1F1B with split backwards and twice the warm-up: no bubble with 2 P - 1 inputs (arXiv 2401.10241, 2.2.2)."""
    return _one_stage(request, ahead=2)


def _one_stage(request: Request, ahead: int) -> Rows:
    """Rank ``r`` begins with ``ahead (P - r - 1)`` forwards, and holds ``ahead (P - 1) + 1`` inputs at most."""
    pp, microbatches = request.placement.num_ranks, range(request.num_microbatches)
    orders = [
        in_turn(
            Row.grid(Kind.FORWARD, [rank], microbatches),
            # Weight gradients are not in the order: they are inserted where a rank would be idle.
            Row.grid(Kind.BACKWARD_INPUT, [rank], microbatches),
            min(ahead * (pp - rank - 1), request.num_microbatches),
        )
        for rank in range(pp)
    ]
    most = min(ahead * (pp - 1) + 1, request.num_microbatches)
    return rows_with_weight_gradients(request.placement, orders, [most] * pp)


def _as_the_first(request: Request) -> HeldInputs | None:
    """The closed form: every rank holds as much as the first."""
    held = inputs_in_turn(hops_back=1)(request)
    return held and [held[0]] * len(held)


def _without_loops(request: Request) -> str | None:
    """ZB-H1 is the case of one loop; on a V all families with split backwards are equal for one micro-batch."""
    if request.loops == 1:
        return "zb-h1"
    is_one_on_a_v = request.num_microbatches == 1 and request.placement == PLACEMENTS["v"](
        request.placement.num_ranks, 2
    )
    return "zb-v" if is_one_on_a_v else None


@family("interleaved-zb", is_looped=True, splits_backward=True, stage_inputs=_as_the_first, same_as=_without_loops)
def interleaved_zb(request: Request) -> Rows:
    """Depth-first with split backwards and half its warm-up, ZB-H1 with loops (PyTorch: InterleavedZeroBubble)."""
    whole = alternate(request, hops_back=1)
    # One hop of warm-up for each rank and not two, as in PyTorch's ScheduleInterleavedZeroBubble (multiply_factor = 1).
    orders = [without_weight_gradients(Row.of(row)) for row in whole.rows]
    return rows_with_weight_gradients(request.placement, orders, [max(whole.max_stage_inputs)] * len(orders))
