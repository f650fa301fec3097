"""Advice of a plan: sentences about facts that its tables do not show."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from pipeloom.planner.choice import is_tie, simplest
from pipeloom.planner.comparison import ALONE, NO_PIPELINE, Change, Rival, causes, is_faster, without_pipeline
from pipeloom.planner.error_bar import ErrorBar
from pipeloom.planner.frontier import SAME
from pipeloom.planner.question import ONE_STAGE, Limits, Question
from pipeloom.planner.search import Search, is_over
from pipeloom.planner.strategies import limit_of, strategy_of
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.words import count
from pipeloom.workload.axes import divisors

TIGHT = 0.95
"""Fraction of a device's memory above which advice is given, since predictions of memory are not exact."""
MOST_MFU = 0.95
"""MFU above which a setting is taken for wrong. Chosen, not measured: it leaves 5 % for all that is no product of
matrices."""
IDLE = 0.15
"""Share of a step in which ranks wait for each other, above which advice is given."""


def advice(
    searching: Search,
    question: Question,
    best: SimulatedStep,
    rivals: Sequence[Rival],
    changes: Sequence[Change],
    *,
    bar: ErrorBar,
    deadline: float,
) -> Iterator[str]:
    """Sentences that follow from the layouts that were compared; fewer after the deadline."""
    yield from _on_strategies(question, best)
    yield from _on_pipelines(best, rivals, bar)
    yield from _on_waiting(searching, question, best, changes, bar=bar, deadline=deadline)
    yield from _on_memory(best)
    yield from on_devices(question, best, deadline)
    for rival in rivals:
        if rival.kind.endswith(ALONE) and rival.step is not None and _relative(best, rival.step) <= 0:
            yield f"Do not use the other nodes: on {rival.kind} a step takes {_difference(best, rival.step, bar)}."


def _relative(best: SimulatedStep, other: SimulatedStep) -> float:
    """Relative difference of another layout's step time to the best one's."""
    return other.prediction.step_time_s / best.prediction.step_time_s - 1


def _difference(best: SimulatedStep, other: SimulatedStep, bar: ErrorBar) -> str:
    """Relative difference of another layout's step time, in words, and whether it is a tie."""
    more = _relative(best, other)
    tie = f" by prediction, a tie (below {bar.tie:.1%})" if is_tie(best, other, bar) else ""
    return f"{abs(more):.1%} {'longer' if more >= 0 else 'less'}{tie}"


def on_simpler(
    searching: Search,
    question: Question,
    steps: Sequence[SimulatedStep],
    rivals: Sequence[Rival],
    *,
    bar: ErrorBar,
    deadline: float,
) -> Iterator[str]:
    """A tie without a pipeline that is simpler than all rows that tie, with the smallest tensor axis of such layouts.

    The table ends with the last of the fastest groups, and has the fastest layout of each, so it hides simpler ones.
    """
    without = next((rival.step for rival in rivals if rival.kind == NO_PIPELINE), steps[0])
    if without is None or not is_tie(steps[0], without, bar) or not question.limits.allows(strategies="none"):
        return
    for tp in divisors(question.num_devices):
        found = _without_pipeline(searching, tp, steps[0].prediction.step_time_s * (1 + bar.tie), deadline)
        # Of equally simple ones it is the first, a row.
        plain = simplest([*steps, *found], bar)
        if any(plain is step for step in found):
            equivalent = sum(is_tie(steps[0], step, bar) for step in steps)
            one_stage = " --loops 1" if plain.run.num_stages == 1 else ""
            yield (
                f"A layout simpler than {'all equivalent rows' if equivalent > 1 else 'row 1'} is equivalent, too: "
                f"{_words(plain)}; a step takes {_relative(steps[0], plain):.1%} longer than with the fastest. "
                f"--pp 1 --tp {tp}{one_stage} limits the search to such layouts."
            )
            return


