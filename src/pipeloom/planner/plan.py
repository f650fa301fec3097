"""A plan: the best layouts of a question, comparisons with other layouts and questions, and advice."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from math import inf
from typing import Any, get_type_hints

from pipeloom.calls import checked, value_problems
from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.config import RunConfig
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software, started_by
from pipeloom.errors import ConfigError
from pipeloom.planner.advice import advice, on_plain, on_simpler, on_values
from pipeloom.planner.choice import in_order, is_tie, simplest
from pipeloom.planner.comparison import Change, Rival, changes, is_faster, rivals
from pipeloom.planner.error_bar import ErrorBar, error_bar
from pipeloom.planner.frontier import SortKey
from pipeloom.planner.infeasible import Closest, closest, no_layout, ways_out
from pipeloom.planner.launch import Wanted, check_launch
from pipeloom.planner.left_out import left_out
from pipeloom.planner.question import HEADROOM, Limits, Question
from pipeloom.planner.search import Counts, Found, Progress, Search, SearchResult
from pipeloom.planner.strategies import STRATEGIES, hint_of, strategy_of, with_frozen, with_strategies
from pipeloom.planner.wrong_plugins import without_wrong_plugins
from pipeloom.predict.describe import asked_precision, load_or_note, with_update_of
from pipeloom.predict.step import SimulatedStep
from pipeloom.system.stopping import Reason, Stop
from pipeloom.terminal.words import count as count_of
from pipeloom.terminal.words import seconds, unknown_name
from pipeloom.workload.boundary import Boundary
from pipeloom.workload.dtypes import Dtype, MatmulDtype, products_of
from pipeloom.workload.launchers import LAUNCHERS, LauncherName
from pipeloom.workload.limits import Count, Headroom, Positive
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Attention


@dataclass(repr=False)
class Plan:
    """The answer to a question; incomplete if it was stopped.

    Attributes:
        question: that it answers.
        error_bar: measured errors of predictions comparable with the best.
        steps: the best layouts, the fastest first.
        counts: statistics of the search.
        open_bound_s: lower bound of the step times of the layouts that were not searched, in seconds; ``None`` if the
            search was complete.
        rivals: the best layouts of other kinds.
        changes: the best layouts of changed questions.
        advice: sentences.
        has_simpler: whether one of them names an equivalent layout that is simpler than all equivalent steps.
        closest: if nothing fits, the layout that lacks the least memory.
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
    has_simpler: bool = False
    closest: Closest | None = None
    stopped: Reason | None = None

    def __repr__(self) -> str:
        """Number of layouts, and the fastest."""
        found = f"{count_of(len(self.steps), 'layout')}; best: {self.best}" if self.steps else "no layout"
        proof = "" if self.open_bound_s is None else f", nothing is faster than {seconds(self.open_bound_s)}"
        return f"Plan({found}{proof})"

    @property
    def best(self) -> SimulatedStep | None:
        """The fastest; ``None`` if nothing fits."""
        return self.steps[0] if self.steps else None

    @property
    def rows(self) -> list[SimulatedStep]:
        """The layouts in the order in which to choose (``choice.in_order``)."""
        return in_order(self.steps, self.error_bar) if self.steps else []

    @property
    def simplest(self) -> SimulatedStep | None:
        """The simplest of the layouts that tie with the fastest; ``None`` if nothing fits."""
        return simplest(self.steps, self.error_bar) if self.steps else None

    @property
    def num_equivalent(self) -> int:
        """How many layouts, the first ones of ``rows``, are not slower than the fastest by more than the error bar."""
        return sum(is_tie(self.steps[0], step, self.error_bar) for step in self.steps)


