"""Text output of ``pipeloom plan``."""

import shlex
from collections.abc import Mapping, Sequence
from math import floor, log10

from rich.console import Console
from rich.table import Table

from pipeloom.cli.goals import choice_lines, training_words
from pipeloom.cli.run_config import dtype_words
from pipeloom.cost.hardware import Cluster
from pipeloom.planner.comparison import CAUSES, Change, Rival, causes, main_cause, without_pipeline
from pipeloom.planner.goals import Goal, Training
from pipeloom.planner.infeasible import MOST_DOUBLINGS, Closest
from pipeloom.planner.plan import Plan
from pipeloom.planner.question import Question
from pipeloom.planner.strategies import strategy_of
from pipeloom.predict.places import describe_places
from pipeloom.predict.stage_swaps import swapped_amounts
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.console import headed, print_table, table, wide_console
from pipeloom.terminal.words import amount, count, format_bytes, seconds, short, unit_bytes, unit_s
from pipeloom.workload.launchers import Launcher

_SHARDED = {
    "none": "nothing",
    "optimizer": "the optimizer's state",
    "gradients": "optimizer state and gradients",
    "full": "optimizer state, gradients and weights",
}
_SHORT_SHARDED = {"optimizer": "optim", "gradients": "grads"}
_RECOMPUTED = {"none": "nothing", "selective": "attention", "some": "all layers", "full": "all layers"}
_BAD = "bold red"
PRICE = "$/1e9"
_WIDTH = 120
"""Most characters in a line of prose, or of a table that ends in text."""
_DIGITS = 4
"""Digits of the step time of the best layout in the table of differences; all rows have as many decimals."""
_KEY = (
    "tp +sp: with sequence parallelism. micro: micro-batches of each data-parallel rank x sequences in each. schedule: "
    "DP (data parallelism) and FSDP have no pipeline. loops: stages of each pipeline rank, +v: in V placement. "
    "sharded: optim, grads, full (--shards). recomp: recomputed layers. bubble: ranks wait for other ranks. exposed: "
    "ranks wait for communication."
)


def print_plan(plan: Plan, training: Training | None = None, goal: Goal | None = None) -> None:
    """Print the answer, how long a training takes, and whether that is within a goal."""
    console = wide_console(_WIDTH)
    _print_question(console, plan)
    if plan.best is None:
        _print_nothing(console, plan)
        return
    unit, name = unit_bytes(plan.question.cluster.device.memory_bytes)
    # A cluster may have devices of several kinds.
    sizes = {kind.device.memory_bytes for kind, _ in _kinds(plan.question)}
    room = " or ".join(short(size / unit) for size in sorted(sizes))
    title = f"The {count(len(plan.steps), 'best layout')}, the best one of each kind; a device has {room} {name}"
    title += _kept_free(plan.question)
    console.print(headed(f"\n{title}"))
    console.print(_on_order(plan))
    print_table(wide_console(), _best_table(plan))
    is_priced = any(step.dollars_per_billion_tokens is not None for step in plan.steps)
    console.print(_KEY + (f" {PRICE}: dollars for 1e9 tokens." if is_priced else ""))
    _print_layout(console, plan.rows[0])
    if training is not None:
        cost = training.cost(plan.rows[0])
        console.print(training_words(training, plan.rows[0].run.global_batch, cost, "row 1"))
        if goal is not None:
            lines = choice_lines(goal, [cost], lambda _: "row 1", lambda _: plan.error_bar)
            console.print(f"goal: {'. '.join(lines)}")
    fastest = _fastest_row(plan)
    if plan.rivals:
        name = unit_s(plan.best.prediction.step_time_s)[1]
        console.print(
            headed(
                f"\nWhy row {fastest} is the fastest",
                f": the best layout of each other kind takes more {name}, by cause",
            )
        )
        print_table(console, _rival_table(plan.best, plan.rivals, fastest))
        console.print("compute+tp: with tensor-parallel communication. p2p, dp: exposed communication of these axes.")
    if plan.changes:
        console.print(headed("\nWhat would change the answer"))
        print_table(console, _change_table(plan.best, plan.changes, fastest))
    console.print(headed("\nExpected error"))
    on_speed = plan.error_bar.on_speed(plan.rows[0].tokens_per_s, plan.rows[0].mfu)
    step_times, *comparisons = plan.error_bar.sentences
    for sentence in [step_times, *filter(None, [on_speed]), *comparisons]:
        console.print(f"- {sentence}")
    if plan.advice:
        console.print(headed("\nAdvice"))
        for sentence in plan.advice:
            console.print(f"- {sentence}")
    if plan.stopped is not None and plan.open_bound_s is None:
        why = "interrupted" if plan.stopped == "interrupt" else "the time was up"
        console.print(f"\n{why} before all other kinds and changes were searched; the search for the best was complete")


