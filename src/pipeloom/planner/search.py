"""The fastest layouts of a question: best-first branch and bound, with the simulator as the objective.

The frontier holds open nodes in the order of their lower bounds. The first is expanded, or simulated if it is a single
layout. Once the first bound exceeds the cutoff, no open node can be in the answer, which therefore equals that of
simulating everything (``tests/planner/test_search.py``). Nodes that one query leaves open serve the next one.

With a time limit, and with very many layouts, a diving heuristic finds the first incumbents: one layout of each
arrangement with a low estimate.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf

from pipeloom.planner.candidate import Candidate, complete, exchanging_bound_s, repartitioned
from pipeloom.planner.frontier import Frontier, GroupKey, Node, NodeKey, OpenNode, SortKey, admits, key_of, prefixes
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.space import Arrangement, Cut, Leaf, Twig, each_arrangement
from pipeloom.planner.strategies import STRATEGIES, SearchState, Strategy, naming_strategy
from pipeloom.predict.step import SimulatedStep
from pipeloom.schedule.compiled import expect_much

Progress = Callable[[int, int], object]
"""Callback ``(done, total)``, in layouts or other units of work."""
Found = Callable[[SimulatedStep], object]
"""Callback with a step that is faster than all steps before."""


@dataclass
class Counts:
    """Statistics of a search.

    Attributes:
        layouts: total number of layouts.
        too_large: pruned, since they need more memory than a device has, or fit with fewer layers recomputed.
        too_slow: pruned by the lower bound of their step time.
        simulated: layouts that were simulated.
        tried: layouts that were built with a strategy, in addition.
        undecided: not searched when the time limit was reached.
        excluded: cause -> number of invalid combinations of axes.
        seconds: duration of the search.
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
class SearchResult:
    """The answer of a search.

    Attributes:
        steps: the best layouts, the fastest first.
        counts: statistics of the search.
        open_bound_s: lower bound of the step times of open layouts at the time limit; ``None`` if the search was
            complete.
        has_slower: whether layouts above the cutoff were left open.
    """

    steps: tuple[SimulatedStep, ...]
    counts: Counts
    open_bound_s: float | None = None
    has_slower: bool = False

    @property
    def best(self) -> SimulatedStep | None:
        """The fastest; ``None`` without any."""
        return self.steps[0] if self.steps else None


MOST_TRIED = 4
"""Layouts that are built with each strategy."""
MOST_OF_A_GROUP = 2
"""Of those, layouts with the same ``GroupKey``."""
MANY = 200_000
"""Number of layouts above which a dive precedes the proof even without a time limit, so that Ctrl-C has an answer."""
MUCH = 20_000
"""Number of layouts above which kernels are compiled at once; with a time limit an answer may come before that pays."""
FINDING = 0.3
"""Fraction of a time limit after which the enumeration of arrangements pauses until there is an answer."""
DIVING = 0.3
"""Fraction of a time limit for the dive."""
MOST_ON_RANKS = 2000
"""Micro-batches times pipeline ranks up to which a dive prefers arrangements: longer schedules take seconds to make."""
MOST_ON_STAGES = 4000
"""The same for cuts, with stages in place of ranks."""
BEFORE_LEAN = 24
"""Arrangements with low estimates that a dive completes before the first one that needs little memory."""
MOST_COMPLETED = 4
"""Leaves of an arrangement that a dive completes; each takes as long as making its schedule."""
_REPORT_EVERY = 256
"""Arrangements between two reports of progress."""


def search(question: Question, count: int = 10, *, deadline: float = inf, prunes: bool = True) -> SearchResult:
    """The best layouts of a question.

    Args:
        question: to answer.
        count: number of layouts.
        deadline: on ``time.monotonic``, at which the search returns the best so far; infinite: no limit.
        prunes: whether bounds prune; ``False`` simulates all layouts, for tests.
    """
    return Search(question, prunes=prunes).best(count, deadline=deadline)


def is_over(deadline: float) -> bool:
    """Whether the deadline has passed."""
    return time.monotonic() > deadline


