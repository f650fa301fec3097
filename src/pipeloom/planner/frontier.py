"""State of one best-first query: open nodes in the order of their bounds, and the incumbents of each group."""

from collections.abc import Hashable
from dataclasses import replace
from heapq import heapify, heappush, nsmallest
from math import inf
from typing import NamedTuple

from pipeloom.planner.candidate import Candidate
from pipeloom.planner.question import Limits
from pipeloom.planner.space import Arrangement, Cut, Leaf, Twig
from pipeloom.predict.step import SimulatedStep

SAME = 1e-8
"""Relative difference of two step times that is rounding."""


class GroupKey(NamedTuple):
    """Key under which layouts are grouped; an answer lists the best of each group."""

    sizes: tuple[int, ...]
    micro_batch: int
    family: str
    recompute: str
    sequence_parallel: bool
    strategy: str

    @classmethod
    def of(cls, leaf: Leaf) -> "GroupKey":
        """The group of a layout, whatever its loops, its group size and its sharding."""
        run = leaf.cut.run
        # Without a pipeline the order of accumulation does not matter, either.
        family = leaf.choice.family if run.pp > 1 else ""
        # Memory alone determines which layers recompute, so two such layouts differ in nothing that anybody chose.
        recompute = leaf.cut.arrangement.recomputed
        return cls(tuple(run.sizes.values()), run.micro_batch, family, recompute, run.sequence_parallel, leaf.strategy)


class SortKey(NamedTuple):
    """Order of the layouts of an answer: step time, then memory, then loops, then the text of the layout."""

    step_s: float
    held_bytes: float
    loops: int
    layout: str

    @classmethod
    def of(cls, step: SimulatedStep) -> "SortKey":
        """The key of a step; values that differ by rounding are equal."""
        # Sums in another order differ in their last digits: unrounded, that would decide in place of the memory.
        step_s, held = (
            float(f"{value:.9g}") for value in (step.prediction.step_time_s, step.prediction.memory.total_bytes)
        )
        # The text settles ties, so that the answer does not depend on the order of simulation.
        return cls(step_s, held, step.run.loops, repr((step.run, step.knobs)))


Node = Arrangement | Cut | Twig | Leaf | Candidate


NodeKey = tuple[Hashable, ...]
"""Key of a node within a search; that of a node begins with those of all nodes above it."""


def key_of(node: Node) -> NodeKey:
    """The key of a node, whichever of its sharding levels have been left out since they cannot fit."""
    if isinstance(node, Candidate):
        return key_of(node.leaf)
    if isinstance(node, Arrangement):
        return (id(node),)  # which lives as long as the search
    if isinstance(node, Cut):
        return (*key_of(node.arrangement), node.run.loops, node.run.placement)
    last = node.sharding._replace(levels=node.sharding.levels[-1:])
    return (*key_of(node.cut), last, *((node.choice,) if isinstance(node, Leaf) else ()))


def prefixes(leaf: NodeKey) -> list[NodeKey]:
    """The keys of a leaf and of all nodes above it: arrangement, cut, twig, leaf."""
    return [leaf[:1], leaf[:3], leaf[:4], leaf]


class OpenNode(NamedTuple):
    """A node that is not decided: its lower bound, a number that settles ties, and the node."""

    bound_s: float
    number: int
    node: Node


