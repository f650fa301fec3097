"""A plan: the best layouts of a question, why the first one wins, what would change it, and advice."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeloom.cost.hardware import Cluster, Link
from pipeloom.planner.advice import Closest, closest, no_layout, ways_out
from pipeloom.planner.causes import causes, differences
from pipeloom.planner.error_bar import ErrorBar, error_bar
from pipeloom.planner.goal import Rank
from pipeloom.planner.question import Limits, Question, divisors
from pipeloom.planner.search import Counts, Found, Progress, Search, search
from pipeloom.planner.strategies import STRATEGIES, strategy_of
from pipeloom.predict.step import SimulatedStep
from pipeloom.system.stopping import Reason, Stop


@dataclass(frozen=True)
class Rival:
    """The best layout of another kind.

    Attributes:
        kind: what is different about it.
        step: its step; ``None`` if no such layout fits.
        more_s: for each cause the seconds that it takes more than the best one.
    """

    kind: str
    step: SimulatedStep | None
    more_s: dict[str, float]


@dataclass(frozen=True)
class Change:
    """What would be best if the question were a little different.

    Attributes:
        what: is changed.
        step: best then; ``None`` if nothing fits.
        speed: tokens a second then, as a multiple of those now.
    """

    what: str
    step: SimulatedStep | None
    speed: float


@dataclass(frozen=True)
class Plan:
    """The answer to a question.

    Attributes:
        question: that it answers.
        steps: the best layouts, the fastest first.
        counts: what became of the others.
        open_bound_s: where the time was up: nothing is faster than this; ``None`` if the answer is proved.
        rivals: the best of other kinds.
        changes: what would be best otherwise.
        error_bar: how far off predictions were for such a program and such devices.
        advice: sentences.
        closest: where nothing fits: what comes closest.
        stopped: why some of this is missing: the time was up, or somebody interrupted it; ``None`` if nothing is.
    """

    question: Question
    steps: tuple[SimulatedStep, ...]
    counts: Counts
    open_bound_s: float | None
    rivals: tuple[Rival, ...]
    changes: tuple[Change, ...]
    error_bar: ErrorBar
    advice: tuple[str, ...]
    closest: Closest | None
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
    deadline = None if budget_s is None else time.monotonic() + budget_s
    searching = Search(question, progress=progress)
    draft = _Draft(question, count, error_bar(question.cluster, question.software))
    stop = Stop(deadline)
    stop.run(lambda: draft.answer(searching, deadline, explains=explains))
    draft.stopped = stop.reason
    if draft.found is None:
        draft.found = searching.so_far()
    return draft.plan()


@dataclass
class _Draft:
    """A plan as far as it is made."""

    question: Question
    count: int
    bar: ErrorBar
    found: Found | None = None
    steps: tuple[SimulatedStep, ...] = ()
    rivals: tuple[Rival, ...] = ()
    changes: tuple[Change, ...] = ()
    advice: tuple[str, ...] = ()
    near: Closest | None = None
    stopped: Reason | None = None

    def plan(self) -> Plan:
        """What there is."""
        found = self.found
        assert found is not None
        return Plan(
            self.question, self.steps or found.steps, found.counts, found.open_bound_s, self.rivals, self.changes,
            self.bar, self.advice, self.near, self.stopped,
        )  # fmt: skip

    def answer(self, searching: Search, deadline: float | None, *, explains: bool) -> None:
        """All parts, each kept as soon as it is there.

        Raises:
            UserError: no layout divides the devices and the batch.
        """
        question, found = self.question, searching.best(self.count, budget_s=_left_s(deadline))
        # A copy: searches for rivals go on counting.
        found = self.found = replace(found, counts=replace(found.counts))
        if found.counts.layouts == 0:
            raise no_layout(question, found.counts.excluded)
        if found.best is None:
            if found.open_bound_s is None:
                self._find_ways_out()
        else:
            for sentence in _advice_on_plain(searching, question, found.best, deadline):
                self.advice = (*self.advice, sentence)
            if explains:
                self._explain(searching, found.best, deadline)

    def _find_ways_out(self) -> None:
        self.advice = tuple(filter(None, (one.hint(self.question) for one in STRATEGIES.values())))
        self.near = closest(self.question)
        for way in ways_out(self.question, self.near):
            self.near = replace(self.near, ways_out=(*self.near.ways_out, way))

    def _explain(self, searching: Search, best: SimulatedStep, deadline: float | None) -> None:
        assert self.found is not None
        question = self.question
        for rival in _rivals(searching, question, best, deadline):
            self.rivals = (*self.rivals, rival)
        faster = [rival.step for rival in self.rivals if rival.step is not None and _is_faster(rival.step, best)]
        if faster:  # stages cut once more by what their layers recompute, or found after the time for the best was up
            steps = tuple(sorted({Rank.of(step): step for step in (*self.found.steps, *faster)}.values(), key=Rank.of))
            self.steps, self.rivals = steps[: self.count], ()
            best = self.steps[0]
            self.advice = tuple(_advice_on_plain(searching, question, best, deadline))
            for rival in _rivals(searching, question, best, deadline):
                self.rivals = (*self.rivals, rival)
        for change in _changes(question, best, deadline):
            self.changes = (*self.changes, change)
        self.advice = (*self.advice, *_advice(question, best, self.rivals, self.changes, deadline))


def _left_s(deadline: float | None) -> float | None:
    """Seconds until then."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _is_over(deadline: float | None) -> bool:
    return _left_s(deadline) == 0.0