def _without_pipeline(searching: Search, tp: int, within_s: float, deadline: float) -> list[SimulatedStep]:
    """The fastest layouts without a pipeline and with a tensor axis: of any number of stages, and of one."""
    limits = (Limits(pp=(1,), tp=(tp,), strategies=("none",)), replace(ONE_STAGE, tp=(tp,)))
    if is_over(deadline) or not searching.has(limits[0]):
        return []
    found = (searching.best(1, one, deadline=deadline, within_s=within_s).best for one in limits)
    return [step for step in found if step is not None]


def _words(step: SimulatedStep) -> str:
    """A layout without a pipeline."""
    run, (kind, *others) = step.run, sorted(set(step.run.recompute_kinds))
    sharded = "" if run.sharded in ("none", "full") else f" ({run.sharded} sharded)"  # full is FSDP
    split = ", sequence parallel" if run.sequence_parallel else ""
    again = "some layers" if others else {"none": "", "selective": "attention", "full": "all layers"}[kind]
    return (
        f"{without_pipeline(run)}{sharded} with {run.axes.words()}{split}, loops {run.loops}, "
        f"micro-batches of {run.micro_batch}{again and f', {again} recomputed'}"
    )


def on_plain(
    searching: Search, question: Question, best: SimulatedStep, bar: ErrorBar, deadline: float
) -> Iterator[str]:
    """A faster layout without strategies that the limits exclude."""
    name = strategy_of(best)
    if name == "none" or question.limits.allows(strategies="none"):
        return
    plain = searching.best(1, Limits(strategies=("none",)), deadline=deadline).best
    if plain is not None and is_faster(plain, best):
        run, choice = plain.run, plain.knobs.choice
        yield (
            f"A plain layout is faster, which --strategies excludes: without {name} a step takes "
            f"{_difference(best, plain, bar)}, with "
            f"{run.axes.words()}, {choice.family}, micro-batches of {run.micro_batch}. "
            "Add none to --strategies."
        )


def _on_strategies(question: Question, best: SimulatedStep) -> Iterator[str]:
    names = question.limits.strategies
    if names is not None and strategy_of(best) not in names:
        limits = [found for name in names if name != "none" and (found := limit_of(name, question)) is not None]
        reasons = f" ({'; '.join(limits)})" if limits else ""
        yield f"None of these layouts uses {' or '.join(names)}: it is not needed, or it does not help{reasons}."


def _on_pipelines(best: SimulatedStep, rivals: Sequence[Rival], bar: ErrorBar) -> Iterator[str]:
    for rival in rivals:
        if rival.kind == "a pipeline":
            how = "does not fit" if rival.step is None else f"takes {_difference(best, rival.step, bar)}"
            yield f"Do not use a pipeline: the best layout with one {how}."
        elif rival.kind == NO_PIPELINE and rival.step is None:
            yield "A pipeline is needed: with data parallelism, FSDP and tensor parallelism alone nothing fits."
        elif rival.kind == NO_PIPELINE and rival.step is not None:
            verdict, name = ", so the pipeline pays", without_pipeline(rival.step.run)
            if is_tie(best, rival.step, bar):
                verdict = f". {name} is simpler: measure both before you choose the pipeline"
            yield f"With {name} in place of a pipeline a step takes {_difference(best, rival.step, bar)}{verdict}."