def print_next(words: Sequence[str], launcher: Launcher) -> None:
    """Print the command that writes a layout of the table; these words behind ``pipeloom plan`` printed the table."""
    if launcher.is_own:
        text = (
            "\nNext: write row 1 as a run file and a schedule for `pipeloom train`. --row N takes another row; --export"
            " start in place of --out planned writes start files for torchrun, Slurm, torchtitan and Megatron-LM."
        )
        print_command(text, [*words, "--out", "planned"])
    else:
        text = f"\nNext: write start files of {launcher.title} for row 1. --row N takes another row."
        print_command(text, [*words, "--export", "start"])


def print_command(text: str, words: Sequence[str]) -> None:
    """Print a sentence, and ``pipeloom plan`` with these words, in lines that can be pasted."""
    console = wide_console(_WIDTH)
    console.print(text)
    parts = ["  pipeloom plan"]  # each flag with its values
    for word in words:
        if word.startswith("--"):
            parts.append("")
        parts[-1] += f" {shlex.quote(word)}"
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > console.width - len(" \\"):
            lines.append("   ")
        lines[-1] += part
    # Each line ends in a backslash, so that the command can be pasted; the terminal wraps a word that is too long.
    console.print(" \\\n".join(lines), soft_wrap=True)


def _print_question(console: Console, plan: Plan) -> None:
    question, counts = plan.question, plan.counts
    console.print(
        f"{question.shape.name or 'model'}, {amount(question.shape.parameters)} parameters, {question.global_batch:,} "
        f"sequences of {question.seq:,} tokens a step, "
        f"{dtype_words(question.precision, is_default=question.has_default_dtype)}; {question.num_devices:,} x "
        f"{_devices(question)} ({question.cluster.name}), trained by {_program(question)}"
    )
    proof = "; by prediction, none of these is among the best" if plan.best is not None else ""
    if plan.open_bound_s is not None:
        why = "interrupted" if plan.stopped == "interrupt" else "the time was up"
        proof = f"; {why}: {counts.undecided:,} not searched, which take at least {seconds(plan.open_bound_s)} a step"
    pruned = {"slower": counts.too_slow, "too large": counts.too_large}
    excluded = ", ".join(f"{number:,} {why}" for why, number in pruned.items() if number)
    console.print(
        f"{counts.layouts:,} layouts in {counts.seconds:.1f} s: {counts.simulated:,} simulated"
        f"{f'; excluded by lower bounds: {excluded}' if excluded else ''}{proof}"
    )
    if counts.tried:
        console.print(f"  {counts.tried} layouts were also tried with strategies (memory, token slices)")
    for cause, number in counts.excluded.most_common():
        console.print(f"  left out: {count(number, 'combination')} of axes, since {cause}")


def _program(question: Question) -> str:
    if question.launcher.is_own:
        return question.software.name
    return f"{question.launcher.title} (only what it can run, at the measured speed of {question.software.name})"


def _kept_free(question: Question) -> str:
    return f", {question.headroom:.0%} of it kept free" if question.headroom else ""


def _fastest_row(plan: Plan) -> int:
    """Number of the row with the shortest predicted step, from 1."""
    return [step is plan.best for step in plan.rows].index(True) + 1


def _on_order(plan: Plan) -> str:
    """Which rows the predictions do not distinguish, and how the rows are sorted."""
    bar, ties, fastest = plan.error_bar.tie, plan.num_equivalent, _fastest_row(plan)
    if len(plan.steps) == 1:
        return f"By prediction; two layouts are compared with an error of {bar:.1%}."
    if ties == 1:
        return f"Row 1 is faster than every other row by more than the error of a comparison, {bar:.1%}."
    rows = "Rows 1 and 2" if ties == 2 else f"Rows 1 to {ties}"
    return (
        f"{rows} (~) are equivalent: within {bar:.1%}, the error of a comparison. The simplest is first; by prediction "
        f"row {fastest} is the fastest."
    )


def _devices(question: Question) -> str:
    """Names of the cluster's kinds of devices."""
    return " and ".join(dict.fromkeys(kind.device.name for kind, _ in _kinds(question)))