class Search:
    """Branch and bound over the layouts of a question, for several queries one after the other.

    Args:
        question: to answer.
        prunes: whether bounds prune.
        progress: callback ``(decided, total)``, in layouts.
        found: callback with each step that is faster than all before.
    """

    def __init__(
        self,
        question: Question,
        *,
        prunes: bool = True,
        progress: Progress | None = None,
        found: Found | None = None,
    ) -> None:
        self._question, self._prunes, self._progress, self._found = question, prunes, progress, found
        self._counts = Counts()
        self._queue: list[OpenNode] = []
        self._pushed = 0
        self._simulated: list[tuple[SortKey, Candidate]] = []
        self._early: set[NodeKey] = set()  # leaves that a dive has simulated, and the proof has not come to
        self._infeasible: list[Leaf] = []
        self._tried: set[Leaf] = set()
        self._arrangements: list[Arrangement] = []
        self._coming = each_arrangement(question, self._counts.excluded)
        self._is_enumerated = False
        self._current, self._expanding, self._is_proving = Frontier(1, Limits()), list[OpenNode](), False
        self._is_proved = False  # strategies may still be tried
        self._begin = time.monotonic()

    def _enumerate(self, deadline: float = inf) -> None:
        """Enumerate the remaining arrangements, until the deadline."""
        for arrangement in self._coming:
            self._arrangements.append(arrangement)
            self._counts.layouts += arrangement.count
            # Counted and dropped at once: a large question has hundreds of thousands of layouts.
            if self._prunes and arrangement.missing_bytes > 0:
                self._counts.too_large += arrangement.count
            else:
                self._queue.append(self._numbered(arrangement.bound_s, arrangement))
            if len(self._arrangements) % _REPORT_EVERY == 0:
                self._report(0)
                if is_over(deadline):
                    return
        self._is_enumerated = True

    def _numbered(self, bound_s: float, node: Node) -> OpenNode:
        self._pushed += 1
        return OpenNode(bound_s, self._pushed, node)

    def _report(self, decided: int) -> None:
        if self._progress is not None:
            self._progress(decided, self._counts.layouts)

    def has(self, limits: Limits) -> bool:
        """Whether limits allow any layout, feasible or not."""
        return any(admits(limits, one) for one in self._arrangements)

    def best(
        self, count: int = 1, limits: Limits | None = None, *, deadline: float = inf, within_s: float = inf
    ) -> SearchResult:
        """The best layout of each group; layouts without a strategy if those of the limits lead to none.

        The first call enumerates the arrangements, which may take seconds.

        Args:
            count: number of layouts.
            limits: of the layouts; ``None`` for no more than those of the question.
            deadline: on ``time.monotonic``, at which the search returns the best so far; infinite: no limit.
            within_s: longest step of the answer; the proof ends there.
        """
        begin, limits = time.monotonic(), limits or Limits()
        left_s, is_first = deadline - begin, not self._is_enumerated
        self._enumerate(begin + FINDING * left_s)
        names = limits.strategies or self._question.limits.strategies
        # Plain layouts are searched even without "none", since strategies start from those that do not fit.
        has_plain = names is None or "none" in names
        is_urgent = deadline < inf
        plain = replace(limits, strategies=names if has_plain else None)
        frontier = self._frontier(count, plain, is_urgent=is_urgent, within_s=within_s)
        self._current, self._is_proved = frontier, False
        if is_first and self._prunes and (is_urgent or self._counts.layouts > MANY):
            self._dive(frontier, begin + (FINDING + DIVING) * left_s)
        self._enumerate()
        if self._counts.layouts > MUCH and not is_urgent:
            expect_much()
        open_bound_s = self._prove(frontier, deadline)
        self._is_proved = open_bound_s is None
        if open_bound_s is None and (limits.strategies is not None or not limits.names):
            wanted = frontier if has_plain else self._frontier(count, replace(limits, strategies=names))
            # A plug-in may have been left out since the program was read.
            for name in filter(wanted.allows, filter(STRATEGIES.__contains__, self._question.strategies)):
                with naming_strategy(name):
                    self._try_strategy(wanted, name, deadline)
            frontier = wanted if wanted.best else frontier
        self._counts.seconds += time.monotonic() - begin
        self._count_pruned(frontier, open_bound_s)
        steps = sorted((_refined(one, frontier.step_of(one)) for one in frontier.best), key=SortKey.of)
        return SearchResult(tuple(steps), self._counts, open_bound_s, has_slower=frontier.has_slower)

    def so_far(self) -> SearchResult:
        """The best layouts of a search that was interrupted inside ``best``, without further simulations."""
        frontier, counts = self._current, self._counts
        counts.seconds = time.monotonic() - self._begin
        steps = tuple(sorted((step for one in frontier.best if (step := frontier.step_of(one))), key=SortKey.of))
        if not self._is_enumerated:
            counts.undecided = counts.layouts - counts.too_large - counts.simulated
            return SearchResult(steps, counts, self._question.least_s)
        if self._is_proving:
            self._queue = frontier.deferred + frontier.queue + self._expanding
        bounds_s = () if self._is_proved else (entry.bound_s for entry in self._queue)
        open_bound_s = min(bounds_s, default=None)
        self._count_pruned(frontier, open_bound_s)
        return SearchResult(steps, counts, open_bound_s)

    def _count_pruned(self, frontier: Frontier, open_bound_s: float | None) -> None:
        """Count the open layouts as too slow, or as undecided if the search stopped early."""
        counts = self._counts
        left = counts.layouts - counts.too_large - counts.simulated
        counts.undecided = 0
        if open_bound_s is not None:
            counts.undecided = min(left, self._num_open(frontier))
        counts.too_slow = left - counts.undecided

    def _num_open(self, frontier: Frontier) -> int:
        """Number of open layouts that may be in the answer, without those that a dive has simulated."""
        nodes = [
            entry.node
            for entry in self._queue
            if entry.bound_s <= frontier.cutoff_s and not frontier.is_dominated(entry.node, entry.bound_s)
        ]
        keys = {key_of(node) for node in nodes}
        return sum(node.count for node in nodes) - sum(not keys.isdisjoint(prefixes(leaf)) for leaf in self._early)

    def _dive(self, frontier: Frontier, deadline: float) -> None:
        """Simulate one layout of each likely arrangement, so that there are incumbents before the proof.

        An urgent query dives until the deadline, others until the first incumbent.
        """
        nodes = [entry.node for entry in self._queue if isinstance(entry.node, Arrangement)]
        for arrangement in _likely(nodes, frontier):
            if is_over(deadline) or (frontier.best and not frontier.is_urgent):
                return
            candidate = _first_feasible(arrangement, frontier.cutoff_s)
            if candidate is not None:
                self._simulate(frontier, candidate)
                self._counts.simulated += 1
                self._early.add(key_of(candidate))
            self._report(self._counts.too_large + self._counts.simulated)

    def _simulate(self, frontier: Frontier, candidate: Candidate) -> None:
        """Simulate a candidate and offer it as an incumbent to this query and to later ones."""
        step = candidate.simulate()
        key = SortKey.of(step)
        if self._found is not None and all(key < other for other, _ in self._simulated):
            self._found(step)
        self._simulated.append((key, candidate))
        frontier.offer(key, candidate, step)

    def _frontier(self, count: int, limits: Limits, *, is_urgent: bool = False, within_s: float = inf) -> Frontier:
        """A frontier with everything simulated so far as incumbents."""
        frontier = Frontier(count, limits, is_urgent=is_urgent, within_s=within_s)
        for key, candidate in self._simulated:
            frontier.offer(key, candidate)
        return frontier

    def _prove(self, frontier: Frontier, deadline: float) -> float | None:
        """Expand open nodes until none can be in the answer; returns the bound of the rest if the time is up before."""
        frontier.start(self._queue)
        open_bound_s, self._is_proving = None, True
        while frontier.queue:
            entry = heappop(frontier.queue)
            # An interrupt may come while the entry is in no queue; ``so_far`` counts it as open.
            self._expanding = [entry]
            if is_over(deadline) or (self._prunes and entry.bound_s > frontier.cutoff_s):
                heappush(frontier.queue, entry)
                # The queue is in the order of bounds: if the first is too slow, so is the rest.
                open_bound_s = entry.bound_s if entry.bound_s <= frontier.cutoff_s else None
                break
            if self._prunes and frontier.is_dominated(entry.node, entry.bound_s):
                frontier.deferred.append(entry)
            else:
                self._expand(frontier, entry)
            self._report(self._counts.too_large + self._counts.simulated)
        self._queue, self._expanding, self._is_proving = frontier.deferred + frontier.queue, list[OpenNode](), False
        return open_bound_s if open_bound_s is not None and self._num_open(frontier) else None

    def _expand(self, frontier: Frontier, entry: OpenNode) -> None:
        """Push the children of a node, or the node with a closer bound; simulate a candidate with the closest."""
        node = entry.node
        if isinstance(node, Arrangement):
            # Their own bounds take long, and not every query admits them.
            for cut in node.cuts:
                frontier.push(self._numbered(entry.bound_s, cut))
        elif isinstance(node, Cut):
            self._expand_cut(frontier, entry.bound_s, node)
        elif isinstance(node, Twig):
            self._expand_twig(frontier, entry.bound_s, node)
        elif isinstance(node, Leaf):
            self._complete_leaf(frontier, entry.bound_s, node)
        else:
            self._bound_or_simulate(frontier, entry.bound_s, node)

    def _expand_cut(self, frontier: Frontier, bound_s: float, cut: Cut) -> None:
        """Push a cut with its own bound, then its twigs, without those whose sharding cannot fit."""
        if self._prunes and cut.bound_s > bound_s:
            frontier.push(self._numbered(cut.bound_s, cut))
            return
        # Memory is bounded where time does not decide: most cuts and twigs are never taken from the queue.
        if self._prunes and not cut.may_fit:
            self._counts.too_large += cut.count
            return
        for twig in cut.twigs:
            if self._prunes and not cut.has_room(twig.sharding):
                self._counts.too_large += twig.count
            else:
                # A bound never falls below that of its parent, or the queue's first would not bound the rest.
                frontier.push(self._numbered(max(bound_s, twig.bound_s), twig))

    def _expand_twig(self, frontier: Frontier, bound_s: float, twig: Twig) -> None:
        """Push the leaves of a twig that may fit, each with the bound that follows from memory."""
        fitting, others = twig.bounded(twig.leaves) if self._prunes else ([(bound_s, leaf) for leaf in twig.leaves], [])
        for closer_s, leaf in fitting:
            frontier.push(self._numbered(max(bound_s, closer_s), leaf))
        for leaf in others:
            self._drop(leaf)

    def _complete_leaf(self, frontier: Frontier, bound_s: float, leaf: Leaf) -> None:
        """Push a leaf with a closer bound, or as a candidate."""
        if self._prunes and not leaf.has_exchanges:
            closer_s = exchanging_bound_s(leaf)
            if closer_s > bound_s:
                frontier.push(self._numbered(closer_s, replace(leaf, has_exchanges=True)))
                return
        candidate = complete(leaf)
        if candidate is None:
            self._drop(leaf)
        else:
            frontier.push(self._numbered(max(bound_s, candidate.bound_s), candidate))

    def _bound_or_simulate(self, frontier: Frontier, bound_s: float, candidate: Candidate) -> None:
        """Push a candidate with its next closer bound, or simulate it."""
        if (key := key_of(candidate)) in self._early:  # it has been offered to this query
            self._early.remove(key)
            return
        # An urgent query without an answer simulates at once: a closer bound would only delay the first answer.
        bounds_first = self._prunes and (frontier.cutoff_s < inf or not frontier.is_urgent)
        # The bounds of its schedule take less time than adding messages and simulating.
        closer_s = candidate.closer_bound_s if bounds_first else None
        if closer_s is not None:
            bounded = replace(candidate, num_bounds=candidate.num_bounds + 1)
            frontier.push(self._numbered(max(bound_s, closer_s), bounded))
        else:
            self._simulate(frontier, candidate)
            self._counts.simulated += 1

    def _drop(self, leaf: Leaf) -> None:
        self._counts.too_large += 1
        self._infeasible.append(leaf)

    def _try_strategy(self, frontier: Frontier, name: str, deadline: float) -> None:
        """Build and simulate the layouts of a strategy with the lowest estimates, while these are below the fastest."""
        strategy, admitted = STRATEGIES[name], frontier.admits_with_any_strategy
        arrangements, infeasible = filter(admitted, self._arrangements), [*filter(admitted, self._infeasible)]
        state = SearchState(arrangements, infeasible, frontier.fastest_s)
        # A search has so many leaves that ``replace`` would take longer than their estimates.
        leaves = [
            Leaf(leaf.cut, leaf.sharding, leaf.choice, name) for leaf in filter(admitted, strategy.applies(state))
        ]
        of_group = Counter[GroupKey]()
        for estimate_s, leaf in _by_estimate(strategy, leaves):
            if is_over(deadline) or of_group.total() == MOST_TRIED or estimate_s > frontier.fastest_s:
                return
            group = GroupKey.of(leaf)
            if of_group[group] == MOST_OF_A_GROUP:
                continue
            of_group[group] += 1
            if leaf not in self._tried:
                self._tried.add(leaf)
                self._counts.tried += 1
                if (candidate := strategy.build(leaf)) is not None:
                    self._simulate(frontier, candidate)


