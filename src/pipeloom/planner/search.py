"""The fastest layouts of a question: a best-first search whose bounds rule out most of them, and the simulator decides.

What is open lies in a queue by its bound. The first is opened, or simulated if it is a single layout. Once the best
ones that were simulated are faster than the first bound in the queue, nothing that is left can be among them: the
answer is that of simulating everything (``tests/planner/test_search.py``). What one goal leaves open, the next one goes
on with.

For whoever has little time, a dive comes before: one layout of each arrangement that is likely to be good.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop
from math import inf

from pipeloom.planner.goal import Entry, Goal, LayoutKind, Merit, Node, admits
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.settle import Candidate, cut_again, settle
from pipeloom.planner.space import Arrangement, Cut, Leaf, each_arrangement
from pipeloom.planner.strategies import STRATEGIES, Left
from pipeloom.predict.step import SimulatedStep

Progress = Callable[[int, int], object]
"""Callback ``(done, total)``, in layouts, or what else takes its time."""


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
"""Of those, layouts that differ only in what does not distinguish kinds."""
MANY = 200_000
"""Layouts from which on a first answer comes before the proof, for whoever does not wait for that."""
FINDING = 0.3
"""Part of a time limit after which arrangements that are not found yet wait until there is an answer."""
DIVING = 0.3
"""Part of a time limit in which layouts are simulated before bounds have ruled out others."""
MOST_ON_RANKS = 2000
"""Micro-batches times pipeline ranks of what a dive looks at first: longer schedules take seconds to make."""
MOST_ON_STAGES = 4000
"""The same with stages in place of ranks, of a cut."""
ALONE = 24
"""Promising arrangements that a dive looks at before the first lean one."""
MOST_SETTLED = 4
"""Leaves of an arrangement that a dive settles, which takes as long as making their schedules."""
_OFTEN = 256
"""Arrangements between two reports of progress."""


def search(question: Question, count: int = 10, *, deadline: float = inf, prunes: bool = True) -> Found:
    """The best layouts of a question.

    Args:
        question: to answer.
        count: how many.
        deadline: on ``time.monotonic``, when it ends with what it has; infinity goes on to the proof.
        prunes: whether bounds rule layouts out; ``False`` simulates all of them, for tests.
    """
    return Search(question, prunes=prunes).best(count, deadline=deadline)


def is_over(deadline: float) -> bool:
    """Whether it is later than that."""
    return time.monotonic() > deadline


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
        self._simulated: list[tuple[Merit, Candidate]] = []
        self._short: list[Leaf] = []
        self._tried: set[Leaf] = set()
        self._arrangements: list[Arrangement] = []
        self._coming = each_arrangement(question, self._counts.excluded)
        self._is_whole = False
        self._goal_now, self._opening, self._is_proving = Goal(1, Limits()), list[Entry](), False
        self._begin = time.monotonic()

    def _enumerate(self, deadline: float = inf) -> None:
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
                if is_over(deadline):
                    return
        self._is_whole = True

    def _report(self, decided: int) -> None:
        if self._progress is not None:
            self._progress(decided, self._counts.layouts)

    def has(self, limits: Limits) -> bool:
        """Whether there is any layout that limits allow, whether it fits or not."""
        return any(admits(limits, arrangement) for arrangement in self._arrangements)

    def best(self, count: int = 1, limits: Limits | None = None, *, deadline: float = inf) -> Found:
        """The best layouts, each of another kind; without a way, where those that limits allow lead to none.

        The first call finds the arrangements, which may take seconds.

        Args:
            count: how many.
            limits: what they may be; ``None`` for all.
            deadline: on ``time.monotonic``, when it ends with what it has; infinity goes on to the proof.
        """
        begin, limits = time.monotonic(), limits or Limits()
        left_s, is_first = deadline - begin, not self._is_whole
        self._enumerate(begin + FINDING * left_s)
        ways = limits.ways or self._question.limits.ways
        # Where only ways are asked for, plain layouts are searched all the same: what is too large is only then known.
        has_plain = ways is None or "none" in ways
        goal = self._goal(count, replace(limits, ways=ways if has_plain else None))
        goal.is_urgent = deadline < inf
        self._goal_now = goal
        if is_first and self._prunes and (goal.is_urgent or self._counts.layouts > MANY):
            self._dive(goal, begin + (FINDING + DIVING) * left_s)
        self._enumerate()
        open_bound_s = self._prove(goal, deadline)
        if open_bound_s is None and (limits.ways is not None or not limits.names):
            asked = goal if has_plain else self._goal(count, replace(limits, ways=ways))
            self._go_further(asked, deadline)
            goal = asked if asked.best else goal  # plain layouts, where no way helps or none is needed
        self._counts.seconds += time.monotonic() - begin
        self._count(goal, open_bound_s)
        steps = sorted((_finished(chosen, goal.step_of(chosen)) for chosen in goal.best), key=Merit.of)
        return Found(tuple(steps), self._counts, open_bound_s)

    def so_far(self) -> Found:
        """The best layouts of a search that was ended in the middle of ``best``; nothing is simulated for it."""
        goal, counts = self._goal_now, self._counts
        counts.seconds = time.monotonic() - self._begin
        steps = sorted((step for chosen in goal.best if (step := goal.step_of(chosen))), key=Merit.of)
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

    def _dive(self, goal: Goal, deadline: float) -> None:
        """Simulate one layout of each of some arrangements, so that there is an answer before bounds rule much out.

        With a deadline until then, else only until there is an answer.
        """
        nodes = [entry.node for entry in self._queue if isinstance(entry.node, Arrangement)]
        for arrangement in _likely(nodes, goal):
            if is_over(deadline) or (goal.best and not goal.is_urgent):
                return
            chosen = _first_of(arrangement, goal.limit_s)
            if chosen is not None:
                self._add(goal, chosen)
            self._report(self._counts.too_large)

    def _add(self, goal: Goal, chosen: Candidate) -> None:
        step = chosen.simulate()
        merit = Merit.of(step)
        self._simulated.append((merit, chosen))
        goal.add(merit, chosen, step)

    def _goal(self, count: int, limits: Limits) -> Goal:
        """With what is known of it already."""
        goal = Goal(count, limits)
        for merit, chosen in self._simulated:
            goal.add(merit, chosen)
        return goal

    def _prove(self, goal: Goal, deadline: float) -> float | None:
        """Open what may be among the best, until nothing can be; the bound of the rest if the time is up before."""
        for entry in self._queue:
            goal.take(entry)
        open_bound_s, self._is_proving = None, True
        while goal.queue:
            entry = heappop(goal.queue)
            # An interrupt may come while the entry is in no queue; ``so_far`` counts it as open.
            self._opening = [entry]
            if is_over(deadline) or (self._prunes and entry.bound_s > goal.limit_s):
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
            for cut in node.cuts:
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
                self._push(goal, max(entry.bound_s, chosen.bound_s), chosen)
        else:
            self._simulate(goal, entry.bound_s, node)

    def _simulate(self, goal: Goal, bound_s: float, chosen: Candidate) -> None:
        """Bounded once more first, by its order, which takes less than to add its messages and simulate it."""
        if self._prunes and not chosen.is_close:
            closer_s = max(bound_s, chosen.unsent_s)
            # While an urgent goal has no answer, the closer bound could only delay one.
            if goal.limit_s < inf or not goal.is_urgent:
                self._push(goal, closer_s, replace(chosen, is_close=True))
                return
        self._add(goal, chosen)
        self._counts.simulated += 1

    def _go_further(self, goal: Goal, deadline: float) -> None:
        """Try every way, such as to make room for what was too large."""
        for way in self._question.ways:
            if goal.allows(way):
                self._attempt(goal, way, deadline)

    def _attempt(self, goal: Goal, way: str, deadline: float) -> None:
        """Try the layouts that promise most, until nothing promises to be the best."""
        strategy, first_s = STRATEGIES[way], goal.first_s
        arrangements = (one for one in self._arrangements if goal.may_be(one))
        left = Left(arrangements, [leaf for leaf in self._short if goal.may_be(leaf)], first_s)
        leaves = (replace(leaf, way=way) for leaf in strategy.applies(left) if goal.may_be(leaf))
        estimates = ((strategy.estimate(leaf), leaf) for leaf in leaves)
        promising = [one for one in estimates if one[0] <= first_s]
        of_kind = Counter[LayoutKind]()
        for estimate_s, leaf in sorted(promising, key=lambda one: one[0]):
            if is_over(deadline) or of_kind.total() == MOST_TRIED or estimate_s > goal.first_s:
                return
            kind = LayoutKind.of(leaf)
            if of_kind[kind] == MOST_OF_A_KIND:
                continue
            of_kind[kind] += 1
            if leaf not in self._tried:
                self._tried.add(leaf)
                self._counts.tried += 1
                if (chosen := strategy.build(leaf)) is not None:
                    self._add(goal, chosen)


def _finished(chosen: Candidate, known: SimulatedStep | None) -> SimulatedStep:
    """The step of one of the best; with stages cut by what layers recompute, or slices of other lengths, if faster."""
    steps, again = [known or chosen.simulate()], cut_again(chosen)
    if again is not None:
        steps.append(again.simulate())
    if chosen.leaf.way != "none":
        steps += STRATEGIES[chosen.leaf.way].refine(chosen)
    return min(steps, key=Merit.of) if len(steps) > 1 else steps[0]


def _likely(arrangements: Sequence[Arrangement], goal: Goal) -> Iterator[Arrangement]:
    """Arrangements in an order in which an answer is found soon, and good ones after it.

    Those with short schedules first, the most promising before the others. Where none of the first fits, each is
    followed by one that needs little memory, until one fits.
    """
    short = sorted((one for one in arrangements if _on_ranks(one) <= MOST_ON_RANKS), key=_estimate_s)
    # What fits with some layers recomputed fits with all of them, too, which needs less.
    lean = iter(sorted((one for one in short if one.kept != "some"), key=lambda one: one.missing_bytes))
    for number, one in enumerate(short):
        yield one
        # What promises most recomputes and shares least, so where memory is short none of the first many may fit.
        small = None if goal.best or number < ALONE else next(lean, None)
        if small is not None:
            yield small
    yield from sorted((one for one in arrangements if _on_ranks(one) > MOST_ON_RANKS), key=_on_ranks)


def _estimate_s(arrangement: Arrangement) -> float:
    """Seconds of the step, about: the bound, which has no bubble, with that of as many loops as there may be."""
    run = arrangement.run
    loops = max(1, run.shape.layers // run.pp)
    # The bubble of the interleaved schedule: (P - 1) / (M V) of the ideal time (arXiv 2104.04473, section 2.2).
    return arrangement.bound_s * (1 + (run.pp - 1) / (run.num_microbatches * loops))


def _on_ranks(arrangement: Arrangement) -> int:
    return arrangement.run.num_microbatches * arrangement.run.pp


def _is_short(cut: Cut) -> bool:
    """Whether its schedules are made soon; where none is, the cut with the fewest stages counts as such."""
    run = cut.run
    return run.num_microbatches * run.num_stages <= MOST_ON_STAGES or run.loops == 1


def _first_of(arrangement: Arrangement, limit_s: float) -> Candidate | None:
    """The first of an arrangement's leaves, in the order of their bounds, that fits; ``None`` if none of a few does.

    Args:
        arrangement: what is looked at.
        limit_s: seconds of a step that are too many.
    """
    leaves = [
        narrowed
        for cut in arrangement.cuts
        # Cheap questions first: leaves are many, and each has bounds of its own to compute.
        if _is_short(cut) and cut.bound_s <= limit_s and cut.missing_bytes <= 0
        for leaf in cut.leaves()
        if (narrowed := leaf.narrowed()) is not None
    ]
    # The first that fits is taken: by their bounds the others promise less, and the proof looks at them.
    promising = sorted(leaves, key=lambda leaf: leaf.bound_s)[:MOST_SETTLED]
    settled = (settle(leaf) for leaf in promising if leaf.bound_s <= limit_s)
    return next((chosen for chosen in settled if chosen is not None), None)
