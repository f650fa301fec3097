"""Rules of every level: what a row consists of, and how forwards and backwards follow each other."""

import numpy as np

from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Facts
from pipeloom.schedule.kinds import COMPUTE_KINDS, KINDS, NUM_KEYED, STAGE_KINDS, Kind
from pipeloom.schedule.row import NO_MICROBATCH
from pipeloom.schedule.rules.fault import Fault, Nodes, TextOf, fault_at, first_of
from pipeloom.terminal.words import count


def row_for_each_rank(facts: Facts) -> Fault | None:
    """There is one row for each pipeline rank, and at least one micro-batch."""
    ranks, stages = facts.placement.num_ranks, facts.placement.num_stages
    limits, sizes = facts.promises.max_stage_inputs, facts.promises.stage_sizes
    found = list[str]()
    if len(facts.rows) != ranks:
        found.append(f"expected {count(ranks, 'row')}, one for each pipeline rank, found {len(facts.rows)}")
    if limits is not None and len(limits) != ranks:
        found.append(f"expected {count(ranks, 'limit')} of stage inputs, one for each rank, found {len(limits)}")
    if sizes is not None and len(sizes) != stages:
        found.append(f"expected {count(stages, 'size')}, one for each stage, found {len(sizes)}")
    for name, number in (("micro-batch", facts.shape[1]), ("token slice", facts.shape[2])):
        if number < 1:
            found.append(f"expected at least one {name}, found {number}")
    if not 0 <= facts.first_backward_stage <= stages:
        found.append(f"first_backward_stage {facts.first_backward_stage} is not in 0..{stages}")
    return first_of(found)


def partners_in_pairs(facts: Facts) -> Fault | None:
    """Where partners are named, every rank has one that has it as its own, or itself, which means none."""
    partners, num_ranks = facts.promises.partners, facts.placement.num_ranks
    if partners is None:
        return None
    if len(partners) != num_ranks:
        return Fault(f"expected {count(num_ranks, 'partner')}, one for each rank, found {len(partners)}")
    wrong = list[Fault]()
    for rank, partner in enumerate(partners):
        if not 0 <= partner < num_ranks:
            wrong.append(Fault(f"the partner {partner} of rank {rank} is not in 0..{num_ranks - 1}", rank))
        elif partners[partner] != rank:
            wrong.append(Fault(f"rank {rank} has the partner {partner}, which has rank {partners[partner]}", rank))
    return wrong[0]._replace(count=len(wrong)) if wrong else None


def kinds_of_level(facts: Facts) -> Fault | None:
    """A compute-level schedule has compute actions only."""
    if facts.has_transfers:
        return None
    wrong = np.flatnonzero(~facts.row.is_kind(*COMPUTE_KINDS))
    return fault_at(facts, (wrong, lambda action, _: f"{action} does not belong in a compute-only schedule"))


def in_range(facts: Facts) -> Fault | None:
    """Stages, micro-batches and slices exist."""
    stages, microbatches, slices = facts.shape
    stage, microbatch, part = (column.view(np.uint32) for column in facts.columns[1:4])  # below 0 becomes far above
    whole = facts.where(*STAGE_KINDS)
    is_far = microbatch >= microbatches
    is_far[whole] = (facts.columns.microbatch[whole] != NO_MICROBATCH) | (part[whole] > 0)
    wrong = np.flatnonzero(is_far | (stage >= stages) | (part >= slices))

    def text_of(action: Action, _: int) -> str:
        if not 0 <= action.stage < stages:
            return f"{action} names stage {action.stage}, but stages are 0..{stages - 1}"
        if (action.microbatch is None) != (action.kind in STAGE_KINDS):
            return f"{action} must {'not ' if action.kind in STAGE_KINDS else ''}name a micro-batch"
        if action.microbatch is not None and not 0 <= action.microbatch < microbatches:
            return f"{action} names micro-batch {action.microbatch}, but they are 0..{microbatches - 1}"
        return f"{action} names token slice {action.slice}, but they are 0..{slices - 1}"

    return fault_at(facts, (wrong, text_of))


def on_its_rank(facts: Facts) -> Fault | None:
    """A rank acts on the stages that it holds."""
    wrong = np.flatnonzero(facts.owner[facts.columns.stage] != facts.ranks)

    def text_of(action: Action, _: int) -> str:
        return f"{action} belongs to rank {facts.owner[action.stage]}, which holds stage {action.stage}"

    return fault_at(facts, (wrong, text_of))


def unique(facts: Facts) -> Fault | None:
    """Nothing is done twice. What concerns a whole stage may repeat; rules of its own define when."""
    keyed = facts.where(*frozenset(KINDS) - STAGE_KINDS)
    if np.count_nonzero(facts.node_of >= 0) == len(keyed):  # every action has a key of its own
        return None
    names = tuple(column[keyed] for column in facts.columns[:4])
    _, first = np.unique(np.ravel_multi_index(names, (NUM_KEYED, *facts.shape)), return_index=True)
    return fault_at(facts, (np.delete(keyed, first), lambda action, _: f"{action} appears a second time"))