def _by_estimate(strategy: Strategy, leaves: Sequence[Leaf]) -> Iterator[tuple[float, Leaf]]:
    """Leaves in the order of their estimates. Few are built, so that most need no more than the bound of theirs."""
    queue = [(strategy.least(leaf), False, number) for number, leaf in enumerate(leaves)]
    heapify(queue)
    while queue:
        seconds, is_estimate, number = heappop(queue)
        if is_estimate:
            yield seconds, leaves[number]
        else:
            heappush(queue, (max(seconds, strategy.estimate(leaves[number])), True, number))


def _refined(candidate: Candidate, step: SimulatedStep | None) -> SimulatedStep:
    """The fastest step of a layout of the answer: as searched, partitioned again, or refined by its strategy."""
    steps, again = [step or candidate.simulate()], repartitioned(candidate)
    if again is not None:
        steps.append(again.simulate())
    if candidate.leaf.strategy != "none":
        with naming_strategy(candidate.leaf.strategy):
            steps += STRATEGIES[candidate.leaf.strategy].refine(candidate)
    return min(steps, key=SortKey.of) if len(steps) > 1 else steps[0]


def _likely(arrangements: Sequence[Arrangement], frontier: Frontier) -> Iterator[Arrangement]:
    """Arrangements in the order of a dive: short schedules first, and of these the lowest estimates.

    While nothing fits, after the first few each is followed by one that needs little memory.
    """
    short = sorted((one for one in arrangements if _on_ranks(one) <= MOST_ON_RANKS), key=_estimate_s)
    # An arrangement that fits with some layers recomputed also fits with all of them.
    lean = iter(sorted((one for one in short if one.recomputed != "some"), key=lambda one: one.missing_bytes))
    for number, one in enumerate(short):
        yield one
        # Arrangements with the lowest estimates recompute and shard least, so with little memory none of many may fit.
        small = None if frontier.best or number < BEFORE_LEAN else next(lean, None)
        if small is not None:
            yield small
    yield from sorted((one for one in arrangements if _on_ranks(one) > MOST_ON_RANKS), key=_on_ranks)