@checked
def make_question(
    model: str | ModelShape,
    cluster: str | Cluster,
    *,
    num_devices: int,
    global_batch: int,
    seq: int,
    software: str | Software | None = None,
    launcher: LauncherName = "pipeloom",
    dtype: Dtype | None = None,
    matmul_dtype: MatmulDtype | None = None,
    attention: Attention = "flash2",
    fused_norm: bool = True,
    headroom: Headroom = HEADROOM,
    boundary: Boundary | None = None,
    **limits: Sequence[Any],
) -> Question:
    """Make a question for ``plan``: which layout trains a model fastest on a cluster?

    Examples:
        >>> from pipeloom import make_question
        >>> question = make_question("gpt-6.6b", "dgx-a100", num_devices=16, global_batch=64, seq=1024, pp=(4, 8))

    Args:
        model: a name of the catalog, a file (.toml, or a Hugging Face config.json), or its sizes.
        cluster: a name of the catalog, a file, or a cluster.
        num_devices: world size; a layout uses all devices.
        global_batch: global batch size in sequences.
        seq: sequence length in tokens.
        software: the training program: a name of the catalog, a file, or a program. ``None``: that of ``launcher``.
        launcher: the program that can start every layout; with another one than pipeloom, its rules limit the search.
        dtype: of weights and activations; ``None``: bfloat16 on GPUs, or float16 if they lack it, float32 on CPUs.
        matmul_dtype: of the operands of linear layers; ``None``: ``dtype``.
        attention: the attention kernel.
        fused_norm: whether norms are one kernel.
        headroom: fraction of the memory of every device that layouts leave free.
        boundary: code of messages between pipeline ranks; ``None``: they travel as they are.
        limits: values to search, by the attributes of ``Limits``, such as ``pp=(4, 8)``; by default all.

    Raises:
        ConfigError: everything that is wrong.
    """
    shape, machine, program = _loaded(model, cluster, software, launcher, seq=seq, limits=limits)
    question = Question(
        shape=shape,
        cluster=machine,
        software=started_by(with_strategies(program), LAUNCHERS[launcher]),
        num_devices=num_devices,
        global_batch=global_batch,
        seq=seq,
        attention=attention,
        fused_norm=fused_norm,
        headroom=headroom,
        boundary=boundary,
        limits=Limits(**{name: tuple(among) for name, among in limits.items()}),
        launcher=LAUNCHERS[launcher],
        **_dtypes(dtype, matmul_dtype, machine, num_devices),
    )
    check_launch(question.launcher, Wanted.of(question, model), machine, num_devices)
    return question


def _dtypes(
    dtype: Dtype | None, matmul_dtype: MatmulDtype | None, cluster: Cluster, num_devices: int
) -> dict[str, Any]:
    """The fields of a question that follow from dtypes."""
    precision, products = asked_precision(dtype, cluster, num_devices), products_of(matmul_dtype)
    return {"precision": precision, "products": products, "has_default_dtype": dtype is None}


def of_training(question: Question, config: RunConfig) -> Question:
    """The question for a run's update, adapters and attention, its experts, and what its other settings leave out.

    Raises:
        ConfigError: the program or the limits do not go with adapters.
    """
    program, adapter = with_update_of(question.software, config), config.pairs
    program = program if adapter is None else with_frozen(program)
    shape, load = question.shape, config.machine.known_expert_load
    if shape.experts is not None:
        shape = replace(shape, experts=replace(shape.experts, capacity=config.model.expert_capacity))
    of_experts = {"shape": shape, "balance": config.model.balance, "expert_load": load}
    return replace(
        question,
        adapter=adapter,
        software=program,
        by_document=config.data.by_document,
        update=config.optimizer.known_update,
        left_out=left_out(config),
        **of_experts,
    )


def _loaded(
    model: str | ModelShape,
    cluster: str | Cluster,
    software: str | Software | None,
    launcher: LauncherName,
    *,
    seq: int,
    limits: Mapping[str, object],
) -> tuple[ModelShape, Cluster, Software]:
    problems = _limit_problems(limits, software, launcher)
    program = software or LAUNCHERS[launcher].software
    shape = load_or_note(lambda name: load_model(name, seq), model, problems) if isinstance(model, str) else model
    machine = load_or_note(load_cluster, cluster, problems) if isinstance(cluster, str) else cluster
    program = load_or_note(load_software, program, problems) if isinstance(program, str) else program
    if problems or shape is None or machine is None or program is None:
        raise ConfigError(problems, "the question")
    return shape, machine, program


def _limit_problems(limits: Mapping[str, object], software: str | Software | None, launcher: LauncherName) -> list[str]:
    """A sentence for two programs, each name that limits nothing, each value that is not a sequence of choices."""
    hints = get_type_hints(Limits)
    arguments = [name for name in signature(make_question).parameters if name != "limits"]
    problems = list[str]()
    if software is not None and not LAUNCHERS[launcher].is_own:
        problems.append(f"software and launcher {launcher} both name the program; leave one of them out")
    for name, among in limits.items():
        if name not in hints:
            problems.append(unknown_name("argument", name, [*arguments, *hints]))
        elif isinstance(among, str) or not isinstance(among, Sequence):
            problems.append(f"{name} must be a sequence of what may be chosen, such as ({among!r},), found {among!r}")
        else:
            problems += value_problems(name, hints[name], tuple(among))
    return problems


