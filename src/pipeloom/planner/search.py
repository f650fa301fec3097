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
from heapq import heappop

from pipeloom.planner.dive import first_of, likely
from pipeloom.planner.goal import Entry, Goal, Kind, Node, Rank, Settled, admits, settled_kind
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.settle import cut_again, settle, settled_bound_s, unsent_bound_s
from pipeloom.planner.space import Arrangement, Cut, Leaf, each_arrangement
from pipeloom.planner.strategies import STRATEGIES, Attempt, Left
from pipeloom.predict.step import SimulatedStep

Progress = Callable[[int, int], None]
"""Callback ``(decided, total)``, in layouts."""


@dataclass
class Counts:
    """Statistics of a search.

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
        counts: statistics of the search.
        open_bound_s: where the time was up: no layout is faster than this; ``None`` if the answer is proved.
    """

    steps: tuple[SimulatedStep, ...]
    counts: Counts
    open_bound_s: float | None = None

    @property
    def best(self) -> SimulatedStep | None:
        """The fastest."""
        return self.steps[0] if self.steps else None


MOST_TRIED = 4
"""Layouts that are tried with each way to make room."""
MOST_OF_A_KIND = 2
"""Of those, layouts that differ only in what does not tell kinds apart."""


MANY = 200_000
"""Layouts from which on a first answer comes before the proof, for whoever does not wait for that."""
FINDING = 0.3
"""Part of a time limit after which arrangements that are not found yet wait until there is an answer."""
DIVING = 0.3
"""Part of a time limit in which layouts are simulated before bounds have ruled out others."""
_OFTEN = 256
"""Arrangements between two reports of progress."""


def search(question: Question, count: int = 10, *, budget_s: float | None = None, prunes: bool = True) -> Found:
    """The best layouts of a question.

    Args:
        question: to answer.
        count: how many.
        budget_s: seconds after which it ends with what it has; ``None`` goes on to the proof.
        prunes: whether bounds rule layouts out; ``False`` simulates all of them, for tests.
    """
    return Search(question, prunes=prunes).best(count, budget_s=budget_s)