def _estimate_s(arrangement: Arrangement) -> float:
    """Estimated seconds of a step: the bound, which has no bubble, with the bubble of the most loops."""
    run = arrangement.run
    loops = max(1, run.shape.layers // run.pp)
    # The bubble of the interleaved schedule: (P - 1) / (M V) of the ideal time (arXiv 2104.04473, section 2.2).
    return arrangement.bound_s * (1 + (run.pp - 1) / (run.num_microbatches * loops))


def _on_ranks(arrangement: Arrangement) -> int:
    return arrangement.run.num_microbatches * arrangement.run.pp


def _is_short(cut: Cut) -> bool:
    """Whether its schedules take little time to make; always true for the cut with the fewest stages."""
    run = cut.run
    return run.num_microbatches * run.num_stages <= MOST_ON_STAGES or run.loops == 1


def _first_feasible(arrangement: Arrangement, cutoff_s: float) -> Candidate | None:
    """The feasible leaf of an arrangement with the lowest bound; ``None`` if the first few do not fit.

    Args:
        arrangement: whose leaves.
        cutoff_s: largest bound.
    """
    bounded = [
        one
        for cut in arrangement.cuts
        # Cheap checks first: there are many leaves, and each has bounds to compute.
        if _is_short(cut) and cut.bound_s <= cutoff_s and cut.may_fit
        for twig in cut.twigs
        for one in twig.bounded(twig.leaves)[0]
    ]
    # The first that fits is enough: the others have higher bounds, and the proof decides them.
    promising = sorted(bounded, key=lambda one: one[0])[:MOST_COMPLETED]
    completed = (complete(leaf) for bound_s, leaf in promising if bound_s <= cutoff_s)
    return next((candidate for candidate in completed if candidate is not None), None)