@checked
def plan(
    question: Question,
    count: Count = 10,
    *,
    budget_s: Positive | None = None,
    explains: bool = True,
    progress: Progress | None = None,
    found: Found | None = None,
) -> Plan:
    """Find the fastest layouts of a question by branch and bound, and compare them with layouts of other kinds.

    Examples:
        >>> from pipeloom import make_question, plan
        >>> question = make_question("gpt-6.6b", "dgx-a100", num_devices=8, global_batch=16, seq=512, tp=(1,), pp=(8,))
        >>> plan(question, count=1, explains=False).best.knobs.choice.family
        'interleaved-zb'

    An installed family or strategy that raises or breaks a rule is left out, and the search begins again without it,
    unless the limits name it. In the main thread the time limit interrupts every part of the work, as Ctrl-C does; the
    plan is then incomplete.

    Args:
        question: to answer.
        count: number of layouts.
        budget_s: time limit in seconds, after which the best layouts found so far are returned; ``None``: no limit.
        explains: whether to search the best layouts of other kinds and of changed questions.
        progress: callback ``(decided, total)``, in layouts.
        found: callback with each step that is faster than all before, before it is proved to be the fastest.

    Raises:
        UserError: no layout divides the devices and the batch; the message has numbers that do.
    """
    deadline = inf if budget_s is None else time.monotonic() + budget_s

    def work(question: Question) -> Plan:
        return _planned(question, count, deadline, explains=explains, progress=progress, found=found)

    return without_wrong_plugins(question, work)


def _planned(
    question: Question, count: int, deadline: float, *, explains: bool, progress: Progress | None, found: Found | None
) -> Plan:
    searching = Search(question, progress=progress, found=found)
    answer = Plan(question, error_bar(question.cluster, question.software))
    stop = Stop(None if deadline == inf else deadline)
    stop.run(lambda: _answer(answer, searching, count, deadline, explains=explains))
    # The search also reads the clock: other threads have no timer, and a destructor may swallow its exception.
    answer.stopped = stop.reason or (None if answer.open_bound_s is None else "time")
    if not answer.counts.layouts:  # stopped during the search
        _set_result(answer, searching.so_far())
    for step in answer.steps:  # whoever prints the answer needs it, and leaves out no strategy
        strategy_of(step)
    return answer


def _set_result(plan: Plan, found: SearchResult) -> None:
    # A copy, since searches for rivals change the counts.
    plan.counts, plan.open_bound_s = replace(found.counts), found.open_bound_s
    _set_steps(plan, found.steps)


def _set_steps(plan: Plan, steps: tuple[SimulatedStep, ...]) -> None:
    plan.steps = steps
    if steps:
        plan.error_bar = error_bar(plan.question.cluster, plan.question.software).of(steps[0].run)


def _answer(plan: Plan, searching: Search, count: int, deadline: float, *, explains: bool) -> None:
    """Set the parts of the plan, each as soon as it is made, since the time may be up before the next one.

    Raises:
        UserError: no layout divides the devices and the batch.
    """
    question, found = plan.question, searching.best(count, deadline=deadline)
    if found.counts.layouts == 0:
        raise no_layout(question, found.counts.excluded)
    _set_result(plan, found)
    if plan.best is not None:
        plan.advice.extend(on_plain(searching, question, plan.best, plan.error_bar, deadline))
        if explains:
            _explain(plan, searching, plan.best, count, deadline)
        plan.advice.extend(on_values(plan.best))
    elif plan.open_bound_s is None:
        plan.advice.extend(filter(None, (hint_of(name, question) for name in STRATEGIES)))
        plan.closest = closest(question)
        plan.closest.ways_out.extend(ways_out(question, plan.closest))


def _explain(plan: Plan, searching: Search, best: SimulatedStep, count: int, deadline: float) -> None:
    question = plan.question
    plan.rivals.extend(rivals(searching, question, best, deadline))
    faster = [rival.step for rival in plan.rivals if rival.step is not None and is_faster(rival.step, best)]
    if faster:  # partitioned again by recomputed layers, or found after the time for the best was up
        steps = {SortKey.of(step): step for step in (*plan.steps, *faster)}
        _set_steps(plan, tuple(steps[key] for key in sorted(steps)[:count]))
        best = plan.steps[0]
        plan.advice[:] = on_plain(searching, question, best, plan.error_bar, deadline)
        plan.rivals.clear()
        plan.rivals.extend(rivals(searching, question, best, deadline))
    plan.changes.extend(changes(question, best, deadline))
    simpler = list(on_simpler(searching, question, plan.steps, plan.rivals, bar=plan.error_bar, deadline=deadline))
    plan.has_simpler = bool(simpler)
    plan.advice.extend(simpler)
    plan.advice.extend(
        advice(searching, question, best, plan.rivals, plan.changes, bar=plan.error_bar, deadline=deadline)
    )
