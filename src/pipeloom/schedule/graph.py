"""A schedule's actions as numbered nodes, with what each waits for."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import Action
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.facts import Facts
from pipeloom.schedule.kernels.waits import ABSENT, find_waits
from pipeloom.schedule.kernels.walk import walk
from pipeloom.schedule.kinds import STAGE_SWAP_KINDS, Kind
from pipeloom.schedule.row import Ints
from pipeloom.schedule.sharding import gradient_waits
from pipeloom.schedule.stage_swaps import swap_waits
from pipeloom.schedule.tied import tied_waits

Seconds = NDArray[np.float64]


class Graph:
    """What has to end before what: data, the action before on the same lane, the place in the row, a gradient's buffer.

    Messages about a tied matrix are among the data; so are the swaps of whole stages, and the room for them.

    Attributes:
        facts: the schedule in arrays; its columns are the nodes.
        waits: [nodes, w] the nodes that have to end before each node starts; negative for none.
    """

    def __init__(
        self,
        facts: Facts,
        gradient_buffers: int | None = None,
        max_resident: int | None = None,
        stage_sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.facts = facts
        find = kernel(find_waits, len(facts.ranks))
        self.waits: Ints = find(
            *facts.columns,
            facts.lane,
            len(facts.lanes),
            facts.node_of.reshape(-1),
            facts.shape,
            *facts.relation,
        )
        if facts.tied_nodes:
            self.waits = np.column_stack([self.waits, tied_waits(facts)])
        if gradient_buffers is not None:
            self.waits = np.column_stack([self.waits, _buffer_waits(facts, gradient_buffers)])
        if facts.row.is_kind(*STAGE_SWAP_KINDS, Kind.UPDATE).any():
            self.waits = np.column_stack([self.waits, swap_waits(facts, max_resident, stage_sizes)])

    @property
    def num_nodes(self) -> int:
        """Actions of the schedule."""
        return len(self.waits)

    def action(self, node: int) -> Action:
        """The action of a node."""
        rank, slot = self.place(node)
        return self.facts.rows[rank][slot]

    def place(self, node: int) -> tuple[int, int]:
        """Rank and slot of a node."""
        rank = int(self.facts.ranks[node])
        return rank, node - int(self.facts.columns.first[rank])

    def needed(self, node: int) -> list[int]:
        """The nodes that have to end before a node starts."""
        return [wait for wait in self.waits[node].tolist() if wait >= 0]

    @cached_property
    def absent(self) -> list[int]:
        """Nodes that need an action that the schedule lacks."""
        return np.flatnonzero((self.waits == ABSENT).any(axis=1)).tolist()

    @cached_property
    def followers(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The nodes that wait for each node: those of node ``n`` are ``nodes[begin[n] : begin[n + 1]]``."""
        waiting, column = np.nonzero(self.waits >= 0)
        needed = self.waits[waiting, column]
        order = np.argsort(needed, kind="stable")
        begin = np.searchsorted(needed[order], np.arange(self.num_nodes + 1))
        return begin, waiting[order]

    def times(self, seconds: Seconds) -> tuple[Seconds, Seconds]:
        """Starts and ends if every node starts when all that it waits for has ended; -1 on or behind a cycle."""
        return kernel(walk, self.num_nodes)(self.waits, self.facts.lane, len(self.facts.lanes), seconds)

    @cached_property
    def is_acyclic(self) -> bool:
        """Whether no actions wait for each other in a circle."""
        return bool((self._reached >= 0).all())

    @cached_property
    def _reached(self) -> Seconds:
        return self.times(np.zeros(self.num_nodes))[1]

    def cycle(self) -> list[int]:
        """Nodes of one cycle, each waiting for the next; empty if there is none."""
        if self.is_acyclic:
            return []
        node = int(np.flatnonzero(self._reached < 0)[0])
        path, seen = [node], {node: 0}
        while True:
            following = next(needed for needed in self.needed(path[-1]) if self._reached[needed] < 0)
            if following in seen:
                return path[seen[following] :]
            seen[following] = len(path)
            path.append(following)


def _buffer_waits(facts: Facts, gradient_buffers: int) -> Ints:
    """For each node the reduction that frees the buffer for the gradient that it begins; -1 for none."""
    waits = np.full(len(facts.ranks), -1, np.int32)
    for row, first in zip(facts.rows, facts.columns.first.tolist(), strict=False):
        for slot, reduction in gradient_waits(row, gradient_buffers):
            waits[first + slot] = first + reduction
    return waits