def _kinds(question: Question) -> Sequence[tuple[Cluster, int]]:
    # Which kinds a layout uses differs between layouts; the question is about all of them.
    return question.cluster.kinds(question.cluster.num_devices or question.num_devices)


def _print_layout(console: Console, best: SimulatedStep) -> None:
    """Print the settings of the first row that have no column."""
    run, knobs = best.run, best.knobs
    parts = [f"{count(run.num_stages, 'stage')}"]
    if run.layers_by_stage is not None and run.num_stages > 1:
        least, most = min(run.layers_by_stage), max(run.layers_by_stage)
        parts.append(f"{count(least, 'layer')} each" if least == most else f"{least} to {most} layers each")
    if run.shard != "none" and run.dp > 1:
        parts.append(f"{run.shard} sharded over {run.shard_size} of {run.dp} data-parallel ranks")
    if run.shard == "full" and run.dp > 1:
        parts.append(f"{count(knobs.residency, 'stage')} gathered at once")
    if run.recompute_layers is not None:
        again = sum(kind == "full" for kind in run.recompute_layers)
        parts.append(f"{again} of {run.shape.layers} layers recomputed")
    if run.loops > 1 and layout_cells(best)["schedule"] == "-":
        parts.append(f"gradients accumulated in the order of {_family(best)}")
    parts += _strategies(best)
    parts.append(f"{best.tokens_per_s:,.0f} tokens/s")
    if run.placement != "looped":
        parts.append(f"stages placed as a {run.placement}")
    console.print(f"row 1: {', '.join(parts)}")
    if len(best.cluster.kinds(run.num_devices)) > 1:
        console.print(f"pipeline ranks {'; '.join(describe_places(best.places))}")


def _strategies(best: SimulatedStep) -> list[str]:
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


def _best_table(plan: Plan) -> Table:
    """The table of layouts."""
    time, memory = (
        unit_s(plan.steps[0].prediction.step_time_s),
        unit_bytes(plan.question.cluster.device.memory_bytes),
    )
    rows: list[dict[str, str]] = []
    for step in plan.rows:
        whole_s, cause_s, run = step.prediction.step_time_s, causes(step), step.run
        exposed_s = cause_s["exposed_p2p_s"] + cause_s["exposed_data_parallel_s"]
        rows.append(
            {
                **_short_cells(step),
                **figure_cells(step, time, memory),
                "bubble": "-" if run.pp == 1 else f"{cause_s['bubble_s'] / whole_s:.1%}",
                "exposed": f"{exposed_s / whole_s:.1%}",
            }
        )
    return table_of_cells(
        "",
        {
            f"{number}{'~' if 1 < plan.num_equivalent >= number else ''}": row
            for number, row in enumerate(rows, start=1)
        },
    )


def table_of_cells(first: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
    """Name of a row -> title of a column -> cell, as a table; ``first`` is the names' title."""
    cells = list(rows.values())
    # Columns without any value would take width from the others.
    columns = [title for title in cells[0] if any(row[title] != "-" for row in cells)]
    found = table(first, columns)
    for name, row in rows.items():
        found.add_row(name, *(row[title] for title in columns))
    return found


def figure_cells(step: SimulatedStep, time: tuple[float, str], memory: tuple[float, str]) -> dict[str, str]:
    """Title of a column -> step time, MFU, memory of the fullest device and price.

    Args:
        step: of the layout.
        time: of ``unit_s``.
        memory: of ``unit_bytes``.
    """
    dollars = step.dollars_per_billion_tokens
    return {
        f"step {time[1]}": short(step.prediction.step_time_s / time[0]),
        "MFU": f"{step.mfu:.1%}",
        memory[1]: short(step.prediction.memory.total_bytes / memory[0]),
        PRICE: "-" if dollars is None else f"{dollars:,.0f}",
    }


def _short_cells(step: SimulatedStep) -> dict[str, str]:
    """``layout_cells`` in few characters, so that the table fits 100 columns."""
    cells, run = layout_cells(step), step.run
    if cells["schedule"] == "-":
        cells["schedule"] = without_pipeline(run)
    cells["micro"] = cells["micro"].replace(" ", "")
    cells["sharded"] = _SHORT_SHARDED.get(cells["sharded"], cells["sharded"])
    cells["recomp"] = cells.pop("recompute").replace(" of ", "/").replace("attention", "attn")
    return cells


def layout_cells(step: SimulatedStep) -> dict[str, str]:
    """Title of a column -> value of the layout, or ``-``. Without a pipeline there is no schedule of stages."""
    run, has_schedule = step.run, step.run.pp > 1 or strategy_of(step) != "none"
    return {
        "tp": f"{run.tp}{'+sp' if run.sequence_parallel else ''}",
        "pp": str(run.pp),
        "dp": str(run.dp),
        "micro": f"{run.num_microbatches} x {run.micro_batch}",
        "schedule": _family(step) if has_schedule else "-",
        # Without a pipeline too: the stages whose weights are gathered, or whose gradients are reduced, one by one.
        "loops": f"{run.loops}{'' if run.placement == 'looped' else '+' + run.placement}"
        if has_schedule or run.loops > 1
        else "-",
        "sharded": run.shard if run.dp > 1 and run.shard != "none" else "-",
        "recompute": _recomputed(step),
    }


def _family(step: SimulatedStep) -> str:
    """Schedule family with its group size, and the strategies."""
    choice = step.knobs.choice
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
    "tp": "tp {}",
    "pp": "pp {}",
    "dp": "dp {}",
    "micro": "micro {}",
    "schedule": "{}",
    "loops": "loops {}",
    "sharded": "{} sharded",
    "recompute": "{} recomputed",
}
"""Title of a column -> its value in a sentence."""


