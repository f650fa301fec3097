"""The answer of ``pipeloom plan`` for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pipeloom.cli.run_config import dtype_words
from pipeloom.cost.hardware import Cluster
from pipeloom.planner.advice import is_tie, simplest_tie
from pipeloom.planner.comparison import CAUSES, Change, Rival, causes
from pipeloom.planner.infeasible import MOST_DOUBLINGS, Closest
from pipeloom.planner.plan import Plan
from pipeloom.planner.question import Question
from pipeloom.predict.places import describe_places
from pipeloom.predict.stage_swaps import swapped_amounts
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.console import headed, print_table, table, wide_console
from pipeloom.terminal.words import amount, count, format_bytes, seconds, short, unit_bytes, unit_s

_SHARED = {
    "none": "nothing",
    "optimizer": "the optimizer's state",
    "gradients": "gradients as well",
    "full": "everything",
}
_AGAIN = {"none": "nothing", "selective": "attention", "some": "all layers", "full": "all layers"}
_BAD = "bold red"
PRICE = "$/1e9"
_KEY = (
    "tp +sp: with sequence parallelism; loops: stages of each pipeline rank, +v: placed as a V; micro: micro-batches "
    "of a data-parallel rank, of so many sequences; recompute: layers; exposed: communication not hidden by compute"
)


def print_plan(plan: Plan) -> None:
    """Print the plan; what a table has no room for beside the rest follows below."""
    console = wide_console()
    _print_question(console, plan)
    if plan.best is None:
        _print_nothing(console, plan)
        return
    unit, name = unit_bytes(plan.question.cluster.device.memory_bytes)
    # Devices of several kinds have memories of their own.
    sizes = {kind.device.memory_bytes for kind, _ in _kinds(plan.question)}
    room = " or ".join(short(size / unit) for size in sorted(sizes))
    title = f"The {count(len(plan.steps), 'best layout')}, the best one of each kind; a device has {room} {name}"
    console.print(headed(f"\n{title}"))
    print_table(console, _best_table(plan))
    is_priced = any(step.dollars_per_billion_tokens is not None for step in plan.steps)
    console.print(_KEY + (f"; {PRICE}: dollars for 1e9 tokens" if is_priced else ""))
    _print_layout(console, plan.best)
    if plan.rivals:
        name = unit_s(plan.best.prediction.step_time_s)[1]
        console.print(headed(f"\nWhy row 1 is first: what the best layouts of other kinds take more ({name})"))
        print_table(console, _rival_table(plan.best, plan.rivals))
    if plan.changes:
        console.print(headed("\nWhat would change it"))
        print_table(console, _change_table(plan.best, plan.changes))
    console.print(headed("\nHow far off this may be", f"\n{plan.error_bar.text}"))
    if len(plan.steps) > 1:
        console.print(_on_ties(plan))
    if plan.advice:
        console.print(headed("\nAdvice"))
        for sentence in plan.advice:
            console.print(f"- {sentence}")
    if plan.stopped is not None and plan.open_bound_s is None:
        why = "it was interrupted" if plan.stopped == "interrupt" else "the time was up"
        console.print(f"\n{why} before all other kinds and changes were searched; the best layouts are proved")


def print_next() -> None:
    """Print which flags write a row of the table."""
    wide_console().print(
        "\nNext: the same with --out FOLDER writes row 1 as a run for `pipeloom simulate` and `pipeloom train`, "
        "with --export FOLDER start files for torchrun, Slurm, Megatron-LM and torchtitan; --row N takes another row."
    )


def _print_question(console: Console, plan: Plan) -> None:
    question, counts = plan.question, plan.counts
    console.print(
        f"{question.shape.name or 'model'}, {amount(question.shape.parameters)} parameters, {question.global_batch:,} "
        f"sequences of {question.seq:,} tokens a step, "
        f"{dtype_words(question.precision, is_default=question.has_default_dtype)}; {question.num_devices:,} x "
        f"{_devices(question)} ({question.cluster.name}), trained by {question.software.name}"
    )
    proof = "nothing else can be among the best"
    if plan.open_bound_s is not None:
        open_ = f"{counts.undecided:,} were not searched"
        why = "interrupted" if plan.stopped == "interrupt" else "the time was up"
        proof = f"{why}: {open_}, and one of {seconds(plan.open_bound_s)} a step may be among them"
    console.print(
        f"{counts.layouts:,} layouts in {counts.seconds:.1f} s: {counts.simulated:,} simulated; bounds ruled out "
        f"{counts.too_slow:,} as slower and {counts.too_large:,} as too large; {proof}"
    )
    if counts.tried:
        console.print(f"  {counts.tried} layouts were also tried with strategies (memory, token slices)")
    for cause, number in counts.excluded.most_common():
        console.print(f"  left out: {count(number, 'combination')} of axes, since {cause}")


def _on_ties(plan: Plan) -> str:
    """Which rows the predictions do not rank, and the simplest of them."""
    bar, steps = plan.error_bar, plan.steps
    ties = sum(is_tie(steps[0], step, bar) for step in steps)
    if ties == 1:
        return f"Row 1 is faster than every other row by more than {bar.tie:.1%}."
    simplest = simplest_tie(steps, bar) + 1
    choice = "row 1 is the simplest of them" if simplest == 1 else f"row {simplest} is the simplest of them"
    return (
        f"Step times that differ by less than {bar.tie:.1%} are a tie. Rows 1 to {ties} tie; {choice}. Measure before "
        "you choose a more complex one."
    )


def _devices(question: Question) -> str:
    """What the devices are; of several kinds all that the cluster has."""
    return " and ".join(dict.fromkeys(kind.device.name for kind, _ in _kinds(question)))


def _kinds(question: Question) -> Sequence[tuple[Cluster, int]]:
    # Which kinds a layout uses differs between layouts; the question is about all of them.
    return question.cluster.kinds(question.cluster.num_devices or question.num_devices)


def _print_layout(console: Console, best: SimulatedStep) -> None:
    """What the first row does not contain."""
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
    parts += _strategies(best)
    if run.placement != "looped":
        parts.append(f"stages placed as a {run.placement}")
    console.print(f"the first: {', '.join(parts)}")
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
        parts.append(f"what a rank has no room for in {room} waits at {where}")
    if knobs.device_budget is not None:
        whole = sum(one.total for one in swapped_amounts(run, best.software))
        parts.append(f"at most {format_bytes(knobs.device_budget)} on the device, {format_bytes(whole)} at the host")
    if run.pipeline_order is not None:
        parts.append("partners beside each other on the nodes")
    if run.slices:
        parts.append(f"slices of {', '.join(map(str, run.slices))} tokens")
    return parts


def _best_table(plan: Plan) -> Table:
    """The layouts."""
    unit, name = unit_s(plan.steps[0].prediction.step_time_s)
    memory, bytes_name = unit_bytes(plan.question.cluster.device.memory_bytes)
    rows: list[dict[str, str]] = []
    for step in plan.steps:
        run, seconds = step.run, causes(step)
        exposed_s = seconds["exposed_p2p_s"] + seconds["exposed_data_parallel_s"]
        dollars = step.dollars_per_billion_tokens
        rows.append(
            {
                "tp": f"{run.tp}{'+sp' if run.sequence_parallel else ''}",
                "pp": str(run.pp),
                "dp": str(run.dp),
                "loops": f"{run.loops}{'' if run.placement == 'looped' else '+' + run.placement}",
                "micro": f"{run.num_microbatches} of {run.micro_batch}",
                "schedule": schedule_of(step),
                "sharded": run.shard if run.dp > 1 else "-",
                "recompute": recomputed(step),
                f"step {name}": short(step.prediction.step_time_s / unit),
                "tokens/s": f"{step.tokens_per_s:,.0f}",
                "MFU": f"{step.mfu:.1%}",
                bytes_name: short(step.prediction.memory.total_bytes / memory),
                "bubble": f"{step.bubble_fraction:.1%}",
                "exposed": f"{exposed_s / step.prediction.step_time_s:.1%}",
                PRICE: "-" if dollars is None else f"{dollars:,.0f}",
            }
        )
    # A column in which nobody has anything takes width from the others.
    shown = {name for name in rows[0] if any(row[name] != "-" for row in rows)}
    columns = [name for name in rows[0] if name in shown]
    found = table("", columns)
    for number, row in enumerate(rows, start=1):
        found.add_row(str(number), *(row[name] for name in columns))
    return found


def schedule_of(step: SimulatedStep) -> str:
    """The schedule in a word; without a pipeline it is the order of accumulation."""
    choice = step.knobs.choice
    if choice.pp == 1 and choice.loops == 1:
        return "none"
    family = choice.family if choice.group_size is None else f"{choice.family} {choice.group_size}"
    moved = [name for name in ("balance", "offload") if getattr(step.knobs.moves, name)]
    moved += ["swap"] if step.knobs.device_budget is not None else []
    return ", ".join([family, *moved, *([f"{choice.num_slices} slices"] if choice.num_slices > 1 else [])])


def recomputed(step: SimulatedStep) -> str:
    """What is recomputed in a word: nothing, a number of layers, a share of the micro-batches, all."""
    run = step.run
    if step.knobs.choice.keep is not None:
        return f"{step.recomputed_share:.0%}"
    if run.recompute_layers is not None:
        return f"{sum(kind == 'full' for kind in run.recompute_layers)} of {run.shape.layers}"
    return {"none": "-", "selective": "attention", "full": "all"}[run.recompute]


def _axes(step: SimulatedStep) -> str:
    run = step.run
    batches, shard = f"micro-batches {run.num_microbatches} of {run.micro_batch}", run.shard if run.dp > 1 else "none"
    axes = f"tp {run.tp}{'+sp' if run.sequence_parallel else ''}, pp {run.pp}, dp {run.dp}, {count(run.loops, 'loop')}"
    again = "" if recomputed(step) == "-" else f", {recomputed(step)} recomputed"
    sharded = "nothing" if shard == "none" else shard
    return f"{axes}, {batches}, {schedule_of(step)}, {sharded} sharded{again}"


def _rival_table(best: SimulatedStep, rivals: list[Rival]) -> Table:
    """What each takes more, by cause."""
    unit, _ = unit_s(best.prediction.step_time_s)
    # Causes that differ by less explain nothing that the table shows.
    shown = [name for name in CAUSES if any(abs(rival.more_s.get(name, 0.0)) >= unit / 2 for rival in rivals)]
    rows = table("", ["step", *(CAUSES[name] for name in shown), "layout"], texts=["layout"])
    for rival in rivals:
        if rival.step is None:
            rows.add_row(rival.kind, "none fits", *[""] * len(shown), "")
            continue
        more_s = rival.step.prediction.step_time_s - best.prediction.step_time_s
        cells = [_signed(rival.more_s[name] / unit) for name in shown]
        rows.add_row(rival.kind, _signed(more_s / unit), *cells, _axes(rival.step))
    return rows


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{short(abs(value))}"


def _change_table(best: SimulatedStep, changes: list[Change]) -> Table:
    rows = table("", ["tokens/s", "best layout then"], texts=["best layout then"])
    for change in changes:
        if change.step is None:
            rows.add_row(change.what, "", "nothing fits")
            continue
        is_same = _axes(change.step) == _axes(best)
        rows.add_row(change.what, f"{change.speed - 1:+.1%}", "the same" if is_same else _axes(change.step))
    return rows


def _for_sequences(plan: Plan, near: Closest) -> str:
    """What of the bytes the length of the sequences takes, where shorter ones would fit the layout."""
    if near.sequence_bytes < near.missing_bytes:
        return ""
    unit, name = unit_bytes(plan.question.cluster.device.memory_bytes)
    micro_batch = count(near.leaf.cut.run.micro_batch, "sequence")
    return (
        f"; {short(near.sequence_bytes / unit)} {name} are there for micro-batches of {micro_batch} of "
        f"{plan.question.seq:,} tokens"
    )


def _print_nothing(console: Console, plan: Plan) -> None:
    near = plan.closest
    if near is None and plan.open_bound_s is None:
        console.print(headed("\nnothing fits", "; the search ended before it found what would", _BAD))
        return
    if near is None and plan.stopped == "interrupt":
        console.print(headed("\nnothing that fits was found before the interrupt", style=_BAD))
        return
    if near is None:
        more = ": give it more with --budget-s, or fewer choices with flags such as --tp and --pp"
        console.print(headed("\nnothing that fits was found in that time", more, _BAD))
        return
    question, run = plan.question, near.leaf.cut.run
    unit, name = unit_bytes(question.cluster.device.memory_bytes)
    needs = (
        f": the layout that needs least (tp {run.tp}, pp {run.pp}, dp {run.dp}, "
        f"{count(run.loops, 'loop')}, {near.leaf.choice.family}, micro-batches of {run.micro_batch}, "
        f"{_SHARED[near.leaf.sharding.levels[-1]]} sharded, "
        f"{_AGAIN[near.leaf.cut.arrangement.recomputed]} recomputed) needs "
        f"{short(near.least_bytes / unit)} {name} of {short((near.least_bytes - near.missing_bytes) / unit)}: "
        + (
            f"{short(near.missing_bytes / unit)} {name} are missing on the fullest device{_for_sequences(plan, near)}"
            if near.missing_bytes > 0
            else "by a bound it would fit, but no schedule of it does"
        )
    )
    console.print(headed("\nnothing fits", needs, _BAD))
    if not near.ways_out and plan.stopped is not None:
        why = "the interrupt came" if plan.stopped == "interrupt" else "the time was up"
        console.print(f"{why} before more devices and shorter sequences were all tried")
    elif not near.ways_out:
        console.print(
            f"neither {2**MOST_DOUBLINGS} times as many devices nor shorter sequences are enough; choose a smaller "
            "model, or devices with more memory"
        )
    for line in plan.advice:
        console.print(f"- {line}")
    for what, step in near.ways_out:
        console.print(f"- with {what} it fits: {seconds(step.prediction.step_time_s)} a step ({_axes(step)})")