class Search:
    """A question's layouts, as far as they are decided.

    Args:
        question: to answer.
        prunes: whether bounds rule layouts out.
        progress: called now and then.
    """

    def __init__(self, question: Question, *, prunes: bool = True, progress: Progress | None = None) -> None:
        self._question, self._prunes, self._progress = question, prunes, progress
        self._counts = Counts()
        self._queue: list[Entry] = []
        self._pushed = 0
        self._simulated: list[tuple[Rank, Settled]] = []
        self._short: list[Leaf] = []
        self._tried: set[Leaf] = set()
        self._arrangements: list[Arrangement] = []
        self._coming = each_arrangement(question, self._counts.excluded)
        self._is_whole = False
        self._goal_now, self._opening, self._is_proving = Goal(1, Limits()), list[Entry](), False
        self._begin = time.monotonic()

    @property
    def counts(self) -> Counts:
        """Statistics so far."""
        return self._counts

    def enumerate(self, deadline: float | None = None) -> None:
        """Find all arrangements, or those that are found until then, if that is not done."""
        for arrangement in self._coming:
            self._arrangements.append(arrangement)
            self._counts.layouts += arrangement.count
            # Counted and dropped at once: a large question has hundreds of thousands of layouts.
            if self._prunes and arrangement.missing_bytes > 0:
                self._counts.too_large += arrangement.count
            else:
                self._pushed += 1
                self._queue.append(Entry(arrangement.bound_s, self._pushed, arrangement))
            if len(self._arrangements) % _OFTEN == 0:
                self._report(0)
                if _is_over(deadline):
                    return
        self._is_whole = True

    def _report(self, decided: int) -> None:
        if self._progress is not None:
            self._progress(decided, self._counts.layouts)

    def has(self, limits: Limits) -> bool:
        """Whether there is any layout that limits allow, whether it fits or not."""
        return any(admits(limits, arrangement) for arrangement in self._arrangements)

    def best(self, count: int = 1, limits: Limits | None = None, *, budget_s: float | None = None) -> Found:
        """The best layouts, each of another kind; without a way, where those that limits allow lead to none.

        The first call finds the arrangements, which may take seconds.

        Args:
            count: how many.
            limits: what they may be; ``None`` for all.
            budget_s: seconds after which it ends with what it has; ``None`` goes on to the proof.
        """
        begin, limits = time.monotonic(), limits or Limits()
        deadline = None if budget_s is None else begin + budget_s
        is_first = not self._is_whole
        self.enumerate(None if budget_s is None else begin + FINDING * budget_s)
        ways = limits.ways or self._question.limits.ways
        # Where only ways are asked for, plain layouts are searched all the same: what is too large is only then known.
        has_plain = ways is None or "none" in ways
        goal = self._goal(count, replace(limits, ways=ways if has_plain else None))
        goal.is_urgent = deadline is not None
        self._goal_now = goal
        if is_first and self._prunes and (goal.is_urgent or self._counts.layouts > MANY):
            self._dive(goal, None if budget_s is None else begin + (FINDING + DIVING) * budget_s)
        self.enumerate()
        open_bound_s = self._prove(goal, deadline)
        if open_bound_s is None and (limits.ways is not None or not limits.names):
            asked = goal if has_plain else self._goal(count, replace(limits, ways=ways))
            self._go_further(asked, deadline)
            goal = asked if asked.best else goal  # plain layouts, where no way helps or none is needed
        self._counts.seconds += time.monotonic() - begin
        self._count(goal, open_bound_s)
        steps = sorted((_finished(settled, goal.step_of(settled)) for settled in goal.best), key=Rank.of)
        return Found(tuple(steps), self._counts, open_bound_s)

    def so_far(self) -> Found:
        """The best layouts of a search that was ended in the middle of ``best``; nothing is simulated for it."""
        goal, counts = self._goal_now, self._counts
        counts.seconds = time.monotonic() - self._begin
        steps = sorted((step for settled in goal.best if (step := goal.step_of(settled))), key=Rank.of)
        if not self._is_whole:
            counts.undecided = counts.layouts - counts.too_large
            return Found(tuple(steps), counts, self._question.least_s)
        if self._is_proving:
            self._queue = goal.aside + goal.queue + self._opening
        open_bound_s = min((entry.bound_s for entry in self._queue), default=None)
        self._count(goal, open_bound_s)
        return Found(tuple(steps), counts, open_bound_s)

    def _count(self, goal: Goal, open_bound_s: float | None) -> None:
        """What is left: too slow, or undecided where the search ended before."""
        counts = self._counts
        left = counts.layouts - counts.too_large - counts.simulated
        undecided = sum(entry.node.count for entry in self._queue if entry.bound_s <= goal.limit_s)
        counts.undecided = 0 if open_bound_s is None else min(left, undecided)
        counts.too_slow = left - counts.undecided

    def _dive(self, goal: Goal, deadline: float | None) -> None:
        """Simulate one layout of each of some arrangements, so that there is an answer before bounds rule much out.

        With a deadline until then, else only until there is an answer.
        """
        nodes = [entry.node for entry in self._queue if isinstance(entry.node, Arrangement)]
        for arrangement in likely(nodes, lambda: bool(goal.best)):
            if _is_over(deadline) or (deadline is None and goal.best):
                return
            chosen = first_of(arrangement, goal.limit_s)
            if chosen is not None:
                self._add(goal, Settled(*chosen))
            self._report(self._counts.too_large)

    def _add(self, goal: Goal, settled: Settled) -> None:
        step = settled.simulate()
        rank = Rank.of(step)
        self._simulated.append((rank, settled))
        goal.add(rank, settled, step)

    def _goal(self, count: int, limits: Limits) -> Goal:
        """With what is known of it already."""
        goal = Goal(count, limits)
        for rank, settled in self._simulated:
            goal.add(rank, settled)
        return goal

    def _prove(self, goal: Goal, deadline: float | None) -> float | None:
        """Open what may be among the best, until nothing can be; the bound of the rest if the time is up before."""
        for entry in self._queue:
            goal.take(entry)
        open_bound_s, self._is_proving = None, True
        while goal.queue:
            entry = heappop(goal.queue)
            # An interrupt may come while the entry is in no queue; ``so_far`` counts it as open.
            self._opening = [entry]
            if _is_over(deadline) or (self._prunes and entry.bound_s > goal.limit_s):
                goal.aside.append(entry)
                # The queue is in order of bounds: what is too slow here proves it of everything behind.
                open_bound_s = entry.bound_s if entry.bound_s <= goal.limit_s else None
                break
            if self._prunes and goal.beats(entry.node, entry.bound_s):
                goal.aside.append(entry)
            else:
                self._open(goal, entry)
            self._report(self._counts.too_large + self._counts.simulated)
        self._queue, self._opening, self._is_proving = goal.aside + goal.queue, list[Entry](), False
        return open_bound_s

    def _push(self, goal: Goal, bound_s: float, node: Node, missing_bytes: float = 0.0) -> None:
        """Keep it open, unless it cannot fit."""
        if self._prunes and missing_bytes > 0:
            self._counts.too_large += node.count
        else:
            self._pushed += 1
            goal.take(Entry(bound_s, self._pushed, node))

    def _open(self, goal: Goal, entry: Entry) -> None:
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
                # A bound never falls below that of its parent, or the queue's first would not bound the rest.
                self._push(goal, max(entry.bound_s, settled_bound_s(node, chosen)), Settled(node, chosen))
        else:
            self._simulate(goal, entry.bound_s, node)

    def _simulate(self, goal: Goal, bound_s: float, settled: Settled) -> None:
        """Bounded once more first, by its order, which takes less than to add its messages and simulate it."""
        if self._prunes and not settled.is_close:
            closer_s = max(bound_s, unsent_bound_s(settled.leaf, settled.candidate))
            # While an urgent goal has no answer, the closer bound could only delay one.
            if goal.limit_s < float("inf") or not goal.is_urgent:
                self._push(goal, closer_s, replace(settled, is_close=True))
                return
        self._add(goal, settled)
        self._counts.simulated += 1

    def _go_further(self, goal: Goal, deadline: float | None) -> None:
        """Try what was too large with every way to make room, and what has few micro-batches with token slices."""
        for way in self._question.ways:
            if goal.allows(way):
                self._attempt(goal, self._attempts(goal, way), deadline)

    def _attempts(self, goal: Goal, way: str) -> Iterator[Attempt]:
        arrangements = (one for one in self._arrangements if goal.may_be(one))
        left = Left(arrangements, [leaf for leaf in self._short if goal.may_be(leaf)], goal.first_s)
        return (one for one in STRATEGIES[way].attempts(left) if goal.may_be(one.leaf))

    def _attempt(self, goal: Goal, attempts: Iterator[Attempt], deadline: float | None) -> None:
        """Try those that promise most, until nothing promises to be the best."""
        first_s = goal.first_s
        promising = [one for one in attempts if one.estimate_s <= first_s]
        tried, of_kind = 0, Counter[Kind]()
        for one in sorted(promising, key=lambda one: one.estimate_s):
            if _is_over(deadline) or tried == MOST_TRIED or one.estimate_s > goal.first_s:
                return
            kind = settled_kind(one.leaf)
            if of_kind[kind] < MOST_OF_A_KIND:
                tried += 1
                of_kind[kind] += 1
                self._try(goal, one)

    def _try(self, goal: Goal, attempt: Attempt) -> None:
        if attempt.leaf in self._tried:
            return
        self._tried.add(attempt.leaf)
        self._counts.tried += 1
        candidate = attempt.build()
        if candidate is not None:
            self._add(goal, Settled(attempt.leaf, candidate))


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


def _finished(settled: Settled, known: SimulatedStep | None) -> SimulatedStep:
    """The step of one of the best; with stages cut by what layers recompute, or slices of other lengths, if faster."""
    step, again = known or settled.simulate(), cut_again(settled.leaf, settled.candidate)
    others = [] if again is None else [replace(settled, candidate=again).simulate()]
    if settled.leaf.way != "none":
        others += STRATEGIES[settled.leaf.way].refine(settled.candidate)
    return min(step, *others, key=Rank.of) if others else step