def settings_words(step: SimulatedStep, best: SimulatedStep | None = None) -> str:
    """The layout in a line; with ``best``, only what differs from that layout."""
    known = dict[str, str]() if best is None else layout_cells(best)
    parts = [
        _SETTING[name].format("nothing" if value == "-" else value)
        for name, value in layout_cells(step).items()
        if value != known.get(name) and (value != "-" or (known and name in ("sharded", "recompute")))
    ]
    return ", ".join(parts) or "nothing"


_SHORT_CAUSES = {"recompute_s": "recompute", "exposed_p2p_s": "p2p", "exposed_data_parallel_s": "dp"}


def _rival_table(best: SimulatedStep, rivals: Sequence[Rival], row: int) -> Table:
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


def _change_table(best: SimulatedStep, changes: Sequence[Change], row: int) -> Table:
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


def _print_nothing(console: Console, plan: Plan) -> None:
    near = plan.closest
    if near is None and plan.open_bound_s is None:
        console.print(headed("\nnothing fits", "; the search ended before it found a change that would help", _BAD))
        return
    if near is None and plan.stopped == "interrupt":
        console.print(headed("\nnothing that fits was found before the interrupt", style=_BAD))
        return
    if near is None:
        more = ": raise --budget-s, or limit the search with flags such as --tp and --pp"
        console.print(headed("\nnothing that fits was found in that time", more, _BAD))
        return
    question, run = plan.question, near.leaf.cut.run
    unit, name = unit_bytes(question.cluster.device.memory_bytes)
    stages = f"{near.leaf.choice.family}, loops {run.loops}, " if run.pp > 1 else ""
    needs = (
        f": the layout that needs least (tp {run.tp}, pp {run.pp}, dp {run.dp}, micro-batches of {run.micro_batch}, "
        f"{stages}{_SHARDED[near.leaf.sharding.levels[-1]]} sharded, "
        f"{_RECOMPUTED[near.leaf.cut.arrangement.recomputed]} recomputed) needs "
        f"{short(near.least_bytes / unit)} {name} of {short((near.least_bytes - near.missing_bytes) / unit)}"
        f"{_less_headroom(question)}: "
        + (
            f"{short(near.missing_bytes / unit)} {name} are missing on the fullest device{_for_sequences(plan, near)}"
            if near.missing_bytes > 0
            else "its lower bound fits, but none of its schedules does"
        )
    )
    console.print(headed("\nnothing fits", needs, _BAD))
    if not near.ways_out and plan.stopped is not None:
        why = "interrupted" if plan.stopped == "interrupt" else "the time was up"
        console.print(f"{why} before more devices and shorter sequences were tried")
    elif not near.ways_out:
        console.print(
            f"with {2**MOST_DOUBLINGS} times as many devices, or with shorter sequences, nothing fits either; choose a "
            "smaller model, or devices with more memory"
        )
    for line in plan.advice:
        console.print(f"- {line}")
    for what, step in near.ways_out:
        console.print(f"- with {what} it fits: {seconds(step.prediction.step_time_s)} a step ({settings_words(step)})")
