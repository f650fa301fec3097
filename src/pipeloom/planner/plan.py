"""A plan: the best layouts of a question, why the first one wins, what would change it, and advice."""

import time
from dataclasses import dataclass, field, replace
from math import inf

from pipeloom.planner.advice import advice, on_plain
from pipeloom.planner.comparison import Change, Rival, changes, is_faster, rivals
from pipeloom.planner.error_bar import ErrorBar, error_bar
from pipeloom.planner.goal import Merit
from pipeloom.planner.no_answer import Closest, closest, no_layout, ways_out
from pipeloom.planner.question import Question
from pipeloom.planner.search import Counts, Found, Progress, Search
from pipeloom.planner.strategies import STRATEGIES
from pipeloom.predict.step import SimulatedStep
from pipeloom.system.stopping import Reason, Stop


@dataclass
class Plan:
    """The answer to a question, as far as it is made.

    Attributes:
        question: that it answers.
        error_bar: how far off predictions were for such a program and such devices.
        steps: the best layouts, the fastest first.
        counts: what became of the others.
        open_bound_s: where the time was up: nothing is faster than this; ``None`` if the answer is proved.
        rivals: the best of other kinds.
        changes: what would be best otherwise.
        advice: sentences.
        closest: where nothing fits: what comes closest.
        stopped: why some of this is missing: the time was up, or somebody interrupted it; ``None`` if nothing is.
    """

    question: Question
    error_bar: ErrorBar
    steps: tuple[SimulatedStep, ...] = ()
    counts: Counts = field(default_factory=Counts)
    open_bound_s: float | None = None
    rivals: list[Rival] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    closest: Closest | None = None
    stopped: Reason | None = None

    @property
    def best(self) -> SimulatedStep | None:
        """The fastest; ``None`` if nothing fits."""
        return self.steps[0] if self.steps else None


def make_plan(
    question: Question,
    count: int = 10,
    *,
    budget_s: float | None = None,
    explains: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Answer a question.

    In the main thread the time limit holds in every part of it, and Ctrl-C ends it: the answer is then what there is.

    Args:
        question: to answer.
        count: how many layouts.
        budget_s: seconds after which it ends with what it has; ``None`` goes on to the proof.
        explains: whether to look for rivals and changes as well.
        progress: is called with how many layouts are decided, of how many.

    Raises:
        UserError: no layout divides the devices and the batch; with what would.
    """
    deadline = inf if budget_s is None else time.monotonic() + budget_s
    searching = Search(question, progress=progress)
    plan = Plan(question, error_bar(question.cluster, question.software))
    stop = Stop(None if budget_s is None else deadline)
    stop.run(lambda: _answer(plan, searching, count, deadline, explains=explains))
    plan.stopped = stop.reason
    if not plan.counts.layouts:  # it ended in the middle of the search
        _take(plan, searching.so_far())
    return plan


def _take(plan: Plan, found: Found) -> None:
    # A copy: searches for rivals go on counting.
    plan.steps, plan.counts, plan.open_bound_s = found.steps, replace(found.counts), found.open_bound_s


def _answer(plan: Plan, searching: Search, count: int, deadline: float, *, explains: bool) -> None:
    """All parts, each kept as soon as it is there, since the time may be up before the next one.

    Raises:
        UserError: no layout divides the devices and the batch.
    """
    question, found = plan.question, searching.best(count, deadline=deadline)
    if found.counts.layouts == 0:
        raise no_layout(question, found.counts.excluded)
    _take(plan, found)
    if plan.best is not None:
        plan.advice.extend(on_plain(searching, question, plan.best, deadline))
        if explains:
            _explain(plan, searching, plan.best, count, deadline)
    elif plan.open_bound_s is None:
        plan.advice.extend(filter(None, (one.hint(question) for one in STRATEGIES.values())))
        plan.closest = closest(question)
        plan.closest.ways_out.extend(ways_out(question, plan.closest))


def _explain(plan: Plan, searching: Search, best: SimulatedStep, count: int, deadline: float) -> None:
    question = plan.question
    plan.rivals.extend(rivals(searching, question, best, deadline))
    faster = [rival.step for rival in plan.rivals if rival.step is not None and is_faster(rival.step, best)]
    if faster:  # stages cut once more by what their layers recompute, or found after the time for the best was up
        steps = {Merit.of(step): step for step in (*plan.steps, *faster)}
        plan.steps = tuple(steps[merit] for merit in sorted(steps)[:count])
        best = plan.steps[0]
        plan.advice[:] = on_plain(searching, question, best, deadline)
        plan.rivals.clear()
        plan.rivals.extend(rivals(searching, question, best, deadline))
    plan.changes.extend(changes(question, best, deadline))
    plan.advice.extend(advice(question, best, plan.rivals, plan.changes, deadline))
