"""Whether a schedule keeps every rule of its level: yes or no, at the speed of compiled loops.

``pipeloom.schedule.verify`` has the rules as they are meant to be read. What is refused here is checked again there,
for a message; tests hold both to the same answers.
"""

from typing import TYPE_CHECKING

import numpy as np

from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.kernels import accept as kernels
from pipeloom.schedule.kinds import KINDS, NUM_COMPUTE, TIED_SEND_KINDS, Kind
from pipeloom.schedule.row import Ints
from pipeloom.schedule.verify_tied import TIED_RULES

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule


def accepts(schedule: "Schedule") -> bool:
    """Whether the schedule keeps every rule of its level."""
    return _has_sizes(schedule) and _has_actions(schedule) and _keeps_order(schedule)


def _has_sizes(schedule: "Schedule") -> bool:
    limits, sizes = schedule.max_stage_inputs, schedule.stage_sizes
    return (
        len(schedule.rows) == schedule.num_ranks
        and (limits is None or len(limits) == schedule.num_ranks)
        and (sizes is None or len(sizes) == schedule.num_stages)
        and min(schedule.num_microbatches, schedule.num_slices) >= 1
        and 0 <= schedule.first_backward_stage <= schedule.num_stages
        and _has_pairs(schedule.partners, schedule.num_ranks)
    )


def _has_pairs(partners: tuple[int, ...] | None, num_ranks: int) -> bool:
    if partners is None:
        return True
    return (
        len(partners) == num_ranks
        and all(0 <= partner < num_ranks for partner in partners)
        and all(partners[partner] == rank for rank, partner in enumerate(partners))
    )


def _has_actions(schedule: "Schedule") -> bool:
    facts, size = schedule.facts, schedule.num_actions
    num_kinds = len(KINDS) if facts.has_transfers else NUM_COMPUTE
    columns = facts.columns
    if not kernel(kernels.belongs, size)(*columns, facts.owner, facts.shape, num_kinds):
        return False
    if not kernel(kernels.is_unique, size)(*columns[:4], facts.shape):
        return False
    return kernel(kernels.computes, size)(facts.node_of, facts.shape, schedule.first_backward_stage)


def _keeps_order(schedule: "Schedule") -> bool:
    facts, size, first_stage = schedule.facts, schedule.num_actions, schedule.first_backward_stage
    if facts.has_transfers:
        numbers = kernel(kernels.number_on_lanes, size)(facts.lane, len(facts.lanes))
        if not kernel(kernels.sends, size)(facts.node_of, numbers, facts.shape, facts.crosses, first_stage):
            return False
        if facts.tied_nodes and not _keeps_ties(schedule, numbers):
            return False
        if not kernel(kernels.swaps, size)(facts.node_of, facts.shape, first_stage) or not _evicts_to_another(schedule):
            return False
        if not _keeps_sharding(schedule):
            return False
        if not _keeps_stage_swaps(schedule):
            return False
    is_within = all(
        peak <= limit for peak, limit in zip(schedule.peak_stage_inputs, schedule.max_stage_inputs or (), strict=False)
    )
    return is_within and not schedule.graph.absent and schedule.graph.is_acyclic


def _evicts_to_another(schedule: "Schedule") -> bool:
    alone = [rank for rank, partner in enumerate(schedule.partners or ()) if rank == partner]
    return not any(schedule.rows[rank].is_kind(Kind.EVICT).any() for rank in alone)


def _keeps_ties(schedule: "Schedule", number_on_lane: Ints) -> bool:
    """The rules of a tied matrix, which are few questions about few actions; and its place on the edges' lanes."""
    if any(True for rule in TIED_RULES for _ in rule(schedule)):
        return False
    nodes = schedule.facts.tied_nodes
    return all(
        number_on_lane[nodes[send][0]] == number_on_lane[nodes[send.partner][0]]
        for send in TIED_SEND_KINDS
        if send in nodes
    )


def _keeps_sharding(schedule: "Schedule") -> bool:
    facts, size = schedule.facts, schedule.num_actions
    kind, stage, _, _, first = facts.columns
    unlimited = schedule.num_stages
    most_gathered = unlimited if schedule.max_gathered is None else schedule.max_gathered
    most_unreduced = unlimited if schedule.gradient_buffers is None else schedule.gradient_buffers
    return kernel(kernels.gathers, size)(kind, stage, first, schedule.num_stages, most_gathered) and kernel(
        kernels.reduces, size
    )(kind, stage, first, schedule.num_stages, most_unreduced)


def _keeps_stage_swaps(schedule: "Schedule") -> bool:
    facts, size = schedule.facts, schedule.num_actions
    kind, stage, _, _, first = facts.columns
    num_stages = schedule.num_stages
    sizes = np.ones(num_stages, np.int64) if schedule.stage_sizes is None else np.array(schedule.stage_sizes, np.int64)
    most = sum(sizes.tolist()) if schedule.max_resident is None else schedule.max_resident
    return kernel(kernels.swaps_stages, size)(kind, stage, first, sizes, most) and kernel(kernels.updates, size)(
        kind, stage, num_stages, schedule.first_backward_stage
    )
