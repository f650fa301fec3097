"""Schedule + costs -> trace: the schedule, run on a clock of costs."""

from pipeloom.cost.costs import Costs
from pipeloom.schedule import Schedule
from pipeloom.schedule.depend import lane_of
from pipeloom.trace import Span, Trace


def simulate(schedule: Schedule, costs: Costs) -> Trace:
    """Run a schedule on a clock.

    An action starts when everything it waits for has ended: the actions whose results it uses, the action
    before it on its lane, and, for communication, the compute action before it in its row
    (``pipeloom.schedule.depend``). So every start is the latest of some ends, and one walk through the
    actions in dependency order finds them all. The same input gives the same trace.

    Args:
        schedule: at any level. Without communication, tensors arrive at once.
        costs: seconds of each action.

    Returns:
        A trace that begins at 0, spans in row order.
    """
    graph = schedule.graph
    starts = [0.0] * len(graph.actions)
    ends = [0.0] * len(graph.actions)
    for node in graph.order:
        starts[node] = max((ends[needed] for needed in graph.waits[node]), default=0.0)
        ends[node] = starts[node] + costs.seconds(graph.actions[node])
    spans = [
        Span(action, rank, lane_of(action, schedule.placement), start, end)
        for action, rank, start, end in zip(graph.actions, graph.ranks, starts, ends, strict=True)
    ]
    return Trace(tuple(spans), schedule.num_ranks)