class Frontier:
    """Open nodes and incumbents of a query for the best layouts within limits, one of each group.

    Args:
        count: layouts of the answer.
        limits: that they satisfy.
        is_urgent: whether an early answer is worth more than few simulations.
        within_s: longest step of the answer.

    Attributes:
        is_urgent: as given.
        queue: heap of the open nodes that may satisfy the limits.
        deferred: open nodes that cannot satisfy them or cannot improve their group, for later queries.
        cutoff_s: upper bound; slower layouts are not in the answer. ``within_s`` until there are ``count`` incumbents.
    """

    def __init__(self, count: int, limits: Limits, *, is_urgent: bool = False, within_s: float = inf) -> None:
        self._count, self._limits = count, limits
        # A layout that does not fit as it is may fit with any strategy: that is decided when the strategy is applied.
        self._plain_limits = replace(limits, strategies=None)
        self._incumbents: dict[GroupKey, tuple[SortKey, Candidate]] = {}
        self._steps: dict[GroupKey, tuple[Candidate, SimulatedStep]] = {}
        self.is_urgent = is_urgent
        self._admitted: dict[int, bool] = {}
        self._has_inner_limits = not _INNER.isdisjoint(limits.names)
        self.queue: list[OpenNode] = []
        self.deferred: list[OpenNode] = []
        self.cutoff_s = self._within_s = within_s

    def start(self, entries: list[OpenNode]) -> None:
        """Set the open nodes: those that the bounds or the limits exclude go to ``deferred``."""
        # Most nodes are too slow for all but the first query, and a bound is read faster than limits are.
        for entry in entries:
            is_open = entry.bound_s <= self.cutoff_s and self._admits(entry.node)
            (self.queue if is_open else self.deferred).append(entry)
        heapify(self.queue)

    @property
    def has_slower(self) -> bool:
        """Whether open nodes above the cutoff may satisfy the limits."""
        return bool(self.queue) or any(
            entry.bound_s > self.cutoff_s and self._admits(entry.node) for entry in self.deferred
        )

    def push(self, entry: OpenNode) -> None:
        """Add an open node to the queue, or to ``deferred`` if the limits exclude it."""
        if self._admits(entry.node):
            heappush(self.queue, entry)
        else:
            self.deferred.append(entry)

    def _admits(self, node: Node) -> bool:
        """``admits``, with the answer for an arrangement cached: a query has far more nodes than arrangements."""
        if not self._limits.names:
            return True
        while not isinstance(node, Arrangement):
            if self._has_inner_limits and not _admits_itself(self._limits, node):
                return False
            node = _above(node)
        # By identity: arrangements live as long as the search.
        if (known := self._admitted.get(id(node))) is None:
            known = self._admitted[id(node)] = _admits_itself(self._limits, node)
        return known

    def offer(self, key: SortKey, candidate: Candidate, step: SimulatedStep | None = None) -> None:
        """Make a simulated layout the incumbent of its group, if limits allow it and it is better.

        Args:
            key: of its step.
            candidate: the layout.
            step: is kept for ``step_of`` while the layout is in the answer.
        """
        if key.step_s > self.cutoff_s or not admits(self._limits, candidate):
            return
        group = GroupKey.of(candidate.leaf)
        if group in self._incumbents and key >= self._incumbents[group][0]:
            return
        self._incumbents[group] = key, candidate
        if len(self._incumbents) >= self._count:
            # Groups that fell out of the answer remain incumbents, so the cutoff is not the slowest of all.
            slowest_s = nsmallest(self._count, (key.step_s for key, _ in self._incumbents.values()))[-1]
            # A step time that is equal but for rounding may still win by its memory.
            self.cutoff_s = min(self.cutoff_s, slowest_s * (1 + SAME))
        if step is not None:
            self._steps[group] = candidate, step
            # A step holds the times of all its actions, so only those of the answer are kept.
            best = {GroupKey.of(one.leaf) for one in self.best}
            self._steps = {group: kept for group, kept in self._steps.items() if group in best}

    def step_of(self, candidate: Candidate) -> SimulatedStep | None:
        """The step of a layout of the answer, if it is kept."""
        kept, step = self._steps.get(GroupKey.of(candidate.leaf), (None, None))
        return step if kept is candidate else None

    def allows(self, strategy: str) -> bool:
        """Whether the limits allow layouts with a strategy."""
        return self._limits.allows(strategies=strategy)

    def admits_with_any_strategy(self, node: Arrangement | Leaf) -> bool:
        """``admits`` without the limit on strategies."""
        return admits(self._plain_limits, node)

    @property
    def fastest_s(self) -> float:
        """Step time of the fastest incumbent; ``within_s`` without one."""
        return min((key.step_s for key, _ in self._incumbents.values()), default=self._within_s)

    @property
    def best(self) -> list[Candidate]:
        """The answer so far in the order of ``SortKey``."""
        ranked = sorted(self._incumbents.values(), key=lambda one: one[0])
        return [candidate for _, candidate in ranked[: self._count]]

    def is_dominated(self, node: Node, bound_s: float) -> bool:
        """Whether a leaf or candidate with this bound cannot improve its group."""
        # The others have layouts of several groups.
        if not isinstance(node, Leaf | Candidate):
            return False
        incumbent = self._incumbents.get(GroupKey.of(node.leaf if isinstance(node, Candidate) else node))
        return incumbent is not None and bound_s > incumbent[0].step_s * (1 + SAME)


def admits(limits: Limits, node: Node) -> bool:
    """Whether a layout below the node may satisfy the limits."""
    if not limits.names:
        return True
    while not isinstance(node, Arrangement):
        if not _admits_itself(limits, node):
            return False
        node = _above(node)
    return _admits_itself(limits, node)


_INNER = frozenset({"families", "loops", "shards", "strategies"})
"""Limits of what nodes below an arrangement decide."""


def _above(node: Cut | Twig | Leaf | Candidate) -> Node:
    """What a node is a choice within."""
    if isinstance(node, Candidate):
        return node.leaf
    return node.arrangement if isinstance(node, Cut) else node.cut


def _admits_itself(limits: Limits, node: Node) -> bool:
    """Whether limits allow what a node decides, whatever those above it decide."""
    if isinstance(node, Candidate):
        return limits.allows(shards=node.run.shard)
    families = limits.families
    if isinstance(node, Leaf):
        # A query has so many leaves that calls of ``allows`` would take longer than most queries.
        return (
            (families is None or node.choice.family in families)
            and (limits.strategies is None or node.strategy in limits.strategies)
            and _has_level(limits, node)
        )
    if isinstance(node, Twig):
        return _has_level(limits, node)
    run = node.run
    if isinstance(node, Cut):
        has_family = families is None or any(choice.family in families for choice in node.choices)
        return has_family and limits.allows(loops=run.loops)
    # Some of the layers are recomputed where both nothing and all are allowed.
    recompute = ("none", "full") if node.recomputed == "some" else (node.recomputed,)
    return all(limits.allows(recompute=one) for one in recompute) and limits.allows(
        **run.sizes,
        ep_overlap=run.ep_overlap,
        micro_batch=run.micro_batch,
        sequence_parallel=run.sequence_parallel,
    )


def _has_level(limits: Limits, node: Leaf | Twig) -> bool:
    return limits.shards is None or any(level in limits.shards for level in node.sharding.levels)
