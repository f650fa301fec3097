"""A schedule in arrays, and the dependency relation: what each action waits for.

An action starts when its lane is free and the actions that it waits for have ended. Verifier, passes, simulator and
executor use this one relation. An action waits for

- *data*: the actions whose results it uses (``Facts.needs``);
- *a buffer*: where gradient buffers are limited, the first backward of a stage's gradient waits for the
  reduction that frees its buffer (``Promises.gradient_buffers``), and a stage that is swapped in for the swap out
  that frees its room (``Promises.max_resident``);
- *its lane*: the action before it on the same lane of the same rank;
- *its place in the row*, if it is communication: the compute action before it in the row. The place of a receive is
  where its buffer becomes free, that of a gather where its prefetch begins; they start no earlier. Compute waits for
  communication before it in the row only if it uses its result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import Action
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.kernels import waits as kernels
from pipeloom.schedule.kernels.walk import walk
from pipeloom.schedule.kinds import KINDS, LOAD_OF, NUM_KEYED, OWN_LANES, STAGE_SWAP_KINDS, TIED_KINDS, Kind
from pipeloom.schedule.lanes import Lane, lane_of, tied_action
from pipeloom.schedule.peaks import Peaks
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Columns, Ints, Row
from pipeloom.schedule.sharding import gradient_waits
from pipeloom.schedule.stage_swaps import swap_waits

Seconds = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Promises:
    """Limits and partners of a schedule, which its rules enforce.

    Attributes:
        max_stage_inputs: for each rank the most (stage, micro-batch) inputs that it may hold at the same time;
            ``None`` for no limit.
        max_gathered: the most stages that a rank may have gathered at the same time, those in transfer included;
            ``None`` for no limit.
        gradient_buffers: the most stages of a rank with unreduced gradients: the first backward of a further one waits
            for a reduction. ``None`` for no limit.
        max_resident: the most swapped stages that a rank may have on the device at the same time, those in transfer
            included, in units of ``stage_sizes``; ``None`` for no limit.
        stage_sizes: for each stage its part of ``max_resident``, such as bytes; ``None`` for 1 each.
        partners: for each rank the rank to which it evicts. They are pairs: ``partners[partners[r]] == r``; a rank
            without a partner names itself. A partner's row has no actions for accepting and returning. ``None``:
            evictions can be simulated, not executed.
    """

    max_stage_inputs: tuple[int, ...] | None = None
    max_gathered: int | None = None
    gradient_buffers: int | None = None
    max_resident: int | None = None
    stage_sizes: tuple[int, ...] | None = None
    partners: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Facts:
    """A schedule's rows, sizes and promises in arrays, not verified.

    Attributes:
        rows: one for each rank.
        placement: stage -> rank.
        shape: numbers of stages, micro-batches and token slices.
        has_transfers: whether tensors change rank by sends and receives.
        first_backward_stage: stages below it run no backward.
        promises: limits and partners.
    """

    rows: Sequence[Row]
    placement: Placement
    shape: tuple[int, int, int]
    has_transfers: bool
    first_backward_stage: int = 0
    promises: Promises = Promises()

    @cached_property
    def columns(self) -> Columns:
        """All rows, joined."""
        return Columns.of(self.rows)

    @cached_property
    def row(self) -> Row:
        """All rows, joined, as one."""
        return Row(*self.columns[:4])

    @cached_property
    def ranks(self) -> Ints:
        """For each action its rank."""
        lengths = [len(row) for row in self.rows]
        return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

    @cached_property
    def owner(self) -> Ints:
        """For each stage its rank."""
        return np.array(self.placement.rank_by_stage, np.int32)

    @cached_property
    def crosses(self) -> NDArray[np.bool_]:
        """For each stage whether the next one is on another rank."""
        return np.append(self.owner[1:] != self.owner[:-1], False)

    @cached_property
    def is_received(self) -> NDArray[np.bool_]:
        """For each stage whether its output reaches the next stage by a receive."""
        return self.crosses & self.has_transfers

    @cached_property
    def is_split(self) -> NDArray[np.bool_]:
        """[stage, micro-batch, slice] whether the backward is split into input gradient and weight gradient."""
        return self._has(Kind.BACKWARD_INPUT)

    @property
    def relation(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Ints, NDArray[np.bool_]]:
        """Arrays from which kernels derive what an action waits for."""
        return self.is_received, self.is_split, self._keeper, self.is_recomputed

    @cached_property
    def is_recomputed(self) -> NDArray[np.bool_]:
        """[stage, micro-batch, slice] whether the forward is recomputed for the backward."""
        return self._has(Kind.RECOMPUTE)

    @cached_property
    def _keeper(self) -> Ints:
        """[stage, micro-batch, slice] the kind after which the rank holds the activations: forward or move back."""
        keeper = np.full(self.shape, Kind.FORWARD.code, np.int32)
        for kind in LOAD_OF.values():
            keeper[self._has(kind)] = kind.code
        return keeper

    def _has(self, kind: Kind) -> NDArray[np.bool_]:
        """[stage, micro-batch, slice] whether the schedule has such an action."""
        has = np.zeros(self.shape, np.bool_)
        if not self.has(kind):
            return has
        columns = self.columns
        chosen = columns.kind == kind.code
        place = np.stack([columns.stage[chosen], columns.microbatch[chosen], columns.part[chosen]])
        # Facts are made before the rules have seen the rows, so numbers may lie outside of the shape.
        exists = np.all((place >= 0) & (place < np.array(self.shape)[:, None]), axis=0)
        has[tuple(place[:, exists])] = True
        return has

    @cached_property
    def node_of(self) -> Ints:
        """[kind, stage, micro-batch, slice] -> number of the action in the joined rows; negative for none."""
        kind, stage, microbatch, part, _ = self.columns
        place = kernel(kernels.place, len(kind))
        return place(kind, stage, microbatch, part, self.shape).reshape(NUM_KEYED, *self.shape)

    @cached_property
    def tied_nodes(self) -> dict[Kind, list[int]]:
        """Messages of a tied matrix: kind -> nodes, for kinds that occur."""
        nodes = self.where(*TIED_KINDS)
        found: dict[Kind, list[int]] = {}
        for node, code in zip(nodes.tolist(), self.columns.kind[nodes].tolist(), strict=True):
            found.setdefault(KINDS[code], []).append(node)
        return found

    @property
    def lanes(self) -> tuple[tuple[int, Lane], ...]:
        """Every lane with its rank: first those without peers, then those of the directed edges."""
        return _lanes(self.placement, tuple(self.tied_nodes))[0]

    @cached_property
    def lane(self) -> Ints:
        """For each action the number of its lane in ``lanes``."""
        return _lanes(self.placement, tuple(self.tied_nodes))[1][self.columns.kind, self.columns.stage]

    def action_of(self, key: int) -> Action:
        """The action of a key, see ``kernels.key_of``."""
        kind, stage, microbatch, part = np.unravel_index(key, (NUM_KEYED, *self.shape))
        return Action(KINDS[int(kind)], int(stage), int(microbatch), int(part))

    @cached_property
    def input_gradients(self) -> Ints:
        """[stage, micro-batch, slice] -> node that makes the gradient for the input; negative for none."""
        return np.maximum(self.node_of[Kind.BACKWARD.code], self.node_of[Kind.BACKWARD_INPUT.code])

    def action(self, node: int) -> Action:
        """The action of a node."""
        return self.row[node]

    def place(self, node: int) -> tuple[int, int]:
        """Rank and slot of a node."""
        rank = int(self.ranks[node])
        return rank, node - int(self.columns.first[rank])

    @cached_property
    def _occurs(self) -> list[bool]:
        """Whether there are actions of a kind, by code."""
        occurs = np.zeros(len(KINDS), np.bool_)
        occurs[self.columns.kind] = True
        return occurs.tolist()

    def has(self, *kinds: Kind) -> bool:
        """Whether there are actions of some of these kinds."""
        return any(self._occurs[kind.code] for kind in kinds)

    def where(self, *kinds: Kind) -> Ints:
        """The nodes of some kinds, ascending."""
        nodes = np.flatnonzero(self.row.is_kind(*kinds)) if self.has(*kinds) else np.zeros(0)
        return nodes.astype(np.int32)

    def nodes(self, stage: int, *kinds: Kind) -> Ints:
        """The nodes of a stage's actions of some kinds, ascending."""
        return np.flatnonzero(self.row.is_kind(*kinds) & (self.columns.stage == stage)).astype(np.int32)

    def needs(self, action: Action) -> list[Action]:
        """The actions whose results an action uses.

        Gathers and messages of a tied matrix depend on places in rows; only ``Graph`` has them.
        """
        found = np.zeros(3, np.int64)
        kind, stage, microbatch, part = action
        if microbatch is None:
            return []
        count = kernels.needs(kind.code, stage, microbatch, part, self.shape, *self.relation, found)
        return [self.action_of(int(key)) for key in found[:count]]

    def held_inputs(self, row: Row) -> NDArray[np.int64]:
        """For each forward of ``row`` the stage inputs held while it runs; slices count as parts, rounded up."""
        begins = row.is_kind(Kind.FORWARD)
        ends = row.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        # Without a backward, an input is freed with its forward.
        change = (begins & (row.stage >= self.first_backward_stage)).astype(np.int64) - ends
        before = np.cumsum(change) - change
        # Slices of one micro-batch hold parts of one input; begun ones count whole.
        return -(-(before[begins] + 1) // self.shape[2])

    @cached_property
    def peak_stage_inputs(self) -> tuple[int, ...]:
        """For each rank the largest number of (stage, micro-batch) inputs held at the same time.

        An input is held from its forward to the end of its backward; without a backward, during its forward. Inputs
        that move out count as held, inputs of partners do not; ``pipeloom.schedule.ledger`` counts them with times.
        """
        return tuple(int(self.held_inputs(row).max(initial=0)) for row in self.rows)

    @cached_property
    def peaks(self) -> Peaks | None:
        """States that decide the activation memory of every run with this schedule; ``None`` where others decide, too.

        Slices have sizes of their own, and what a recomputation or a stage without backward holds changes in between.
        """
        if self.shape[2] > 1 or self.first_backward_stage or self.has(Kind.RECOMPUTE):
            return None
        return Peaks.of(self.rows, self.placement)

    @cached_property
    def graph(self) -> "Graph":
        """The dependency graph."""
        return Graph(self)


def followers_of(waits: Ints) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """``Graph.followers`` of a table of waits: [nodes, w], negative for none."""
    waiting, column = np.nonzero(waits >= 0)
    needed = waits[waiting, column]
    order = np.argsort(needed, kind="stable")
    begin = np.searchsorted(needed[order], np.arange(len(waits) + 1))
    return begin, waiting[order]


class Graph:
    """The dependency graph: which nodes must end before a node starts (see the module's docstring).

    Attributes:
        facts: the schedule in arrays; its columns are the nodes.
        waits: [nodes, w] the nodes that have to end before each node starts; negative for none.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts, promises = facts, facts.promises
        find = kernel(kernels.find_waits, len(facts.ranks))
        waits: list[Ints] = [
            find(
                *facts.columns,
                facts.lane,
                len(facts.lanes),
                facts.node_of.reshape(-1),
                facts.shape,
                *facts.relation,
            )
        ]
        if facts.tied_nodes:
            waits.append(_tied_waits(facts))
        if promises.gradient_buffers is not None:
            waits.append(_buffer_waits(facts, promises.gradient_buffers))
        if facts.has(*STAGE_SWAP_KINDS, Kind.UPDATE):
            waits.append(_swap_waits(facts))
        self.waits: Ints = np.column_stack(waits) if len(waits) > 1 else waits[0]

    @property
    def num_nodes(self) -> int:
        """Actions of the schedule."""
        return len(self.waits)

    def needed(self, node: int) -> list[int]:
        """The nodes that have to end before a node starts."""
        return [wait for wait in self.waits[node].tolist() if wait >= 0]

    @cached_property
    def followers(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The nodes that wait for each node: those of node ``n`` are ``nodes[begin[n] : begin[n + 1]]``."""
        return followers_of(self.waits)

    def times(self, seconds: Seconds) -> tuple[Seconds, Seconds]:
        """Starts and ends if every node starts when all that it waits for has ended; -1 on or behind a cycle."""
        return kernel(walk, self.num_nodes)(self.waits, self.facts.lane, len(self.facts.lanes), seconds)

    def cycle(self) -> list[int]:
        """Nodes of one cycle, each of which waits for the next; empty if there is none."""
        is_stuck = self.times(np.zeros(self.num_nodes))[1] < 0
        if not is_stuck.any():
            return []
        node = int(is_stuck.argmax())
        path, seen = [node], {node: 0}
        while True:
            following = next(needed for needed in self.needed(path[-1]) if is_stuck[needed])
            if following in seen:
                return path[seen[following] :]
            seen[following] = len(path)
            path.append(following)


def _buffer_waits(facts: Facts, gradient_buffers: int) -> Ints:
    """For each node the reduction that frees the gradient buffer that it needs; -1 for none."""
    waits = np.full(len(facts.ranks), -1, np.int32)
    for row, first in zip(facts.rows, facts.columns.first.tolist(), strict=False):
        for slot, reduction in gradient_waits(row, gradient_buffers):
            waits[first + slot] = first + reduction
    return waits


def _tied_waits(facts: Facts) -> Ints:
    """For each node the message or gather of a tied matrix that it waits for; -1 for none.

    The weights wait for the gather of the first stage before them, and the last stage's first forward waits for the
    weights. The first stage's last reduction waits for the head's gradient. That this gradient is complete follows
    from its place in the row, behind the last backward that adds to it.
    """
    waits = np.full(len(facts.ranks), -1, np.int32)
    node_of = {kind: nodes[0] for kind, nodes in facts.tied_nodes.items()}

    def wait(node: int, needed: int) -> None:
        if node >= 0 and needed >= 0:
            waits[node] = needed

    sent, taken = node_of.get(Kind.SEND_TIED, -1), node_of.get(Kind.RECV_TIED, -1)
    gathers = facts.nodes(0, Kind.UNSHARD)
    wait(sent, max(gathers[gathers < sent].tolist(), default=-1))
    wait(taken, sent)
    wait(min(facts.nodes(facts.shape[0] - 1, Kind.FORWARD).tolist(), default=-1), taken)
    taken = node_of.get(Kind.RECV_TIED_GRAD, -1)
    wait(taken, node_of.get(Kind.SEND_TIED_GRAD, -1))
    wait(max(facts.nodes(0, Kind.REDUCE_GRAD).tolist(), default=-1), taken)
    return waits


def _swap_waits(facts: Facts) -> Ints:
    """[nodes, 2] the swaps and updates of stages that each node waits for; -1 for none."""
    promises, firsts = facts.promises, facts.columns.first.tolist()
    found = [swap_waits(row, promises.max_resident, promises.stage_sizes) for row in facts.rows]
    shifted = [np.where(waits >= 0, waits + first, -1) for waits, first in zip(found, firsts, strict=False)]
    return np.concatenate(shifted).astype(np.int32)


@lru_cache(maxsize=512)
def _lanes(placement: Placement, tied: tuple[Kind, ...]) -> tuple[tuple[tuple[int, Lane], ...], Ints]:
    """Every lane with its rank, and [kind, stage] the number of the lane; the same for all schedules on a placement.

    Args:
        placement: stage -> rank.
        tied: kinds of the messages about a tied matrix.
    """
    of_messages = _message_lanes(placement, tied)
    found = dict.fromkeys((rank, lane) for lane in map(Lane, OWN_LANES) for rank in range(placement.num_ranks))
    found.update(dict.fromkeys(of_messages.values()))
    number = {lane: n for n, lane in enumerate(found)}
    table = np.tile(np.array(placement.rank_by_stage, np.int32), (len(KINDS), 1))
    for kind in KINDS:
        if kind.lane in OWN_LANES:
            table[kind.code] += OWN_LANES.index(kind.lane) * placement.num_ranks
    for (kind, stage), lane in of_messages.items():
        table[kind.code, stage] = number[lane]
    return tuple(found), table


def _message_lanes(placement: Placement, tied: tuple[Kind, ...]) -> dict[tuple[Kind, int], tuple[int, Lane]]:
    """Lane of each send and receive by kind and stage."""
    owner = placement.rank_by_stage
    found: dict[tuple[Kind, int], tuple[int, Lane]] = {}
    for stage in filter(placement.crosses, range(placement.num_stages)):
        here = (Kind.SEND_F, stage), (Kind.RECV_B, stage), (Kind.RECV_F, stage + 1), (Kind.SEND_B, stage + 1)
        found.update({key: (owner[key[1]], lane_of(Action(*key, 0), placement)) for key in here})
    for kind in tied:
        action = tied_action(kind, placement.num_stages)
        found[kind, action.stage] = (owner[action.stage], lane_of(action, placement))
    return found
