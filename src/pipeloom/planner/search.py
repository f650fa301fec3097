"""The fastest layouts of a question: a best-first search whose bounds rule out most of them, and the simulator decides.

What is open lies in a queue by its bound. The first is opened, or simulated if it is a single layout. Once the best
ones that were simulated are faster than the first bound in the queue, nothing that is left can be among them: the
answer is that of simulating everything (``tests/planner/test_search.py``). What one goal leaves open, the next one goes
on with.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, nsmallest
from typing import Literal, NamedTuple

from pipeloom.cost.shape import Run
from pipeloom.layout import Way
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.settle import cut_again, settle, settled_bound_s, unsent_bound_s
from pipeloom.planner.slice_ways import Sliced, cut_by_programme, sliceable
from pipeloom.planner.space import Arrangement, Cut, Leaf, arrangements
from pipeloom.planner.swap_ways import Swapped, swappable
from pipeloom.planner.ways import Relief, reliefs
from pipeloom.predict.step import SimulatedStep

Progress = Callable[[int, int], None]
"""Told how many layouts are decided, of how many."""


@dataclass
class Counts:
    """What became of the layouts of a question.

    Attributes:
        layouts: in all.
        too_large: ruled out since they need more memory than a device has, or fit with less recomputed.
        too_slow: ruled out by the bound of their step time.
        undecided: left open when the time was up.
        simulated: whose step was simulated.
        tried: of all these, those that were tried with room made for them, or with token slices.
        excluded: what is no layout, by cause: combinations of axes.
        seconds: that the search took.
    """

    layouts: int = 0
    too_large: int = 0
    too_slow: int = 0
    simulated: int = 0
    tried: int = 0
    undecided: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        steps: the best layouts, the fastest first.
        counts: what became of the others.
        open_bound_s: where the time was up: no layout is faster than this; ``None`` if the answer is proved.
    """

    steps: tuple[SimulatedStep, ...]
    counts: Counts
    open_bound_s: float | None = None

    @property
    def best(self) -> SimulatedStep | None:
        """The fastest."""
        return self.steps[0] if self.steps else None


class Kind(NamedTuple):
    """What tells layouts of an answer apart: of those that agree in it, only the best one is told."""

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
    recompute = "some" if run.recompute_layers else run.recompute
    return Kind(run.tp, run.pp, run.dp, run.micro_batch, family, recompute, run.sequence_parallel, way)


def way_of(step: SimulatedStep) -> Way | Literal["none"]:
    """In which way a step makes room, or cuts sequences."""
    order = step.order
    if order.choice.keep is not None:
        return "keep"
    if order.choice.num_slices > 1:
        return "slices"
    if order.swapping is not None:
        return "swap"
    return "balance" if order.moving.balance else "offload" if order.moving.offload else "none"


MOST_TRIED = 4
"""Layouts that are tried with each way to make room."""
MOST_OF_A_KIND = 2
"""Of those, layouts that differ only in what does not tell kinds apart."""


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
        step_s, held = (
            float(f"{value:.9g}") for value in (step.prediction.step_time_s, step.prediction.memory.total_bytes)
        )
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
        return self.candidate.simulate(self.leaf.cut.arrangement.cluster)


Node = Arrangement | Cut | Leaf | Settled
Attempt = Relief | Sliced | Swapped
"""What no bound tells, and what is tried with the best that bounds leave."""


def search(question: Question, count: int = 10, *, budget_s: float | None = None, prunes: bool = True) -> Found:
    """The best layouts of a question.

    Args:
        question: what is asked.
        count: how many.
        budget_s: seconds after which it ends with what it has; ``None`` goes on to the proof.
        prunes: whether bounds rule layouts out; ``False`` simulates all of them, for tests.
    """
    return Search(question, prunes=prunes).best(count, budget_s=budget_s)


