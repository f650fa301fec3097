"""Layouts in the words and tables of ``pipeloom plan``, with what other layouts and questions would change."""

from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10

from rich.table import Table

from pipeloom.planner.comparison import CAUSES, Change, Rival, causes, main_cause
from pipeloom.planner.infeasible import Closest
from pipeloom.planner.plan import Plan
from pipeloom.planner.question import Question
from pipeloom.planner.strategies import strategy_of
from pipeloom.predict.places import describe_places
from pipeloom.predict.stage_swaps import swapped_amounts
from pipeloom.predict.step import SimulatedStep
from pipeloom.predict.traffic import boundary_traffic
from pipeloom.terminal.console import table
from pipeloom.terminal.words import count, format_bytes, short, unit_bytes, unit_s
from pipeloom.workload.axes import IN_SENTENCES

_SHARDED = {
    "none": "nothing",
    "optimizer": "the optimizer's state",
    "gradients": "optimizer state and gradients",
    "full": "optimizer state, gradients and weights",
}
_RECOMPUTED = {"none": "nothing", "selective": "attention", "some": "all layers", "full": "all layers"}
_DIGITS = 4
"""Digits of the step time of the best layout in the table of differences; all rows have as many decimals."""


def layout_cells(step: SimulatedStep) -> dict[str, str]:
    """Title of a column -> value of the layout, or ``-``. Without a pipeline there is no schedule of stages."""
    run, has_schedule = step.run, step.run.pp > 1 or strategy_of(step) != "none"
    return {
        **run.axes.cells,
        "tp": f"{run.tp}{'+sp' if run.sequence_parallel else ''}",
        "ep": f"{run.ep}{'+o' if run.ep_overlap else ''}" if run.ep > 1 else "-",
        "micro": f"{run.num_microbatches} x {run.micro_batch}",
        "schedule": family_words(step) if has_schedule else "-",
        # Without a pipeline too: the stages whose weights are gathered, or whose gradients are reduced, one by one.
        "loops": f"{run.loops}{'' if run.placement == 'looped' else '+' + run.placement}"
        if has_schedule or run.loops > 1
        else "-",
        "sharded": run.sharded if run.sharded != "none" else "-",
        "recompute": _recomputed(step),
    }


def communication_cells(step: SimulatedStep) -> dict[str, str]:
    """Title of a column -> bubble of a pipeline, and exposed communication, as shares of the step."""
    exposed_s = sum(seconds for cause, seconds in causes(step).items() if cause.startswith("exposed"))
    return {
        "bubble": "-" if step.run.pp == 1 else f"{step.bubble_fraction:.1%}",
        "exposed": f"{exposed_s / step.prediction.step_time_s:.1%}",
    }


def family_words(step: SimulatedStep) -> str:
    """Schedule family with its group size, and the strategies."""
    choice = step.knobs.choice
    if step.knobs.found is not None:
        return "found order"
    family = choice.family if choice.group_size is None else f"{choice.family} {choice.group_size}"
    moved = [name for name in ("balance", "offload") if getattr(step.knobs.moves, name)]
    moved += ["swap"] if step.knobs.device_budget is not None else []
    return ", ".join([family, *moved, *([f"{choice.num_slices} slices"] if choice.num_slices > 1 else [])])


def _recomputed(step: SimulatedStep) -> str:
    """Recomputed part: layers, or a share of the micro-batches."""
    run = step.run
    if step.knobs.choice.keep is not None:
        return f"{step.recomputed_share:.0%}"
    if run.recompute_layers is not None:
        return f"{sum(kind == 'full' for kind in run.recompute_layers)} of {run.shape.layers}"
    return {"none": "-", "selective": "attention", "full": "all"}[run.recompute]


_SETTING: Mapping[str, str] = {
    **{name: f"{name} {{}}" for name in (*IN_SENTENCES, "ep")},
    "micro": "micro {}",
    "schedule": "{}",
    "loops": "loops {}",
    "sharded": "{} sharded",
    "recompute": "{} recomputed",
}
"""Title of a column -> its value in a sentence."""
_ABSENT: Mapping[str, str] = {"sharded": "nothing", "recompute": "nothing", **dict.fromkeys((*IN_SENTENCES, "ep"), "1")}
"""Title of a column -> what ``-`` is there in a sentence about a difference."""


def settings_words(step: SimulatedStep, best: SimulatedStep | None = None) -> str:
    """The layout in a line; with ``best``, only what differs from that layout."""
    known = dict[str, str]() if best is None else layout_cells(best)
    parts = [
        _SETTING[name].format(_ABSENT[name] if value == "-" else value)
        for name, value in layout_cells(step).items()
        if value != known.get(name) and (value != "-" or (known and name in _ABSENT))
    ]
    return ", ".join(parts) or "nothing"


_SHORT_CAUSES = {
    "waiting_s": "waiting",
    "recompute_s": "recompute",
    "exposed_context_s": "cp",
    "exposed_p2p_s": "p2p",
    "exposed_swaps_s": "swaps",
    "exposed_data_parallel_s": "dp",
}


def rival_table(best: SimulatedStep, rivals: Sequence[Rival], row: int) -> Table:
    """Additional time of each rival by cause, and its layout."""
    differs = f"differs from row {row} in"
    unit, _ = unit_s(best.prediction.step_time_s)
    digits = max(0, _DIGITS - 1 - floor(log10(best.prediction.step_time_s / unit)))
    # Causes that are 0 in every row are left out.
    shown = [name for name in CAUSES if any(abs(rival.more_s.get(name, 0.0)) >= unit / 2 for rival in rivals)]
    rows = table("", ["step", *(_SHORT_CAUSES.get(name, CAUSES[name]) for name in shown), differs], texts=[differs])
    for rival in rivals:
        if rival.step is None:
            far = None if rival.least_s is None else rival.least_s - best.prediction.step_time_s
            words = "none fits" if far is None else f"> {_signed(far / unit, digits)}"
            rows.add_row(rival.kind, words, *[""] * len(shown), "")
            continue
        more_s = [rival.step.prediction.step_time_s - best.prediction.step_time_s]
        more_s += [rival.more_s[name] for name in shown]
        rows.add_row(rival.kind, *(_signed(one / unit, digits) for one in more_s), settings_words(rival.step, best))
    return rows