def complete(facts: Facts) -> Fault | None:
    """Every micro-batch goes forward through every stage, and back through those that train."""
    forward, whole, half, other, again = (facts.node_of[kind.code] >= 0 for kind in _COMPUTE)
    trains = (np.arange(facts.shape[0]) >= facts.first_backward_stage)[:, None, None]
    recomputes_in_vain = again & ~trains
    returns_in_vain = (whole | half | other) & ~trains
    # a backward is whole, or it has both halves
    lacks_backward = ((whole == half) | (half != other)) & trains
    wrong = recomputes_in_vain | ~forward | returns_in_vain | lacks_backward
    if not wrong.any():
        return None
    stage, microbatch, part = np.argwhere(wrong)[0].tolist()
    about, message = _incomplete(facts, stage, microbatch, part)
    rank = int(facts.owner[stage])
    times = sum(map(np.count_nonzero, (recomputes_in_vain, ~forward, returns_in_vain, lacks_backward)))
    return Fault(message, rank, _slot_near(facts, rank, about), times)


_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)


def _incomplete(facts: Facts, stage: int, microbatch: int, part: int) -> tuple[Action, str]:
    """What is missing or superfluous of a stage's work on a micro-batch: an action, and a message about it."""
    forward, full, for_input, for_weight, again = (Action(kind, stage, microbatch, part) for kind in _COMPUTE)
    found = [one for one in (full, for_input, for_weight) if facts.node_of[one.kind.code, stage, microbatch, part] >= 0]
    trains = stage >= facts.first_backward_stage
    if not trains and facts.node_of[again.kind.code, stage, microbatch, part] >= 0:
        return again, f"{again} is superfluous: stage {stage} runs no backward"
    if facts.node_of[forward.kind.code, stage, microbatch, part] < 0:
        return forward, f"{forward} is missing"
    if not trains:
        return found[0], f"{found[0]} is superfluous: stage {stage} runs no backward"
    if not found:
        return full, f"{full} is missing"
    if full in found:
        return full, f"{full} and {found[1]} are both there: a backward is either whole or split"
    missing = for_weight if for_input in found else for_input
    return missing, f"{missing} is missing"


def _slot_near(facts: Facts, rank: int, about: Action) -> int | None:
    """The slot of an action in a row, or that of the next of its kind and stage."""
    row = facts.rows[rank]
    slots = np.flatnonzero(row.is_kind(about.kind) & (row.stage == about.stage))
    if not slots.size:
        return None
    return int(slots[np.abs(row.microbatch[slots] - (about.microbatch or 0)).argmin()])


def forward_before_backward(facts: Facts) -> Fault | None:
    """On its rank, a micro-batch's forward precedes its backward, and I before W; what recomputes, in between."""
    ways = list[tuple[Nodes, TextOf]]()
    for kind, before in _ORDER.items():
        node, first = facts.node_of[kind.code], facts.node_of[before.code]
        is_early = (node >= 0) & (first > node)
        ways.append((node[is_early], lambda a, _: f"{a} precedes {a._replace(kind=_ORDER[a.kind])}"))
    again = facts.node_of[Kind.RECOMPUTE.code]
    is_late = (again >= 0) & (facts.input_gradients < again)
    ways.append((again[is_late], lambda action, _: f"{action} follows the backward that needs it"))
    return fault_at(facts, *ways)


_ORDER = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.BACKWARD_INPUT: Kind.FORWARD,
    Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
    Kind.RECOMPUTE: Kind.FORWARD,
}
"""What precedes what, of the same micro-batch."""


def acyclic(facts: Facts) -> Fault | None:
    """No actions wait for each other in a circle, over all ranks: the step cannot deadlock."""
    cycle = facts.graph.cycle()
    if not cycle:
        return None
    steps = " -> ".join(f"{facts.action(node)} (rank {facts.place(node)[0]})" for node in [*cycle, cycle[0]])
    return Fault(f"deadlock, each waits for the next: {steps}", *facts.place(cycle[0]))


def in_flight_bound(facts: Facts) -> Fault | None:
    """No rank holds more stage inputs than the schedule promises."""
    limits = facts.promises.max_stage_inputs
    if limits is None:
        return None
    peaks = facts.peak_stage_inputs
    wrong = [rank for rank, limit in enumerate(limits) if peaks[rank] > limit]
    if not wrong:
        return None
    rank = wrong[0]
    row, peak, limit = facts.rows[rank], peaks[rank], limits[rank]
    first = (facts.held_inputs(row) > limit).argmax()
    message = f"holds up to {peak} stage inputs, but max_stage_inputs promises {limit}; here it takes one more"
    return Fault(message, rank, int(np.flatnonzero(row.is_kind(Kind.FORWARD))[first]), len(wrong))