class Search:
    """A question's layouts, as far as they are decided.

    Args:
        question: what is asked.
        prunes: whether bounds rule layouts out.
        progress: is told now and then.
    """

    def __init__(self, question: Question, *, prunes: bool = True, progress: Progress | None = None) -> None:
        self._question, self._prunes, self._progress = question, prunes, progress
        self._counts = Counts()
        self._queue: list[_Entry] = []
        self._pushed = 0
        self._simulated: list[tuple[Rank, Settled]] = []
        self._short: list[Leaf] = []
        self._tried: set[Leaf] = set()
        found, self._counts.excluded = arrangements(question)
        self._counts.layouts = sum(arrangement.count for arrangement in found)
        everything = _Goal(1, Limits())
        for arrangement in found:
            self._push(everything, arrangement.bound_s, arrangement, arrangement.missing_bytes)
        self._queue = everything.queue
        self._arrangements = found

    def has(self, limits: Limits) -> bool:
        """Whether there is any layout that limits allow, whether it fits or not."""
        return any(_admits(limits, arrangement) for arrangement in self._arrangements)

    def best(self, count: int = 1, limits: Limits | None = None, *, budget_s: float | None = None) -> Found:
        """The best layouts, each of another kind; without a way, where those that limits allow lead to none.

        Args:
            count: how many.
            limits: what they may be; ``None`` for all.
            budget_s: seconds after which it ends with what it has; ``None`` goes on to the proof.
        """
        begin, limits = time.monotonic(), limits or Limits()
        deadline = None if budget_s is None else begin + budget_s
        ways = limits.ways or self._question.limits.ways
        has_plain = ways is None or "none" in ways
        goal = self._goal(count, replace(limits, ways=ways if has_plain else None))
        goal.is_urgent = deadline is not None
        open_bound_s = self._prove(goal, deadline)
        if open_bound_s is None and (limits.ways is not None or not limits.names):
            asked = goal if has_plain else self._goal(count, replace(limits, ways=ways))
            self._go_further(asked, deadline)
            goal = asked if asked.best else goal  # plain layouts, where no way helps or none is needed
        counts = self._counts
        counts.seconds += time.monotonic() - begin
        left = counts.layouts - counts.too_large - counts.simulated
        counts.undecided = (
            0
            if open_bound_s is None
            else sum(entry.node.count for entry in self._queue if entry.bound_s <= goal.limit_s)
        )
        counts.too_slow = left - counts.undecided
        steps = sorted((_finished(settled) for settled in goal.best), key=Rank.of)
        return Found(tuple(steps), counts, open_bound_s)

    def _goal(self, count: int, limits: Limits) -> "_Goal":
        """With what is known of it already."""
        goal = _Goal(count, limits)
        for rank, settled in self._simulated:
            goal.add(rank, settled)
        return goal

    def _prove(self, goal: "_Goal", deadline: float | None) -> float | None:
        """Open what may be among the best, until nothing can be; the bound of the rest if the time is up before."""
        for entry in self._queue:
            goal.take(entry)
        open_bound_s = None
        while goal.queue:
            entry = heappop(goal.queue)
            if _is_over(deadline) or (self._prunes and entry.bound_s > goal.limit_s):
                goal.aside.append(entry)
                open_bound_s = entry.bound_s if entry.bound_s <= goal.limit_s else None
                break
            if self._prunes and goal.beats(entry.node, entry.bound_s):
                goal.aside.append(entry)
            else:
                self._open(goal, entry)
            if self._progress is not None:
                self._progress(self._counts.too_large + self._counts.simulated, self._counts.layouts)
        self._queue = goal.aside + goal.queue
        return open_bound_s

    def _push(self, goal: "_Goal", bound_s: float, node: Node, missing_bytes: float = 0.0) -> None:
        """Keep it open, unless it cannot fit."""
        if self._prunes and missing_bytes > 0:
            self._counts.too_large += node.count
        else:
            self._pushed += 1
            goal.take(_Entry(bound_s, self._pushed, node))

    def _open(self, goal: "_Goal", entry: "_Entry") -> None:
        node = entry.node
        if isinstance(node, Arrangement):
            for cut in node.cuts():
                self._push(goal, cut.bound_s, cut, cut.missing_bytes)
        elif isinstance(node, Cut):
            for leaf in node.leaves():
                narrowed = leaf.narrowed() if self._prunes else leaf
                if narrowed is None:
                    self._counts.too_large += 1
                    self._short.append(leaf)
                else:
                    self._push(goal, narrowed.bound_s, narrowed)
        elif isinstance(node, Leaf):
            chosen = settle(node)
            if chosen is None:
                self._counts.too_large += 1
                self._short.append(node)
            else:
                self._push(goal, max(entry.bound_s, settled_bound_s(node, chosen)), Settled(node, chosen))
        else:
            self._simulate(goal, entry.bound_s, node)

    def _simulate(self, goal: "_Goal", bound_s: float, settled: Settled) -> None:
        """Bounded once more first, by its order, which takes less than to add its messages and simulate it."""
        if self._prunes and not settled.is_close:
            closer_s = max(bound_s, unsent_bound_s(settled.leaf, settled.candidate))
            if goal.limit_s < float("inf") or not goal.is_urgent:
                self._push(goal, closer_s, replace(settled, is_close=True))
                return
        self._counts.simulated += 1
        rank = Rank.of(settled.simulate())
        self._simulated.append((rank, settled))
        goal.add(rank, settled)

    def _go_further(self, goal: "_Goal", deadline: float | None) -> None:
        """Try what was too large with every way to make room, and what has few micro-batches with token slices."""
        for way in self._question.ways:
            if goal.allows(way):
                self._attempt(goal, self._attempts(goal, way), deadline)

    def _attempts(self, goal: "_Goal", way: Way) -> Iterator[Attempt]:
        if way in ("slices", "swap"):
            found = (a for a in self._arrangements if goal.may_be(a))
            cut = swappable(found) if way == "swap" else sliceable(found, goal.first_s)
            return (one for one in cut if goal.may_be(one.leaf))
        return (one for leaf in self._short if goal.may_be(leaf) for one in reliefs(leaf, way))

    def _attempt(self, goal: "_Goal", attempts: Iterator[Attempt], deadline: float | None) -> None:
        """Try those that promise most, until nothing promises to be the best."""
        first_s = goal.first_s
        promising = [one for one in attempts if one.estimate_s <= first_s]
        tried, of_kind = 0, Counter[Kind]()
        for one in sorted(promising, key=lambda one: one.estimate_s):
            if _is_over(deadline) or tried == MOST_TRIED or one.estimate_s > goal.first_s:
                return
            kind = _kind(one.leaf)
            if of_kind[kind] < MOST_OF_A_KIND:
                tried += 1
                of_kind[kind] += 1
                self._try(goal, one)

    def _try(self, goal: "_Goal", attempt: Attempt) -> None:
        if attempt.leaf in self._tried:
            return
        self._tried.add(attempt.leaf)
        self._counts.tried += 1
        candidate = attempt.settle()
        if candidate is not None:
            settled = Settled(attempt.leaf, candidate)
            rank = Rank.of(settled.simulate())
            self._simulated.append((rank, settled))
            goal.add(rank, settled)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


