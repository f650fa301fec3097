"""A plan: the best layouts of a question, comparisons with other layouts and questions, and advice."""

import time
from dataclasses import dataclass, field, replace
from math import inf

from pipeloom.planner.advice import advice, on_plain
from pipeloom.planner.comparison import Change, Rival, changes, is_faster, rivals
from pipeloom.planner.error_bar import ErrorBar, error_bar
from pipeloom.planner.frontier import SortKey
from pipeloom.planner.infeasible import Closest, closest, no_layout, ways_out
from pipeloom.planner.question import Question
from pipeloom.planner.search import Counts, Progress, Search, SearchResult
from pipeloom.planner.strategies import STRATEGIES
from pipeloom.predict.step import SimulatedStep
from pipeloom.system.stopping import Reason, Stop


@dataclass
class Plan:
    """The answer to a question; incomplete if it was stopped.

    Attributes:
        question: that it answers.
        error_bar: measured errors of comparable predictions.
        steps: the best layouts, the fastest first.
        counts: statistics of the search.
        open_bound_s: where the time was up, lower bound of the open layouts; ``None`` if the answer is proved.
        rivals: the best layouts of other kinds.
        changes: the best layouts of changed questions.
        advice: sentences.
        closest: where nothing fits, the layout that lacks the least memory.
        stopped: why the answer is incomplete, time limit or interrupt; ``None`` if it is complete.
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

    In the main thread the time limit interrupts every part of it, as Ctrl-C does; the plan is then incomplete.

    Args:
        question: to answer.
        count: of layouts.
        budget_s: seconds after which it stops with the best so far; ``None``: until proved.
        explains: whether to compare with other kinds of layouts and with changed questions.
        progress: is called with the number of decided layouts and of all.

    Raises:
        UserError: no layout divides the devices and the batch; names numbers that have layouts.
    """
    deadline = inf if budget_s is None else time.monotonic() + budget_s
    searching = Search(question, progress=progress)
    plan = Plan(question, error_bar(question.cluster, question.software))
    stop = Stop(None if budget_s is None else deadline)
    stop.run(lambda: _answer(plan, searching, count, deadline, explains=explains))
    plan.stopped = stop.reason
    if not plan.counts.layouts:  # it stopped during the search
        _set_result(plan, searching.so_far())
    return plan


def _set_result(plan: Plan, found: SearchResult) -> None:
    # A copy: searches for rivals go on counting.
    plan.steps, plan.counts, plan.open_bound_s = found.steps, replace(found.counts), found.open_bound_s


def _answer(plan: Plan, searching: Search, count: int, deadline: float, *, explains: bool) -> None:
    """Fill in all parts, each as soon as it is made, since the time may be up before the next one.

    Raises:
        UserError: no layout divides the devices and the batch.
    """
    question, found = plan.question, searching.best(count, deadline=deadline)
    if found.counts.layouts == 0:
        raise no_layout(question, found.counts.excluded)
    _set_result(plan, found)
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
    if faster:  # partitioned again by recomputed layers, or found after the time for the best was up
        steps = {SortKey.of(step): step for step in (*plan.steps, *faster)}
        plan.steps = tuple(steps[merit] for merit in sorted(steps)[:count])
        best = plan.steps[0]
        plan.advice[:] = on_plain(searching, question, best, deadline)
        plan.rivals.clear()
        plan.rivals.extend(rivals(searching, question, best, deadline))
    plan.changes.extend(changes(question, best, deadline))
    plan.advice.extend(advice(question, best, plan.rivals, plan.changes, deadline))