def _rivals(searching: Search, question: Question, best: SimulatedStep, deadline: float | None) -> Iterator[Rival]:
    """The best of each other kind that there is, as far as the time goes."""
    for kind, limits in _kinds(question, best):
        if searching.has(limits) and not _is_over(deadline):
            yield _against(best, kind, searching.best(1, limits, budget_s=_left_s(deadline)).best)
    for kind, other in _alone(question, best):
        if not _is_over(deadline):
            yield _against(best, kind, search(other, 1, budget_s=_left_s(deadline)).best)


def _against(best: SimulatedStep, kind: str, step: SimulatedStep | None) -> Rival:
    return Rival(kind, step, {} if step is None else differences(best, step))


def _is_faster(step: SimulatedStep, best: SimulatedStep) -> bool:
    """Whether it would be first, on the same devices."""
    return step.run.num_devices == best.run.num_devices and Rank.of(step) < Rank.of(best)


def _kinds(question: Question, best: SimulatedStep) -> Iterator[tuple[str, Limits]]:
    """What could be different -> the limits that allow nothing else; some allow nothing at all."""
    run, limits, family = best.run, question.limits, best.order.choice.family
    sizes = divisors(question.num_devices)
    pipelines = tuple(pp for pp in sizes[1:] if limits.allows(pp=pp))
    if run.pp > 1 and limits.allows(pp=1):
        yield "no pipeline", Limits(pp=(1,))
    if run.pp == 1 and pipelines:
        yield "a pipeline", Limits(pp=pipelines)
    if question.num_devices > 1:  # alone, orders differ in nothing but what they hold
        yield from (
            (other, Limits(families=(other,), pp=pipelines or (1,))) for other in question.families if other != family
        )
    if others := tuple(tp for tp in sizes if tp != run.tp):
        yield f"tp other than {run.tp}", Limits(tp=others)
    if others := tuple(size for size in divisors(question.global_batch) if size != run.micro_batch):
        yield f"micro-batches other than {run.micro_batch}", Limits(micro_batch=others)
    if (way := strategy_of(best)) != "none" and limits.allows(ways="none"):
        yield STRATEGIES[way].without, Limits(ways=("none",))
    if run.recompute_kinds != ("none",) and "none" in question.recompute:
        yield "nothing recomputed", Limits(recompute=("none",))
    if set(run.recompute_kinds) != {"full"} and "full" in question.recompute:
        yield "all layers recomputed", Limits(recompute=("full",))
    if run.dp > 1 and run.shard != "none" and "none" in question.shards:
        yield "nothing shared out", Limits(shards=("none",))