def _signed(value: float, digits: int) -> str:
    rounded = round(value, digits)
    return f"{rounded:+,.{digits}f}" if rounded else "0"


def change_table(best: SimulatedStep, changes: Sequence[Change], row: int) -> Table:
    """Tokens/s of each changed question against those of a row, the main cause, and its layout."""
    differs = f"differs from row {row} in"
    rows = table("", ["tokens/s", "mainly", differs], texts=["mainly", differs])
    for change in changes:
        if change.step is None:
            rows.add_row(change.what, "", "", "nothing fits")
            continue
        cause = main_cause(best, change.step)
        mainly = "" if cause is None else f"{'less' if change.speed > 1 else 'more'} {CAUSES[cause]}"
        rows.add_row(change.what, f"{change.speed - 1:+.1%}", mainly, settings_words(change.step, best))
    return rows


def strategy_words(best: SimulatedStep) -> list[str]:
    """The settings of the layout's strategy."""
    run, knobs, parts = best.run, best.knobs, list[str]()
    if knobs.choice.keep is not None:
        kept = ", ".join(map(str, knobs.choice.keep))
        parts.append(f"{kept} stage inputs kept whole by rank, the others recomputed")
    if knobs.moves.is_any and knobs.moves.budget_bytes is not None:
        where = "partners" if knobs.moves.balance else "the host"
        unit, name = unit_bytes(knobs.moves.budget_bytes)
        room = f"{short(knobs.moves.budget_bytes / unit)} {name}"
        parts.append(f"activations above {room} moved to {where}")
    if knobs.device_budget is not None:
        whole = sum(one.total for one in swapped_amounts(run, best.software))
        parts.append(f"at most {format_bytes(knobs.device_budget)} on the device, {format_bytes(whole)} at the host")
    if run.pipeline_order is not None:
        parts.append("partners on neighboring pipeline ranks")
    if run.slices:
        parts.append(f"slices of {', '.join(map(str, run.slices))} tokens")
    return parts


def layout_lines(best: SimulatedStep) -> Iterator[str]:
    """The settings of the first row that have no column."""
    run, knobs = best.run, best.knobs
    parts = [f"{count(run.num_stages, 'stage')}"]
    if run.layers_by_stage is not None and run.num_stages > 1:
        least, most = min(run.layers_by_stage), max(run.layers_by_stage)
        parts.append(f"{count(least, 'layer')} each" if least == most else f"{least} to {most} layers each")
    if run.sharded != "none":
        parts.append(f"{run.shard} sharded over {run.shard_size} of {run.data_ranks} data-parallel ranks")
    if run.sharded == "full":
        parts.append(f"{count(knobs.residency, 'stage')} gathered at once")
    if run.recompute_layers is not None:
        again = sum(kind == "full" for kind in run.recompute_layers)
        parts.append(f"{again} of {run.shape.layers} layers recomputed")
    if run.loops > 1 and layout_cells(best)["schedule"] == "-":
        parts.append(f"gradients accumulated in the order of {family_words(best)}")
    parts += strategy_words(best)
    parts.append(f"{best.tokens_per_s:,.0f} tokens/s")
    if run.placement != "looped":
        parts.append(f"stages placed as a {run.placement}")
    yield f"row 1: {', '.join(parts)}"
    traffic = boundary_traffic(best.placed)
    if traffic is not None:
        yield f"between its stages: {traffic}"
    if len(best.cluster.kinds(run.num_devices)) > 1:
        yield f"pipeline ranks {'; '.join(describe_places(best.places))}"


def closest_words(plan: Plan, near: Closest) -> str:
    """The layout that lacks the least memory."""
    question, run = plan.question, near.leaf.cut.run
    unit, name = unit_bytes(question.cluster.device.memory_bytes)
    stages = f"{near.leaf.choice.family}, loops {run.loops}, " if run.pp > 1 else ""
    lacks = (
        f"{short(near.missing_bytes / unit)} {name} are missing on the fullest device{_for_sequences(plan, near)}"
        if near.missing_bytes > 0
        else "its lower bound fits, but none of its schedules does"
    )
    return (
        f": the layout that needs least ({run.axes.words()}, micro-batches of {run.micro_batch}, "
        f"{stages}{_SHARDED[near.leaf.sharding.levels[-1]]} sharded, "
        f"{_RECOMPUTED[near.leaf.cut.arrangement.recomputed]} recomputed) needs "
        f"{short(near.least_bytes / unit)} {name} of {short(near.room_bytes / unit)}"
        f"{_less_headroom(question)}: {lacks}"
    )


def _for_sequences(plan: Plan, near: Closest) -> str:
    """Bytes that grow with the sequence length, if shorter sequences would make the layout fit."""
    if near.sequence_bytes < near.missing_bytes:
        return ""
    unit, name = unit_bytes(plan.question.cluster.device.memory_bytes)
    micro_batch = count(near.leaf.cut.run.micro_batch, "sequence")
    return (
        f"; {short(near.sequence_bytes / unit)} {name} grow with the length of the sequences (micro-batches of "
        f"{micro_batch} of {plan.question.seq:,} tokens)"
    )


def _less_headroom(question: Question) -> str:
    return f" (a device less its headroom of {question.headroom:.0%})" if question.headroom else ""
