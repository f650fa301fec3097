"""The numbers by which schedules are compared: bubble, memory, communication."""

from dataclasses import dataclass

from pipeloom.analysis.memory import MemoryCurve, memory_over_time
from pipeloom.cost.costs import ActionCosts
from pipeloom.passes import add_unshard, lower
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import LOAD_OF, SEND_KINDS
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.simulation import simulate
from pipeloom.trace import Trace
from pipeloom.trace.spans import Spans

MEMORY_UNIT = "units of one micro-batch's activations on all stages of a rank"
"""The unit of ``memory_in_microbatches``, in words."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A schedule in numbers.

    Attributes:
        bubble_overhead: idle / ideal time over all ranks, from the first action to the last; recomputation counts as
            idle.
        own_overhead: idle / ideal time of the rank where it is largest, from its first compute action to its last: the
            bubble if steps of different ranks overlap.
        memory: for each rank the most that it holds for backwards, in units of one micro-batch's activations on all
            stages of a rank: for 1F1B, ``P`` on the first rank and 1 on the last.
        gathers: all-gathers of the rank with the most, with fully sharded weights and one stage gathered at once.
        messages: activations and gradients sent between ranks in a step.
        sent: their size, in units of a micro-batch's activations at a stage boundary.
        moves: transfers of kept activations to a partner or the host, and back.
        moved: their size, in the unit of ``memory``.
    """

    bubble_overhead: float
    own_overhead: float
    memory: tuple[float, ...]
    gathers: int
    messages: int
    sent: float
    moves: int
    moved: float


def compare(schedule: Schedule, costs: ActionCosts) -> Comparison:
    """The numbers of a schedule.

    Args:
        schedule: before gathers and reductions are added.
        costs: seconds of its actions.
    """
    trace = simulate(schedule, costs)
    ranks = [trace.compute(rank) for rank in range(trace.num_ranks)]
    loops = schedule.num_stages / schedule.num_ranks
    lowered = lower(schedule)
    # With these limits only the order of the stages determines how often weights are gathered.
    gathered = add_unshard(lowered, residency=1, prefetch=0)
    messages = _count(lowered, *SEND_KINDS)
    moves = _count(lowered, *LOAD_OF, *LOAD_OF.values())
    return Comparison(
        bubble_overhead=trace.num_ranks * (trace.end_s - trace.start_s) / sum(map(_needed_s, ranks)) - 1,
        own_overhead=max(
            float(compute.end_s.max() - compute.start_s.min()) / _needed_s(compute) - 1 for compute in ranks
        ),
        memory=memory_in_microbatches(schedule, trace),
        gathers=max(int(row.is_kind(Kind.UNSHARD).sum()) for row in gathered.rows),
        messages=messages,
        sent=messages / schedule.num_slices,
        moves=moves,
        # A move is of one stage, which keeps 1 / loops of what its rank keeps of a micro-batch.
        moved=moves / loops / schedule.num_slices,
    )


def memory_in_microbatches(schedule: Schedule, trace: Trace) -> tuple[float, ...]:
    """For each rank the most that it holds for backwards, in units of one micro-batch's activations on all its stages.

    Args:
        schedule: at any level.
        trace: of the schedule.
    """
    return tuple(curve.peak_bytes for curve in microbatches_over_time(schedule, trace))


def microbatches_over_time(schedule: Schedule, trace: Trace) -> tuple[MemoryCurve, ...]:
    """For each rank what it holds for backwards over time, in the unit of ``memory_in_microbatches``."""
    loops = schedule.num_stages / schedule.num_ranks
    one_each = HeldBytes(always_bytes=(0.0,) * schedule.num_ranks, kept=KeptBytes([1 / loops] * schedule.num_stages))
    return memory_over_time(schedule, trace, one_each)


def _needed_s(compute: Spans) -> float:
    """Seconds of a rank's compute without recomputation."""
    return float(compute.duration_s[~compute.row.is_kind(Kind.RECOMPUTE)].sum())


def _count(schedule: Schedule, *kinds: Kind) -> int:
    return sum(int(row.is_kind(*kinds).sum()) for row in schedule.rows)
