"""The fastest layouts of a question: a best-first search whose bounds rule out most of them, and the simulator decides.

What is open lies in a queue by its bound. The first is opened, or simulated if it is a single layout. Once the best
ones that were simulated are faster than the first bound in the queue, nothing that is left can be among them: the
answer is that of simulating everything (``tests/planner/test_search.py``).
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from typing import NamedTuple

from pipeloom.cost.shape import Run
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.question import Question
from pipeloom.planner.settle import settle
from pipeloom.planner.space import Arrangement, Cut, Leaf, arrangements
from pipeloom.predict.step import SimulatedStep

Progress = Callable[[int, int], None]
"""Told how many layouts are decided, of how many."""


@dataclass
class Counts:
    """What became of the layouts of a question.

    Attributes:
        layouts: in all.
        too_large: ruled out since they need more memory than a device has, by a bound or once simulated.
        too_slow: ruled out by the bound of their step time.
        simulated: whose step was simulated.
        spare: that fit without what they recompute, or differ from a simulated one in nothing.
        excluded: what is no layout, by cause: combinations of axes.
        seconds: that the search took.
    """

    layouts: int = 0
    too_large: int = 0
    too_slow: int = 0
    simulated: int = 0
    spare: int = 0
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


def kind_of(run: Run, family: str) -> Kind:
    """The kind of a layout; how often stages loop, how the schedule groups and what is sharded do not matter."""
    recompute = "some" if run.recompute_layers else run.recompute
    return Kind(run.tp, run.pp, run.dp, run.micro_batch, family, recompute, run.sequence_parallel)


def leaf_kind(leaf: Leaf) -> Kind:
    """The kind of a layout that is not decided yet."""
    return kind_of(leaf.cut.run, leaf.choice.family)._replace(recompute=leaf.cut.arrangement.kept)


class Best:
    """The best layouts so far, one of each kind."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._of_kind: dict[Kind, tuple[_Rank, SimulatedStep]] = {}
        self.limit_s = float("inf")
        """What is slower than this is not among the best."""

    def add(self, step: SimulatedStep) -> None:
        """Keep it if it is the best of its kind."""
        kind, rank = kind_of(step.run, step.order.choice.family), _rank(step)
        known = self._of_kind.get(kind)
        if known is None or rank < known[0]:
            self._of_kind[kind] = rank, step
            if len(self._of_kind) >= self._count:
                self.limit_s = nsmallest(self._count, (rank.step_s for rank, _ in self._of_kind.values()))[-1]

    @property
    def steps(self) -> list[SimulatedStep]:
        """The fastest first; of equals the one with more memory left."""
        ranked = sorted(self._of_kind.values(), key=lambda one: one[0])
        return [step for _, step in ranked[: self._count]]

    def beats(self, node: "Node", bound_s: float) -> bool:
        """Whether something that takes at least that long cannot be the best of its kind."""
        if isinstance(node, Arrangement | Cut):
            return False
        leaf = node.leaf if isinstance(node, Settled) else node
        known = self._of_kind.get(leaf_kind(leaf))
        return known is not None and bound_s > known[0].step_s


@dataclass(frozen=True)
class Settled:
    """A leaf with everything decided."""

    leaf: Leaf
    candidate: Candidate
    count = 1


Node = Arrangement | Cut | Leaf | Settled


class _Rank(NamedTuple):
    """What comes first in an answer: the faster, then the smaller, then anything that is always the same."""

    step_s: float
    held_bytes: float
    layout: str


def _rank(step: SimulatedStep) -> _Rank:
    layout = repr((step.run, step.order))
    return _Rank(step.prediction.step_time_s, step.prediction.memory.total_bytes, layout)


def search(
    question: Question,
    count: int = 10,
    *,
    budget_s: float | None = None,
    progress: Progress | None = None,
    prunes: bool = True,
) -> Found:
    """The best layouts of a question.

    Args:
        question: what is asked.
        count: how many.
        budget_s: seconds after which it ends with what it has; ``None`` goes on to the proof.
        progress: is told now and then.
        prunes: whether bounds rule layouts out; ``False`` simulates all of them, for tests.
    """
    return _Search(question, count, budget_s, progress, prunes=prunes).run()


class _Search:
    def __init__(
        self,
        question: Question,
        count: int,
        budget_s: float | None,
        progress: Progress | None,
        *,
        prunes: bool,
    ) -> None:
        self._question = question
        self._best = Best(count)
        self._counts = Counts()
        self._begin = time.monotonic()
        self._budget_s, self._progress, self._prunes = budget_s, progress, prunes
        self._queue: list[tuple[float, int, Node]] = []
        self._pushed = 0

    @property
    def _room(self) -> float:
        return self._question.cluster.device.memory_bytes

    def run(self) -> Found:
        """Open what has the lowest bound until nothing open can be among the best."""
        found, self._counts.excluded = arrangements(self._question)
        self._counts.layouts = sum(arrangement.count for arrangement in found)
        for arrangement in found:
            self._push(arrangement.bound_s, arrangement, arrangement.least_bytes)
        open_bound_s = None
        while self._queue:
            bound_s, _, node = heappop(self._queue)
            if self._prunes and bound_s > self._best.limit_s:
                self._counts.too_slow += node.count + sum(other.count for _, _, other in self._queue)
                break
            if self._budget_s is not None and time.monotonic() - self._begin > self._budget_s:
                open_bound_s = bound_s
                break
            if self._prunes and self._best.beats(node, bound_s):
                self._counts.too_slow += 1
                continue
            self._open(node, bound_s)
            if self._progress is not None:
                self._progress(self._decided, self._counts.layouts)
        self._counts.seconds = time.monotonic() - self._begin
        return Found(tuple(self._best.steps), self._counts, open_bound_s)

    @property
    def _decided(self) -> int:
        counts = self._counts
        return counts.too_large + counts.too_slow + counts.simulated + counts.spare

    def _push(self, bound_s: float, node: Node, least_bytes: float) -> None:
        """Keep it open, unless a bound rules it out."""
        if self._prunes and least_bytes > self._room:
            self._counts.too_large += node.count
        elif self._prunes and bound_s > self._best.limit_s:
            self._counts.too_slow += node.count
        else:
            self._pushed += 1
            heappush(self._queue, (bound_s, self._pushed, node))

    def _open(self, node: Node, bound_s: float) -> None:
        if isinstance(node, Arrangement):
            for cut in node.cuts():
                self._push(cut.bound_s, cut, cut.least_bytes)
        elif isinstance(node, Cut):
            for sharding in node.shardings:
                for choice in node.choices:
                    self._push_leaf(Leaf(node, sharding, choice))
        elif isinstance(node, Leaf):
            self._settle(node, bound_s)
        else:
            self._simulate(node.candidate)

    def _push_leaf(self, leaf: Leaf) -> None:
        narrowed = leaf.narrowed() if self._prunes else leaf
        if narrowed is None:
            self._counts.too_large += 1
        else:
            self._push(narrowed.bound_s, narrowed, 0.0)

    def _settle(self, leaf: Leaf, bound_s: float) -> None:
        """Decide the rest of it, and with its schedule at hand bound it once more."""
        chosen = settle(leaf)
        if chosen is None:
            self._counts.too_large += 1
            return
        self._push(max(bound_s, leaf.cut.time.collectives_s(chosen.run, chosen.schedule)), Settled(leaf, chosen), 0.0)

    def _simulate(self, chosen: Candidate) -> None:
        self._counts.simulated += 1
        self._best.add(chosen.simulate(self._question.cluster))