ALONE = " alone"
"""How the titles of rivals end that use one kind of nodes."""


def _alone(question: Question, best: SimulatedStep) -> Iterator[tuple[str, Question]]:
    """Of several kinds of nodes each alone."""
    used = best.cluster.kinds(best.run.num_devices)
    for kind, number in used if len(used) > 1 else ():
        yield f"{number} devices of {kind.name}{ALONE}", replace(question, cluster=kind, num_devices=number)


def _changes(question: Question, best: SimulatedStep, deadline: float | None) -> Iterator[Change]:
    """What would be best if the question were a little different; only what is proved in time."""
    for what, other in _changed(question, best):
        if _is_over(deadline):
            return
        found = search(other, 1, budget_s=_left_s(deadline))
        # A change that was not searched to the end might only look worse than it is.
        if found.counts.layouts and found.open_bound_s is None:
            step = found.best
            yield Change(what, step, 0.0 if step is None else step.tokens_per_s / best.tokens_per_s)


def _changed(question: Question, best: SimulatedStep) -> Iterator[tuple[str, Question]]:
    cluster, batch = question.cluster, question.global_batch

    def on(other: Cluster) -> Question:
        return replace(question, cluster=other)

    if best.run.num_devices > cluster.devices_per_node:
        yield "twice the bandwidth between nodes", on(cluster.each(partial(with_bandwidth, inter=2.0)))
    elif best.run.num_devices > 1:
        yield "twice the bandwidth inside a node", on(cluster.each(partial(with_bandwidth, intra=2.0)))
    yield "10 % more memory", on(cluster.each(partial(with_memory, share=1.1)))
    for what, other in (("half the batch", batch // 2), ("twice the batch", 2 * batch)):
        # Half of an odd batch is no batch.
        if other >= 1 and other in (2 * batch, batch / 2):
            yield what, replace(question, global_batch=other)


def with_memory(cluster: Cluster, share: float) -> Cluster:
    """The cluster with the memory of its devices multiplied."""
    device = replace(cluster.device, memory_bytes=cluster.device.memory_bytes * share)
    return replace(cluster, device=device)


def with_bandwidth(cluster: Cluster, *, intra: float = 1.0, inter: float = 1.0) -> Cluster:
    """The cluster with its bandwidths multiplied: inside a node, between nodes."""

    def times(link: Link, factor: float) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    return replace(
        cluster,
        name=f"{cluster.name}, bandwidth x {intra:g} inside and x {inter:g} between nodes",
        intra=times(cluster.intra, intra),
        inter=times(cluster.inter, inter),
        bus_curves={
            kind: tuple((nodes, rate * (intra if nodes <= 1 else inter)) for nodes, rate in curve)
            for kind, curve in cluster.bus_curves.items()
        },
        collective_curves={
            kind: tuple(
                replace(curve, points=tuple((size, rate * intra) for size, rate in curve.points)) for curve in curves
            )
            for kind, curves in cluster.collective_curves.items()
        },
    )


TIGHT = 0.95
"""Part of a device's memory from which on advice is given: predictions of memory are not exact either."""
CLOSE = 0.03
"""Difference of two layouts below which predictions do not rank them reliably (docs/accuracy.md: the errors within one
set of measurements)."""
IDLE = 0.15
"""Bubble from which on advice is given."""


def _advice(
    question: Question,
    best: SimulatedStep,
    rivals: Sequence[Rival],
    changes: Sequence[Change],
    deadline: float | None,
) -> list[str]:
    return [
        *_advice_on_ways(question, best),
        *_advice_on_pipelines(best, rivals),
        *_advice_on_bubble(best, changes),
        *_advice_on_memory(best),
        *_advice_on_devices(question, best, deadline),
        *_advice_on_kinds(best, rivals),
    ]


def _advice_on_plain(
    searching: Search, question: Question, best: SimulatedStep, deadline: float | None
) -> Iterator[str]:
    """A faster layout that the limits leave out since it makes no room and cuts no sequences."""
    way = strategy_of(best)
    if way == "none" or question.limits.allows(ways="none"):
        return
    plain = searching.best(1, Limits(ways=("none",)), budget_s=_left_s(deadline)).best
    if plain is not None and _is_faster(plain, best):
        run, choice = plain.run, plain.order.choice
        less = 1 - plain.prediction.step_time_s / best.prediction.step_time_s
        yield (
            f"A plain layout is faster, which --ways leaves out: without {way} a step takes {less:.1%} less, with "
            f"tp {run.tp}, pp {run.pp}, dp {run.dp}, {choice.family}, micro-batches of {run.micro_batch}. "
            "Add none to --ways."
        )


def _advice_on_ways(question: Question, best: SimulatedStep) -> Iterator[str]:
    ways = question.limits.ways
    if ways is not None and strategy_of(best) not in ways:
        wanted = " or ".join(ways)
        limits = [found for way in ways if way != "none" and (found := STRATEGIES[way].limit(question)) is not None]
        alone = f" ({'; '.join(limits)})" if limits else ""
        yield f"None of these layouts has {wanted}: nothing needs it, or it does not help{alone}."


def _advice_on_pipelines(best: SimulatedStep, rivals: Sequence[Rival]) -> Iterator[str]:
    for rival in rivals:
        if rival.kind == "a pipeline":
            how = "does not fit" if rival.step is None else f"takes {_longer(best, rival.step)}"
            yield f"Do not use a pipeline: the best layout with one {how}."
        elif rival.kind == "no pipeline" and rival.step is None:
            yield "A pipeline is needed: without one nothing fits."
        elif rival.kind == "no pipeline" and rival.step is not None:
            is_close = rival.step.prediction.step_time_s < best.prediction.step_time_s * (1 + CLOSE)
            close = "which predictions cannot tell apart, and it is simpler" if is_close else "so it is worth having"
            yield f"Without a pipeline a step takes {_longer(best, rival.step)}, {close}."


def _longer(best: SimulatedStep, other: SimulatedStep) -> str:
    return f"{other.prediction.step_time_s / best.prediction.step_time_s - 1:.1%} longer"


def _advice_on_bubble(best: SimulatedStep, changes: Sequence[Change]) -> Iterator[str]:
    more = next((change for change in changes if change.what == "twice the batch"), None)
    share = causes(best)["bubble_s"] / best.prediction.step_time_s
    if best.run.pp > 1 and share > IDLE and more is not None and more.step is not None:
        yield (
            f"The bubble is {share:.0%} of the step, since there are few micro-batches. "
            f"Twice the batch would give {more.speed:.2f} times the tokens a second."
        )


def _advice_on_memory(best: SimulatedStep) -> Iterator[str]:
    share = best.prediction.memory.total_bytes / best.prediction.device_bytes[best.prediction.fullest_rank]
    if share > TIGHT:
        yield (
            f"The fullest device is {share:.0%} full by the prediction. If it runs out of memory, take one of the next "
            "layouts that holds less, or recompute more layers."
        )


def _advice_on_devices(question: Question, best: SimulatedStep, deadline: float | None) -> Iterator[str]:
    # The largest power of two below: axes and batches mostly divide by it.
    fewer = 2 ** ((question.num_devices - 1).bit_length() - 1)
    if fewer < 1 or question.num_devices == 2 * fewer or _is_over(deadline):
        return
    other = search(replace(question, num_devices=fewer), 1, budget_s=_left_s(deadline)).best
    if other is not None and other.prediction.step_time_s <= best.prediction.step_time_s:
        yield (
            f"{question.num_devices} devices divide badly: with {fewer} of them a step takes "
            f"{other.prediction.step_time_s:.4g} s, no longer than with all."
        )


def _advice_on_kinds(best: SimulatedStep, rivals: Sequence[Rival]) -> Iterator[str]:
    for rival in rivals:
        if rival.kind.endswith(ALONE) and rival.step is not None:
            share = rival.step.prediction.step_time_s / best.prediction.step_time_s
            if share <= 1:
                yield f"Leave the other nodes out: with {rival.kind} a step takes {1 - share:.1%} less than with all."
