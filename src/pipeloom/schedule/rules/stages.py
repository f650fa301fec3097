"""Rules of what concerns whole stages: gathered weights, reduced gradients, swaps to the device, updates."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from pipeloom.schedule.action import Action
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.facts import Facts
from pipeloom.schedule.kernels import order
from pipeloom.schedule.kernels.order import LOOK, OFF, ON
from pipeloom.schedule.kernels.types import Bytes
from pipeloom.schedule.kinds import (
    ADDS_TO_GRADIENT,
    CHANGES_GRADIENT,
    KINDS,
    STAGE_SWAP_KINDS,
    USES_STAGE,
    USES_WEIGHTS,
    Kind,
)
from pipeloom.schedule.row import Bools, Ints, is_one_of
from pipeloom.schedule.rules.fault import Fault, Nodes, TextOf, fault_at, with_missing
from pipeloom.schedule.stage_swaps import swap_uses


class _States(NamedTuple):
    """In which state actions find their stages, where some kinds switch it on and others off.

    Attributes:
        kind: for each node the code of its kind.
        found: for each node ``ON`` or ``OFF``; 0 where its kind has nothing to do with it.
        left: for each stage whether it is on at the end.
    """

    kind: Ints
    found: Bytes
    left: Bools

    @classmethod
    def of(cls, facts: Facts, on: Collection[Kind], off: Collection[Kind], look: Collection[Kind] = ()) -> "_States":
        """With kinds that switch on, that switch off, and that look."""
        role = np.zeros(len(KINDS), np.int32)
        for what, kinds in ((LOOK, look), (ON, on), (OFF, off)):
            role[[kind.code for kind in kinds]] = what
        kind, stage = facts.columns[:2]
        return cls(kind, *kernel(order.states, len(kind))(kind, stage, role, facts.shape[0]))

    def where(self, state: int, *kinds: Kind) -> Nodes:
        """The nodes of some kinds that find their stage in a state."""
        nodes = np.flatnonzero(self.found == state)
        return nodes[is_one_of(kinds)[self.kind[nodes]]]


def unshard_before_compute(facts: Facts) -> Fault | None:
    """If a stage is ever gathered, it is so whenever it computes on its weights; it is gathered and dropped in turn."""
    if not facts.has(Kind.UNSHARD, Kind.RESHARD):
        return None
    states = _States.of(facts, [Kind.UNSHARD], [Kind.RESHARD], USES_WEIGHTS)
    return fault_at(
        facts,
        (states.where(ON, Kind.UNSHARD), lambda action, _: f"{action}: the stage is gathered already"),
        (states.where(OFF, Kind.RESHARD), lambda action, _: f"{action}: the stage is not gathered"),
        (
            _of_stages_with(facts, Kind.UNSHARD, states.where(OFF, *USES_WEIGHTS)),
            lambda action, _: f"{action} computes on stage {action.stage} while its weights are sharded",
        ),
    )


def on_device_when_used(facts: Facts) -> Fault | None:
    """A swapped stage is on the device when it is used; swaps in and out alternate, and the last one is out."""
    if not facts.has(*STAGE_SWAP_KINDS):
        return None
    uses = swap_uses(facts.row)
    states = _States.of(facts, [Kind.SWAP_IN], [Kind.SWAP_OUT], uses)
    left = [facts.nodes(stage, Kind.SWAP_IN)[-1] for stage in np.flatnonzero(states.left).tolist()]
    fault = fault_at(
        facts,
        (states.where(ON, Kind.SWAP_IN), lambda action, _: f"{action}: the stage is on the device already"),
        (states.where(OFF, Kind.SWAP_OUT), lambda action, _: f"{action}: the stage is not on the device"),
        (
            _of_stages_with(facts, Kind.SWAP_IN, states.where(OFF, *uses)),
            lambda action, _: f"{action} takes stage {action.stage}, which is not on the device",
        ),
    )
    if fault is not None:
        return fault._replace(count=fault.count + len(left))
    text_of: TextOf = lambda a, _: f"{a} is the last word on stage {a.stage}: {a.stage}SWAP_OUT is missing"  # noqa: E731
    return fault_at(facts, (np.array(left), text_of))


def _of_stages_with(facts: Facts, kind: Kind, nodes: Nodes) -> Nodes:
    """Those of some nodes whose stages have an action of a kind somewhere."""
    stage = facts.columns.stage
    return nodes[np.isin(stage[nodes], stage[facts.row.is_kind(kind)])] if len(nodes) else nodes


def reduce_each_contribution_once(facts: Facts) -> Fault | None:
    """If gradients are reduced at all, every micro-batch's contribution to every stage is, exactly once.

    A reduction takes what the backwards since the stage's reduction before it have added, so each takes something,
    and one follows the stage's last backward.
    """
    if not facts.has(Kind.REDUCE_GRAD):
        return None
    states = _States.of(facts, ADDS_TO_GRADIENT, [Kind.REDUCE_GRAD])
    in_vain = states.where(OFF, Kind.REDUCE_GRAD)
    left = np.array(
        [facts.nodes(stage, *ADDS_TO_GRADIENT)[-1] for stage in np.flatnonzero(states.left).tolist()], np.intp
    )
    # Of the gradients of a rank that no action reduces, the one that is completed last is named.
    left = left[np.lexsort((-left, facts.ranks[left]))]
    found = (
        fault_at(facts, (in_vain, lambda a, _: f"{a} reduces nothing: no backward before it adds to the gradient")),
        fault_at(facts, (left[:1], lambda a, _: f"{a} adds to a gradient that no {a.stage}REDUCE_GRAD reduces")),
    )
    faults = [fault._replace(count=len(in_vain) + len(left)) for fault in found if fault is not None]
    return min(faults, key=lambda fault: fault.rank or 0, default=None)


def gathered_bound(facts: Facts) -> Fault | None:
    """No rank has more stages gathered at once than the schedule promises, those being gathered included."""
    limit = facts.promises.max_gathered
    if limit is None:
        return None
    words = f"{{}} makes {{}} gathered stages, but max_gathered promises {limit}"
    return _bound(facts, limit, facts.where(Kind.UNSHARD), facts.where(Kind.RESHARD), words)


def gradient_bound(facts: Facts) -> Fault | None:
    """No rank holds unreduced gradients of more stages than it has buffers for."""
    limit = facts.promises.gradient_buffers
    if limit is None:
        return None
    begins = _States.of(facts, ADDS_TO_GRADIENT, [Kind.REDUCE_GRAD]).where(OFF, *ADDS_TO_GRADIENT)
    words = f"{{}} begins unreduced gradient number {{}}, but gradient_buffers is {limit}"
    return _bound(facts, limit, begins, facts.where(Kind.REDUCE_GRAD), words)


def resident_bound(facts: Facts) -> Fault | None:
    """No rank has more stages on the device at once than the schedule promises, those in transfer included."""
    limit = facts.promises.max_resident
    if limit is None:
        return None
    words = f"{{}} makes {{}} on the device, but max_resident promises {limit}"
    return _bound(
        facts, limit, facts.where(Kind.SWAP_IN), facts.where(Kind.SWAP_OUT), words, facts.promises.stage_sizes
    )


def _bound(  # noqa: PLR0917
    facts: Facts, limit: int, begins: Nodes, ends: Nodes, words: str, sizes: tuple[int, ...] | None = None
) -> Fault | None:
    """Where a rank has more than a limit of what some nodes begin and others end."""
    nodes = np.concatenate([begins, ends])
    size = np.ones(facts.shape[0], np.int64) if sizes is None else np.array(sizes, np.int64)
    change = size[facts.columns.stage[nodes]] * np.repeat([1, -1], [len(begins), len(ends)])
    by_node = np.argsort(nodes)
    nodes, change = nodes[by_node], change[by_node]
    total = np.cumsum(change)
    before_rank = np.concatenate([[0], total])[np.searchsorted(nodes, facts.columns.first[facts.ranks[nodes]])]
    number = total - before_rank
    is_wrong = (change > 0) & (number > limit)
    found = dict(zip(nodes[is_wrong].tolist(), number[is_wrong].tolist(), strict=True))
    return fault_at(facts, (nodes[is_wrong], lambda action, node: words.format(action, found[node])))


def update_each_stage_once(facts: Facts) -> Fault | None:
    """If stages are updated at all, each that trains is, once, behind all that adds to its gradient or reduces it.

    Or all of them are updated before their first use, with the gradients of the step before.
    """
    if not facts.has(Kind.UPDATE):
        return None
    states, updates = _States.of(facts, USES_STAGE - {Kind.UPDATE}, [], [Kind.UPDATE]), facts.where(Kind.UPDATE)
    is_deferred, stage = states.found[updates] == OFF, facts.columns.stage[updates]
    stages, numbers = np.unique(stage, return_index=True)
    updated_at, uses_up = np.full(facts.shape[0], len(facts.ranks)), np.zeros(facts.shape[0], np.bool_)
    updated_at[stages], uses_up[stages] = updates[numbers], ~is_deferred[numbers]
    is_first = updated_at[stage] == updates
    # whether all are of the step before is what the first of them is
    is_odd = is_first & (is_deferred != is_deferred[0])
    final = facts.where(*CHANGES_GRADIENT)
    is_late = uses_up[facts.columns.stage[final]] & (final > updated_at[facts.columns.stage[final]])
    fault = fault_at(
        facts,
        (updates[~is_first], lambda action, _: f"{action} appears a second time"),
        (updates[is_odd], lambda action, _: f"{action} and another update are not of the same step"),
        (
            updates[stage < facts.first_backward_stage],
            lambda action, _: f"{action} updates a stage that runs no backward",
        ),
        (final[is_late], lambda a, _: f"{a} follows {a.stage}UPDATE, which uses the gradient"),
    )
    trains = np.arange(facts.shape[0]) >= facts.first_backward_stage
    missing = np.flatnonzero(trains & (updated_at == len(facts.ranks))).tolist()
    return with_missing(facts, fault, [Action(Kind.UPDATE, stage) for stage in missing])
