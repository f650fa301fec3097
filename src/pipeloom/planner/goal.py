"""What a search looks for: the best layouts, one of a kind, and what may still be among them."""

from dataclasses import replace
from heapq import heappush, nsmallest
from typing import NamedTuple

from pipeloom.planner.question import Limits
from pipeloom.planner.settle import Candidate
from pipeloom.planner.space import Arrangement, Cut, Leaf
from pipeloom.predict.step import SimulatedStep

SAME = 1e-8
"""Relative difference of two step times that is rounding."""


class LayoutKind(NamedTuple):
    """Key under which layouts are grouped; an answer lists the best of each group."""

    tp: int
    pp: int
    dp: int
    micro_batch: int
    family: str
    recompute: str
    sequence_parallel: bool
    way: str

    @classmethod
    def of(cls, leaf: Leaf) -> "LayoutKind":
        """The kind of a layout; how often stages loop, how the schedule groups and what is sharded do not matter."""
        run = leaf.cut.run
        # Without a pipeline the order of accumulation does not matter, either.
        family = leaf.choice.family if run.pp > 1 else ""
        # Which layers recompute is found by memory alone, so two such layouts differ in nothing that anybody chose.
        kept = leaf.cut.arrangement.kept
        return cls(run.tp, run.pp, run.dp, run.micro_batch, family, kept, run.sequence_parallel, leaf.way)


class Merit(NamedTuple):
    """What comes first in an answer: the faster, then the smaller, then what loops less; then anything unique."""

    step_s: float
    held_bytes: float
    loops: int
    layout: str

    @classmethod
    def of(cls, step: SimulatedStep) -> "Merit":
        """The merit of a step; what differs by rounding is the same."""
        # Sums in another order differ in their last digits: unrounded, that would decide in place of the memory.
        step_s, held = (
            float(f"{value:.9g}") for value in (step.prediction.step_time_s, step.prediction.memory.total_bytes)
        )
        # The text settles what is left, so that the answer does not depend
        # on the order in which layouts were simulated.
        return cls(step_s, held, step.run.loops, repr((step.run, step.knobs)))


Node = Arrangement | Cut | Leaf | Candidate


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
        self._of_kind: dict[LayoutKind, tuple[Merit, Candidate]] = {}
        self._steps: dict[LayoutKind, tuple[Candidate, SimulatedStep]] = {}
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

    def add(self, merit: Merit, chosen: Candidate, step: SimulatedStep | None = None) -> None:
        """Something that was simulated: kept if it is allowed, and the best of its kind; its step if it is among the
        best.
        """
        if not admits(self._limits, chosen):
            return
        kind = LayoutKind.of(chosen.leaf)
        if kind in self._of_kind and merit >= self._of_kind[kind][0]:
            return
        self._of_kind[kind] = merit, chosen
        if len(self._of_kind) >= self._count:
            # Kinds that were overtaken stay known, so the last of the best is not the slowest that is known.
            slowest_s = nsmallest(self._count, (merit.step_s for merit, _ in self._of_kind.values()))[-1]
            # What is as fast but for rounding may still win by its memory.
            self.limit_s = slowest_s * (1 + SAME)
        if step is not None:
            self._steps[kind] = chosen, step
            # A step holds the times of all its actions: those of layouts that
            # are no longer among the best are let go.
            best = {LayoutKind.of(one.leaf) for one in self.best}
            self._steps = {kind: kept for kind, kept in self._steps.items() if kind in best}

    def step_of(self, chosen: Candidate) -> SimulatedStep | None:
        """The step of one of the best, if it is kept."""
        known, step = self._steps.get(LayoutKind.of(chosen.leaf), (None, None))
        return step if known is chosen else None

    def allows(self, way: str) -> bool:
        """Whether layouts of a way are looked for."""
        return self._limits.allows(ways=way)

    def may_be(self, node: Arrangement | Leaf) -> bool:
        """Whether something is allowed, whatever way it is left open."""
        return admits(self._plain_limits, node)

    @property
    def first_s(self) -> float:
        """Seconds of the fastest that is known."""
        return min((merit.step_s for merit, _ in self._of_kind.values()), default=float("inf"))

    @property
    def best(self) -> list[Candidate]:
        """The fastest first; of equals the one with more memory left."""
        ranked = sorted(self._of_kind.values(), key=lambda one: one[0])
        return [chosen for _, chosen in ranked[: self._count]]

    def beats(self, node: Node, bound_s: float) -> bool:
        """Whether something that takes at least that long cannot be the best of its kind."""
        # Layouts of several kinds are below these.
        if isinstance(node, Arrangement | Cut):
            return False
        known = self._of_kind.get(LayoutKind.of(node.leaf if isinstance(node, Candidate) else node))
        return known is not None and bound_s > known[0].step_s * (1 + SAME)


def admits(limits: Limits, node: Node) -> bool:
    """Whether there may be something below the node that the limits allow."""
    if not limits.names:
        return True
    if isinstance(node, Candidate):
        return admits(limits, node.leaf) and limits.allows(shards=node.run.shard)
    if isinstance(node, Leaf):
        is_shared = any(limits.allows(shards=level) for level in node.sharding.levels)
        return is_shared and limits.allows(ways=node.way, families=node.choice.family) and admits(limits, node.cut)
    run = node.run
    if isinstance(node, Cut):
        return limits.allows(loops=run.loops) and admits(limits, node.arrangement)
    # Some of the layers are recomputed where both nothing and all are allowed.
    recompute = ("none", "full") if node.kept == "some" else (node.kept,)
    return all(limits.allows(recompute=kind) for kind in recompute) and limits.allows(
        tp=run.tp, pp=run.pp, dp=run.dp, micro_batch=run.micro_batch, sequence_parallel=run.sequence_parallel
    )
