"""What a search looks for: the best layouts, one of a kind, and what may still be among them."""

from dataclasses import dataclass, replace
from heapq import heappush, nsmallest
from typing import NamedTuple

from pipeloom.planner.candidate import Candidate
from pipeloom.planner.question import Limits
from pipeloom.planner.space import Arrangement, Cut, Leaf
from pipeloom.predict.step import SimulatedStep
from pipeloom.workload.run import Run


class Kind(NamedTuple):
    """Key under which layouts are grouped; an answer lists the best of each group."""

    tp: int
    pp: int
    dp: int
    micro_batch: int
    family: str
    recompute: str
    sequence_parallel: bool
    way: str


def kind_of(run: Run, family: str, way: str = "none") -> Kind:
    """The kind of a layout; how often stages loop, how the schedule groups and what is sharded do not matter.

    Without a pipeline the order of accumulation does not, either.
    """
    family = family if run.pp > 1 else ""
    # Which layers they are is found by memory alone, so two such layouts differ in nothing that anybody chose.
    recompute = "some" if run.recompute_layers else run.recompute
    return Kind(run.tp, run.pp, run.dp, run.micro_batch, family, recompute, run.sequence_parallel, way)


SAME = 1e-8
"""Relative difference of two step times that is rounding."""


class Rank(NamedTuple):
    """What comes first in an answer: the faster, then the smaller, then what loops less; then anything unique."""

    step_s: float
    held_bytes: float
    loops: int
    layout: str

    @classmethod
    def of(cls, step: SimulatedStep) -> "Rank":
        """The rank of a step; what differs by rounding is the same."""
        # Sums in another order differ in their last digits: unrounded, that would decide in place of the memory.
        step_s, held = (
            float(f"{value:.9g}") for value in (step.prediction.step_time_s, step.prediction.memory.total_bytes)
        )
        # The text settles what is left, so that the answer does not depend
        # on the order in which layouts were simulated.
        return cls(step_s, held, step.run.loops, repr((step.run, step.order)))


@dataclass(frozen=True)
class Settled:
    """A leaf with everything decided.

    Attributes:
        leaf: what is decided.
        candidate: how.
        is_close: whether its bound is that of its schedule without messages.
    """

    leaf: Leaf
    candidate: Candidate
    is_close: bool = False
    count = 1

    def simulate(self) -> SimulatedStep:
        """Its step on its cluster."""
        return self.candidate.simulate()


Node = Arrangement | Cut | Leaf | Settled


class Entry(NamedTuple):
    """Something open: its bound, a number that settles ties, and what it is."""

    bound_s: float
    number: int
    node: Node


class Goal:
    """What is looked for: the best layouts that limits allow, one of each kind."""

    def __init__(self, count: int, limits: Limits) -> None:
        self._count, self._limits = count, limits
        # A layout that is too large as it is may be looked for in any of the ways: that is decided when room is made.
        self._plain_limits = replace(limits, ways=None)
        self._of_kind: dict[Kind, tuple[Rank, Settled]] = {}
        self._steps: dict[Kind, tuple[Settled, SimulatedStep]] = {}
        self.limit_s = float("inf")
        """What is slower than this is not among the best."""
        self.is_urgent = False
        """Whether any answer soon is worth more than simulating few."""
        self.queue: list[Entry] = []
        """What is open and allowed."""
        self.aside: list[Entry] = []
        """What is open for other goals."""

    def take(self, entry: Entry) -> None:
        """Something open: to be looked at if it is allowed."""
        if admits(self._limits, entry.node):
            heappush(self.queue, entry)
        else:
            self.aside.append(entry)

    def add(self, rank: Rank, settled: Settled, step: SimulatedStep | None = None) -> None:
        """Something that was simulated: kept if it is allowed, and the best of its kind; its step if it is among the
        best.
        """
        if not admits(self._limits, settled):
            return
        kind = settled_kind(settled.leaf)
        known = self._of_kind.get(kind)
        if known is None or rank < known[0]:
            self._of_kind[kind] = rank, settled
            if len(self._of_kind) >= self._count:
                # Kinds that were overtaken stay known, so the last of the best is not the slowest that is known.
                slowest_s = nsmallest(self._count, (rank.step_s for rank, _ in self._of_kind.values()))[-1]
                # What is as fast but for rounding may still win by its memory.
                self.limit_s = slowest_s * (1 + SAME)
            if step is not None:
                self._steps[kind] = settled, step
                # A step holds the times of all its actions: those of layouts that
                # are no longer among the best are let go.
                best = {settled_kind(settled.leaf) for settled in self.best}
                self._steps = {kind: kept for kind, kept in self._steps.items() if kind in best}

    def step_of(self, settled: Settled) -> SimulatedStep | None:
        """The step of one of the best, if it is kept."""
        known, step = self._steps.get(settled_kind(settled.leaf), (None, None))
        return step if known is settled else None

    def allows(self, way: str) -> bool:
        """Whether layouts of a way are looked for."""
        return self._limits.allows(ways=way)

    def may_be(self, node: Arrangement | Leaf) -> bool:
        """Whether something is allowed, whatever way it is left open."""
        return admits(self._plain_limits, node)

    @property
    def first_s(self) -> float:
        """Seconds of the fastest that is known."""
        return min((rank.step_s for rank, _ in self._of_kind.values()), default=float("inf"))

    @property
    def best(self) -> list[Settled]:
        """The fastest first; of equals the one with more memory left."""
        ranked = sorted(self._of_kind.values(), key=lambda one: one[0])
        return [settled for _, settled in ranked[: self._count]]

    def beats(self, node: Node, bound_s: float) -> bool:
        """Whether something that takes at least that long cannot be the best of its kind."""
        # Layouts of several kinds are below these.
        if isinstance(node, Arrangement | Cut):
            return False
        known = self._of_kind.get(settled_kind(node.leaf if isinstance(node, Settled) else node))
        return known is not None and bound_s > known[0].step_s * (1 + SAME)


def settled_kind(leaf: Leaf) -> Kind:
    """The kind of a layout that may not be decided yet."""
    # The run of a leaf does not say yet which layers are recomputed.
    return kind_of(leaf.cut.run, leaf.choice.family, leaf.way)._replace(recompute=leaf.cut.arrangement.kept)


def admits(limits: Limits, node: Node) -> bool:
    """Whether there may be something below the node that the limits allow."""
    if not limits.names:
        return True
    if isinstance(node, Settled):
        return admits(limits, node.leaf) and limits.allows(shards=node.candidate.run.shard)
    if isinstance(node, Leaf):
        is_shared = any(limits.allows(shards=level) for level in node.sharding.levels) and limits.allows(ways=node.way)
        return is_shared and limits.allows(families=node.choice.family) and admits(limits, node.cut)
    if isinstance(node, Cut):
        return limits.allows(loops=node.run.loops) and admits(limits, node.arrangement)
    run = node.run
    axes = limits.allows(tp=run.tp, pp=run.pp, dp=run.dp, micro_batch=run.micro_batch)
    return axes and limits.allows(sequence_parallel=run.sequence_parallel) and _keeps(limits, node)


def _keeps(limits: Limits, node: Arrangement) -> bool:
    """Whether what is recomputed is allowed; some of the layers are where both nothing and all are."""
    if limits.recompute is None:
        return True
    return {"none", "full"} <= set(limits.recompute) if node.kept == "some" else node.kept in limits.recompute
