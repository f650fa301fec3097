"""Schedules that swap activations: what they compute, how much they move, what ranks hold."""

from pipeloom.analysis.memory import memory_over_time
from pipeloom.schedule.kinds import COMPUTE_KINDS
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.simulation import simulate


def compute_rows(schedule):
    """For each rank its compute actions."""
    return [[action for action in row if action.kind in COMPUTE_KINDS] for row in schedule.rows]


def num_moved(schedule, *kinds):
    """For each rank how many actions of some kinds it has."""
    return [sum(action.kind in kinds for action in row) for row in schedule.rows]


def peaks(schedule, costs, sizes=None, pending=()):
    """For each rank the most bytes of stage inputs, its own and accepted ones, in simulation; 1 each by default.

    Between the halves of a backward as much, or what is ``pending`` of each stage's.
    """
    held = HeldBytes(always_bytes=(0.0,) * schedule.num_ranks, kept=KeptBytes(sizes or (), pending))
    return [curve.peak_bytes for curve in memory_over_time(schedule, simulate(schedule, costs), held)]