class _Entry(NamedTuple):
    """Something open: its bound, a number that settles ties, and what it is."""

    bound_s: float
    number: int
    node: Node


class _Goal:
    """What is looked for: the best layouts that limits allow, one of each kind."""

    def __init__(self, count: int, limits: Limits) -> None:
        self._count, self._limits = count, limits
        self._plain_limits = replace(limits, ways=None)
        self._of_kind: dict[Kind, tuple[Rank, Settled]] = {}
        self.limit_s = float("inf")
        """What is slower than this is not among the best."""
        self.is_urgent = False
        """Whether any answer soon is worth more than simulating few."""
        self.queue: list[_Entry] = []
        """What is open and allowed."""
        self.aside: list[_Entry] = []
        """What is open for other goals."""

    def take(self, entry: _Entry) -> None:
        """Something open: to be looked at if it is allowed."""
        if _admits(self._limits, entry.node):
            heappush(self.queue, entry)
        else:
            self.aside.append(entry)

    def add(self, rank: Rank, settled: Settled) -> None:
        """Something that was simulated: kept if it is allowed, and the best of its kind."""
        if not _admits(self._limits, settled):
            return
        kind = _kind(settled.leaf)
        known = self._of_kind.get(kind)
        if known is None or rank < known[0]:
            self._of_kind[kind] = rank, settled
            if len(self._of_kind) >= self._count:
                slowest_s = nsmallest(self._count, (rank.step_s for rank, _ in self._of_kind.values()))[-1]
                self.limit_s = slowest_s * (1 + SAME)

    def allows(self, way: str) -> bool:
        """Whether layouts of a way are looked for."""
        return self._limits.allows(ways=way)

    def may_be(self, node: Arrangement | Leaf) -> bool:
        """Whether something is allowed, whatever way it is left open."""
        return _admits(self._plain_limits, node)

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
        if isinstance(node, Arrangement | Cut):
            return False
        known = self._of_kind.get(_kind(node.leaf if isinstance(node, Settled) else node))
        return known is not None and bound_s > known[0].step_s * (1 + SAME)


def _finished(settled: Settled) -> SimulatedStep:
    """The step of one of the best; with stages cut by what layers recompute, or slices of other lengths, if faster."""
    step, again = settled.simulate(), cut_again(settled.leaf, settled.candidate)
    others = [] if again is None else [replace(settled, candidate=again).simulate()]
    if settled.leaf.way == "slices" and (other := cut_by_programme(settled.leaf, settled.candidate)) is not None:
        others.append(other)
    return min(step, *others, key=Rank.of) if others else step


def _kind(leaf: Leaf) -> Kind:
    """The kind of a layout that may not be decided yet."""
    return kind_of(leaf.cut.run, leaf.choice.family, leaf.way)._replace(recompute=leaf.cut.arrangement.kept)


def _admits(limits: Limits, node: Node) -> bool:
    """Whether there may be something below the node that the limits allow."""
    if not limits.names:
        return True
    if isinstance(node, Settled):
        return _admits(limits, node.leaf) and limits.allows(shards=node.candidate.run.shard)
    if isinstance(node, Leaf):
        is_shared = any(limits.allows(shards=level) for level in node.sharding.levels) and limits.allows(ways=node.way)
        return is_shared and limits.allows(families=node.choice.family) and _admits(limits, node.cut)
    if isinstance(node, Cut):
        return limits.allows(loops=node.run.loops) and _admits(limits, node.arrangement)
    run = node.run
    axes = limits.allows(tp=run.tp, pp=run.pp, dp=run.dp, micro_batch=run.micro_batch)
    return axes and limits.allows(sequence_parallel=run.sequence_parallel) and _keeps(limits, node)


def _keeps(limits: Limits, node: Arrangement) -> bool:
    """Whether what is recomputed is allowed; some of the layers are where both nothing and all are."""
    if limits.recompute is None:
        return True
    return {"none", "full"} <= set(limits.recompute) if node.kept == "some" else node.kept in limits.recompute