def _on_waiting(
    searching: Search,
    question: Question,
    best: SimulatedStep,
    changes: Sequence[Change],
    *,
    bar: ErrorBar,
    deadline: float,
) -> Iterator[str]:
    """Why ranks of a pipeline wait long for each other, and what else to try."""
    waiting_s, step_s, run = causes(best)["waiting_s"], best.prediction.step_time_s, best.run
    if run.pp == 1 or waiting_s <= IDLE * step_s:
        return
    begin = f"Ranks wait for each other in {waiting_s / step_s:.0%} of the step"
    compute_s = [account.to_dict()["compute_s"] for account in best.accounts]
    mean_s = fmean(compute_s)
    # So long all wait for the slowest one on average, however many micro-batches there are. Imbalance of the account
    # also has what the first ranks wait for until backwards arrive.
    if max(compute_s) - mean_s > waiting_s / 2:
        yield (
            f"{begin}, mostly since they compute for unequal times: {count(run.shape.layers, 'layer')} on {run.pp} "
            f"pipeline ranks, the slowest of which computes {max(compute_s) / mean_s:.2f} times as long as the mean. "
            f"{_on_other_pipelines(searching, question, best, bar, deadline)}"
        )
        return
    more = next((change for change in changes if change.what == "twice the batch"), None)
    if more is not None and more.step is not None:
        # Twice the micro-batches halve waits at the ends of a step; half of that gain is evidence enough.
        is_few = more.speed - 1 > waiting_s / step_s / 4
        yield (
            f"{begin}{', since there are few micro-batches' if is_few else ''}. "
            f"Twice the batch would give {more.speed:.2f} times the tokens a second."
        )


def _on_other_pipelines(
    searching: Search, question: Question, best: SimulatedStep, bar: ErrorBar, deadline: float
) -> str:
    """What layouts with other numbers of pipeline ranks take."""
    sizes = [size for size in divisors(question.num_devices)[1:] if size != best.run.pp]
    limits = Limits(pp=tuple(size for size in sizes if searching.has(Limits(pp=(size,)))))
    if not limits.pp:
        wider = "wider limits, " if question.limits.names else ""
        return f"Fewer ranks, or a number that divides the layers, need {wider}other devices or another batch."
    found = searching.best(1, limits, deadline=deadline).best
    if found is None:
        return "No layout was found that fits with another number of them."
    return f"With {found.run.pp} of them a step takes {_difference(best, found, bar)}."


def _on_memory(best: SimulatedStep) -> Iterator[str]:
    share = best.prediction.filled
    if share > TIGHT:
        yield (
            f"By prediction the fullest device is {share:.0%} full. If it runs out of memory, take a row with less "
            "memory, or recompute more layers."
        )


def on_values(best: SimulatedStep) -> Iterator[str]:
    """The settings that make a predicted MFU above ``MOST_MFU``."""
    if best.mfu <= MOST_MFU:
        return
    device, software = best.cluster.device, best.software
    curve = device.matmul_curves.get(best.run.precision, device.matmul_curve)
    yield (
        f"The predicted MFU of {best.mfu:.1%} is above {MOST_MFU:.0%}, which is not plausible. It follows from "
        f"matmul_fraction of {best.cluster.name} (up to {max(part for _, part in curve):.2f}) times matmul of "
        f"{software.name} ({software.efficiency.matmul:.2f}): correct them, or the device's peak_tflop_per_s."
    )


def on_devices(question: Question, best: SimulatedStep, deadline: float) -> Iterator[str]:
    """That a step takes no longer on fewer devices, since devices or batch do not divide, or the batch is small."""
    # The largest smaller power of two, which divides most batches and axes.
    fewer = 2 ** ((question.num_devices - 1).bit_length() - 1)
    is_power = question.num_devices == 2 * fewer
    # With a sequence for each device, half of the devices have twice the work.
    if fewer < 1 or is_over(deadline) or (is_power and question.global_batch >= question.num_devices):
        return
    now_s = best.prediction.step_time_s
    # Slower steps do not matter here, and most searches of half the devices end at their first bound.
    within_s = now_s * (1 + SAME)
    other = Search(replace(question, num_devices=fewer)).best(1, deadline=deadline, within_s=within_s).best
    if other is not None and other.prediction.step_time_s <= now_s:
        why = f"{question.num_devices:,} devices do not divide well"
        if is_power:
            sequences = count(question.global_batch, "sequence")
            why = f"{question.num_devices:,} devices are too many for {sequences} a step"
        yield (f"{why}: on {fewer:,} of them a step takes {other.prediction.step_time_s:.4g} s, no longer than on all.")
