"""Comparisons of a plan: where the time goes, the best of other kinds of layouts, and answers to changed questions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import fmean
from typing import Any

from pipeloom.analysis.bubble import WAITING
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.stages import layers_by_kind
from pipeloom.cost.what_if import with_bandwidth, with_memory
from pipeloom.families import FAMILIES
from pipeloom.planner.frontier import SortKey
from pipeloom.planner.question import HEADROOM, Limits, Question
from pipeloom.planner.search import Search, is_over, search
from pipeloom.planner.strategies import STRATEGIES, strategy_of
from pipeloom.predict.step import SimulatedStep
from pipeloom.schedule import Kind
from pipeloom.workload.axes import divisors
from pipeloom.workload.run import Run

CAUSES = {
    "compute_s": "compute+tp",
    "exposed_context_s": "exposed context-parallel",
    "recompute_s": "recomputation",
    "waiting_s": WAITING,
    "exposed_p2p_s": "exposed p2p",
    "exposed_swaps_s": "exposed swaps",
    "exposed_data_parallel_s": "exposed data-parallel",
    "optimizer_s": "optimizer",
    "host_s": "host",
}
"""Keys of ``causes`` -> titles. Tensor-parallel collectives count as compute."""
FAR = 1.25
"""Other schedules whose steps take more than this times that of the best layout are not searched further."""
NO_PIPELINE = "DP or FSDP"
"""Title of the rival whose model is not divided over a pipeline."""
_SAME_SPEED = 0.0005
"""Relative difference of two speeds that is printed as 0.0%."""


def causes(step: SimulatedStep) -> dict[str, float]:
    """Seconds of a step by cause, averaged over the pipeline ranks; they add up to the step time.

    Waiting for other ranks is the sum of start-up, imbalance and drain, the bubble without communication; recomputation
    is the time of forwards that run again.
    """
    mean = {name: fmean(account.to_dict()[name] for account in step.accounts) for name in step.accounts[0].to_dict()}
    again_s, around_s = _recompute_s(step), step.ring_s.exposed_s
    return {
        "compute_s": mean["compute_s"] - again_s - around_s,
        "exposed_context_s": around_s,
        "recompute_s": again_s,
        "waiting_s": mean["startup_s"] + mean["imbalance_s"] + mean["drain_s"],
        "exposed_p2p_s": mean["exposed_p2p_s"],
        "exposed_swaps_s": mean["exposed_swaps_s"],
        "exposed_data_parallel_s": mean["exposed_data_parallel_s"],
        "optimizer_s": mean["optimizer_s"],
        "host_s": mean["host_s"],
    }


def main_cause(step: SimulatedStep, other: SimulatedStep) -> str | None:
    """The key of ``causes`` that changes the time per token most in the direction of the whole change.

    ``None`` if the time per token is the same.
    """
    # Tokens of a step: the batches of the two may differ.
    tokens, other_tokens = (one.tokens_per_s * one.prediction.step_time_s for one in (step, other))
    more_s = 1 / other.tokens_per_s - 1 / step.tokens_per_s
    if abs(more_s * step.tokens_per_s) < _SAME_SPEED:
        return None
    ours, theirs = causes(step), causes(other)
    return max(ours, key=lambda name: more_s * (theirs[name] / other_tokens - ours[name] / tokens))


def _recompute_s(step: SimulatedStep) -> float:
    """Seconds of recomputed layers and micro-batches of a step, averaged over the pipeline ranks."""
    run, again_s = step.run, 0.0
    # Recomputed layers are inside backwards, where no span shows them; recomputed micro-batches are spans of their own.
    for stage, rank in zip(layers_by_kind(run, step.software), step.placed.placement.rank_by_stage, strict=True):
        for alike, count in stage:
            if alike.recompute == "full":
                again_s += count * step.placed.of(alike).recompute_s[rank]
    spans = step.trace.spans
    whole_s = float((spans.end_s - spans.start_s)[spans.row.is_kind(Kind.RECOMPUTE)].sum())
    return (again_s * run.num_microbatches + whole_s) / run.pp


def without_pipeline(run: Run) -> str:
    """What a layout without a pipeline is called: FSDP if weights are sharded, else data parallelism (DP)."""
    alone = "TP" if run.tp > 1 else "one device"
    within = "CP" if run.cp > 1 else alone
    sharded = "FSDP" if run.sharded == "full" else "DP"
    return within if run.dp == 1 and sharded == "DP" else sharded


def num_axes(run: Run) -> int:
    """How many axes have several ranks; those that share experts count as one more."""
    return sum(size > 1 for size in run.sizes.values())


@dataclass(frozen=True)
class Alternative:
    """What decides how simple a layout is, beside others.

    Attributes:
        run: its axes, stages and recomputation.
        family: of its schedule.
        strategy: of its memory.
        filled: predicted share of the memory of the fullest device.
    """

    run: Run
    family: str
    strategy: str
    filled: float

    @property
    def complexity(self) -> tuple[bool, int, int, int, bool, int, int, bool]:
        """Criteria of simplicity, the first one first; of two layouts the smaller is simpler.

        No strategy, fewest axes, most room, fewest pipeline ranks, whole backwards (more programs have such schedules),
        fewest stages, smallest tensor axis, no recomputation.
        """
        # Smaller differences of the room are below the error of predicted memory, which the headroom is.
        room = int((1 - self.filled) / HEADROOM)
        splits = self.run.pp > 1 and FAMILIES[self.family].splits_backward
        recomputes = set(self.run.recompute_kinds) != {"none"}
        stages = (self.run.num_stages, self.run.tp, recomputes)
        return self.strategy != "none", num_axes(self.run), -room, self.run.pp, splits, *stages


@dataclass(frozen=True)
class Rival:
    """The best layout of another kind.

    Attributes:
        kind: how it differs.
        step: its step; ``None`` if no such layout fits, or none within ``least_s``.
        more_s: cause -> its seconds minus those of the best layout.
        least_s: all its layouts that fit take longer than this; ``None`` if the fastest was searched.
    """

    kind: str
    step: SimulatedStep | None
    more_s: dict[str, float]
    least_s: float | None = None


@dataclass(frozen=True)
class Change:
    """The best layout of a changed question.

    Attributes:
        what: the change.
        step: the best step; ``None`` if nothing fits.
        speed: its tokens a second, as a multiple of those of the question's best layout.
    """

    what: str
    step: SimulatedStep | None
    speed: float


def rivals(searching: Search, question: Question, best: SimulatedStep, deadline: float) -> Iterator[Rival]:
    """The best layout of each other kind, until the deadline."""

    def against(kind: str, step: SimulatedStep | None) -> Rival:
        if step is None:
            return Rival(kind, None, {})
        ours, theirs = causes(best), causes(step)
        return Rival(kind, step, {name: theirs[name] - ours[name] for name in ours})

    for kind, limits in _kinds(question, best):
        if searching.has(limits) and not is_over(deadline):
            # The proof that a schedule is far slower takes longer than the answer; how much slower matters to nobody.
            within_s = FAR * best.prediction.step_time_s if limits.families is not None else inf
            found = searching.best(1, limits, deadline=deadline, within_s=within_s)
            is_far = found.best is None and found.has_slower and found.open_bound_s is None
            yield Rival(kind, None, {}, within_s) if is_far else against(kind, found.best)
    for kind, other in _alone(question, best):
        if not is_over(deadline):
            yield against(kind, search(other, 1, deadline=deadline).best)


def is_faster(step: SimulatedStep, best: SimulatedStep) -> bool:
    """Whether a step precedes the best one in ``SortKey``, on equally many devices."""
    return step.run.num_devices == best.run.num_devices and SortKey.of(step) < SortKey.of(best)


def _kinds(question: Question, best: SimulatedStep) -> Iterator[tuple[str, Limits]]:
    """(difference to the best layout, limits that require it); some limits allow no layout."""
    run, limits, family = best.run, question.limits, best.knobs.choice.family
    sizes = divisors(question.num_devices)
    pipelines = tuple(pp for pp in sizes[1:] if limits.allows(pp=pp))
    if run.pp > 1 and limits.allows(pp=1):
        yield NO_PIPELINE, Limits(pp=(1,))
    if run.pp == 1 and pipelines:
        yield "a pipeline", Limits(pp=pipelines)
    if question.num_devices > 1:  # on one device, schedules differ in memory alone
        yield from (
            (other, Limits(families=(other,), pp=pipelines or (1,))) for other in question.families if other != family
        )
    yield from _other_sizes(question, run)
    if (name := strategy_of(best)) != "none" and limits.allows(strategies="none"):
        yield STRATEGIES[name].without, Limits(strategies=("none",))
    if run.recompute_kinds != ("none",) and "none" in question.recompute and limits.allows(strategies="none"):
        # A strategy recomputes micro-batches where no layer does.
        yield "nothing recomputed", Limits(recompute=("none",), strategies=("none",))
    if set(run.recompute_kinds) != {"full"} and "full" in question.recompute:
        yield "all layers recomputed", Limits(recompute=("full",))
    if run.sharded != "none" and "none" in question.shards:
        yield "nothing sharded", Limits(shards=("none",))


def _other_sizes(question: Question, run: Run) -> Iterator[tuple[str, Limits]]:
    """The limits that exclude the size of an axis, or of the micro-batches."""
    for name, sizes in _sizes(question).items():
        own = getattr(run, name)
        # Layouts with another pipeline axis are rivals by their schedules.
        if name != "pp" and (others := tuple(size for size in sizes if size != own)):
            limits: dict[str, Any] = {name: others}
            yield f"{name.replace('_', '-')} not {own}", Limits(**limits)


def _sizes(question: Question) -> dict[str, Sequence[int]]:
    """Name of a limit -> the sizes that are searched."""
    devices = divisors(question.num_devices)
    return {
        "tp": devices,
        "cp": question.context_sizes,
        "pp": devices,
        "ep": question.expert_sizes,
        "micro_batch": divisors(question.global_batch),
    }


ALONE = " alone"
"""End of the titles of rivals that use one kind of nodes."""


def _alone(question: Question, best: SimulatedStep) -> Iterator[tuple[str, Question]]:
    """The question on each kind of nodes alone, where the best layout uses several."""
    used = best.cluster.kinds(best.run.num_devices)
    for kind, number in used if len(used) > 1 else ():
        yield f"{number} devices of {kind.name}{ALONE}", replace(question, cluster=kind, num_devices=number)


def changes(question: Question, best: SimulatedStep, deadline: float) -> Iterator[Change]:
    """The best layouts of changed questions near the best one, as far as they are proved before the deadline.

    Near: tensor, context and pipeline axis and micro-batch are at most one divisor away; the strategy is the same.
    A change moves the answer little, and a search of everything for each change takes several times as long as the
    answer itself.
    """
    for what, changed in _changed(question, best):
        other = replace(changed, limits=_near(changed, best))
        if is_over(deadline):
            return
        found = search(other, 1, deadline=deadline)
        # After an incomplete search the change would look worse than it is.
        if found.counts.layouts and found.open_bound_s is None:
            step = found.best
            yield Change(what, step, 0.0 if step is None else step.tokens_per_s / best.tokens_per_s)


def _near(question: Question, best: SimulatedStep) -> Limits:
    """The limits of a question, without layouts that are far from the best one."""
    run, limits = best.run, question.limits

    def around(name: str, sizes: Sequence[int], size: int) -> tuple[int, ...]:
        allowed = [one for one in sizes if limits.allows(**{name: one})]
        below, above = ([one for one in allowed if one < size], [one for one in allowed if one > size])
        return (*below[-1:], *(one for one in allowed if one == size), *above[:1])

    near: dict[str, Any] = {name: around(name, sizes, getattr(run, name)) for name, sizes in _sizes(question).items()}
    return replace(limits, **near, strategies=(strategy_of(best),))


def _changed(question: Question, best: SimulatedStep) -> Iterator[tuple[str, Question]]:
    cluster, batch = question.cluster, question.global_batch

    def on(other: Cluster) -> Question:
        return replace(question, cluster=other)

    if best.run.num_devices > cluster.devices_per_node:
        yield "twice the bandwidth between nodes", on(cluster.each(partial(with_bandwidth, inter=2.0)))
    elif best.run.num_devices > 1:
        yield "twice the bandwidth inside a node", on(cluster.each(partial(with_bandwidth, intra=2.0)))
    yield "10 % more memory", on(cluster.each(partial(with_memory, factor=1.1)))
    for what, other in (("half the batch", batch // 2), ("twice the batch", 2 * batch)):
        # Half of an odd batch is not a whole number.
        if other >= 1 and other in (2 * batch, batch / 2):
            yield what, replace(question, global_batch=other)
