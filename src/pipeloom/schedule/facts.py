"""What the dependency relation has to know about a schedule, in arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import Action
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.depend import Lane, lane_of, tied_action
from pipeloom.schedule.kernels import waits as kernels
from pipeloom.schedule.kinds import KINDS, LOAD_OF, NUM_KEYED, OWN_LANES, TIED_KINDS, Kind
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Columns, Ints, Row


@dataclass(frozen=True)
class Facts:
    """A schedule's rows and sizes, in arrays.

    Attributes:
        rows: one for each rank.
        placement: stage -> rank.
        shape: numbers of stages, micro-batches and token slices.
        has_transfers: whether tensors change rank by sends and receives.
    """

    rows: Sequence[Row]
    placement: Placement
    shape: tuple[int, int, int]
    has_transfers: bool

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
        """For each stage, micro-batch and slice whether the backward is split into input and weight halves."""
        return self._has(Kind.BACKWARD_INPUT)

    @property
    def relation(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Ints, NDArray[np.bool_]]:
        """What decides whom an action waits for: outputs received, backwards split, what was kept, what recomputes."""
        return self.is_received, self.is_split, self._keeper, self.is_recomputed

    @cached_property
    def is_recomputed(self) -> NDArray[np.bool_]:
        """For each stage, micro-batch and slice whether the forward is computed again for the backward."""
        return self._has(Kind.RECOMPUTE)

    @cached_property
    def _keeper(self) -> Ints:
        """[stage, micro-batch, slice] the kind after which a rank has what was kept of the forward."""
        keeper = np.full(self.shape, Kind.FORWARD.code, np.int32)
        for kind in LOAD_OF.values():
            keeper[self._has(kind)] = kind.code
        return keeper

    def _has(self, kind: Kind) -> NDArray[np.bool_]:
        """[stage, micro-batch, slice] whether the schedule has such an action."""
        has = np.zeros(self.shape, np.bool_)
        columns = self.columns
        chosen = columns.kind == kind.code
        place = np.stack([columns.stage[chosen], columns.microbatch[chosen], columns.part[chosen]])
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
        """The messages about a tied matrix: for each kind that there is, the numbers of its actions."""
        nodes = np.flatnonzero(self.row.is_kind(*TIED_KINDS))
        found: dict[Kind, list[int]] = {}
        for node, code in zip(nodes.tolist(), self.columns.kind[nodes].tolist(), strict=True):
            found.setdefault(KINDS[code], []).append(node)
        return found

    @property
    def lanes(self) -> tuple[tuple[int, Lane], ...]:
        """Every lane with its rank: those of one rank alone, each by rank; of the directed edges."""
        return _lanes(self.placement, tuple(self.tied_nodes))[0]

    @cached_property
    def lane(self) -> Ints:
        """For each action the number of its lane in ``lanes``."""
        return _lanes(self.placement, tuple(self.tied_nodes))[1][self.columns.kind, self.columns.stage]

    def action_of(self, key: int) -> Action:
        """The action of a key, see ``kernels.key_of``."""
        kind, stage, microbatch, part = np.unravel_index(key, (NUM_KEYED, *self.shape))
        return Action(KINDS[int(kind)], int(stage), int(microbatch), int(part))


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
