"""What a contender's order takes on an ideal runtime over the same network: pipeloom's simulation."""

from dataclasses import dataclass, replace
from typing import ClassVar

from pipeloom.analysis.summary import summarize
from pipeloom.orders.bound import least_step_s
from pipeloom.passes import add_data_parallel, lower
from pipeloom.passes.lower_sharding import exchanges
from pipeloom.schedule import Action, Kind, Placement, Schedule
from pipeloom.schedule.kinds import SEND_KINDS
from pipeloom.schedule.lanes import other_end
from pipeloom.schedule.stage_swaps import Content
from pipeloom.simulation import Sharing, simulate
from pipeloom.workload.boundary import Boundary, boundary_bytes
from side_by_side.case import Case, Contender
from side_by_side.orders import compute_order

PYTORCH_RESIDENCY = 3
"""Stages that PyTorch's lowering keeps gathered, those being gathered included."""


@dataclass(frozen=True)
class NetworkCosts:
    """Seconds of actions over a network that starts at once whatever is ready.

    A send keeps its edge for as long as its bytes take; its receive ends a latency later, so that messages of an edge
    follow each other closely. A gather and a reduction over ``n`` ranks move (n - 1) / n of a stage's weights through
    each rank's uplink and downlink.

    Attributes:
        case: of which the costs are.
        loops: stages on each rank, which share the case's work.
        has_whole_first: whether the first stage's backward is all in its second half, as in PyTorch's runtime.
        boundary: the code of messages; ``None``: they travel as they are.
    """

    ignores_microbatch: ClassVar[bool] = True

    case: Case
    loops: int
    has_whole_first: bool = True
    boundary: Boundary | None = None

    def seconds(self, action: Action) -> float:
        """Seconds of an action alone."""
        case, scale = self.case, self.case.loops / self.loops
        backward_s = case.backward_s * scale
        match action.kind:
            case Kind.FORWARD:
                return case.forward_s * scale
            case Kind.BACKWARD:
                return backward_s
            case Kind.BACKWARD_INPUT:
                return 0.0 if self.has_whole_first and action.stage == 0 else backward_s / 2
            case Kind.BACKWARD_WEIGHT:
                return backward_s if self.has_whole_first and action.stage == 0 else backward_s / 2
        if case.link is None:
            return 0.0
        match action.kind:
            case Kind.SEND_F | Kind.SEND_B:
                return boundary_bytes(case.message_bytes / 4, 4, self.boundary) / case.link.bytes_per_s
            case Kind.RECV_F | Kind.RECV_B:
                return case.link.latency_s
            case Kind.UNSHARD | Kind.REDUCE_GRAD:
                through = case.weight_bytes * scale * (case.dp - 1) / case.dp
                return case.link.latency_s + through / case.link.bytes_per_s
        return 0.0

    def move_s(self, stage: int, content: Content) -> float:
        """No stage moves between device and host."""
        raise NotImplementedError(stage, content)


def lowered(case: Case, contender: Contender, order: Schedule, receive_buffers: int) -> Schedule:
    """The order with its messages and, with data parallelism, its gathers and reductions."""
    schedule = lower(order, receive_buffers)
    if case.dp == 1:
        return schedule
    residency = contender.loops if contender.runtime == "pipeloom" else min(PYTORCH_RESIDENCY, contender.loops)
    return add_data_parallel(
        schedule, *exchanges("full", residency=residency, prefetch=residency, gradient_buffers=None)
    )


def theory_s(case: Case, contender: Contender, order: Schedule) -> float:
    """Seconds of the step if every message, gather and reduction starts as soon as what it moves is there.

    What a rank sends shares its uplink, what it receives its downlink.
    """
    case = case if contender.link is None else replace(case, link=contender.link)
    schedule = lowered(case, contender, order, case.num_microbatches)
    costs, sharing = priced(case, contender, order.placement)
    return summarize(simulate(schedule, costs, sharing)).makespan_s


def bound_s(case: Case, contender: Contender) -> float:
    """Seconds that no order with as many stages takes less, on the network for which the order was chosen."""
    case = case if contender.link is None else replace(case, link=contender.link)
    schedule = lowered(case, contender, compute_order(case, contender), case.num_microbatches)
    return least_step_s(schedule, *priced(case, contender, schedule.placement))


def priced(case: Case, contender: Contender, placement: Placement) -> tuple[NetworkCosts, Sharing | None]:
    """Seconds of actions, and the links that they share: uplinks, and behind them downlinks."""
    costs = NetworkCosts(case, contender.loops, contender.runtime == "PyTorch", contender.boundary)
    if case.link is None:
        return costs, None
    owner = placement.rank_by_stage
    exchanges = (Kind.UNSHARD, Kind.REDUCE_GRAD)

    def uplink_of(action: Action, rank: int) -> tuple[str, int] | None:
        return ("up", rank) if action.kind in SEND_KINDS or action.kind in exchanges else None

    def downlink_of(action: Action, rank: int) -> tuple[str, int] | None:
        # Replicas exchange with each other: each receives as much as it sends.
        if action.kind in exchanges:
            return "down", rank
        return ("down", owner[other_end(action, len(owner)).stage]) if action.kind in SEND_KINDS else None

    capacity = {(way, rank): 1.0 for way in ("up", "down") for rank in range(case.pp)}
    return costs, Sharing(uplink_of, capacity, onward_of=downlink_of)
