"""The answer of ``pipeloom simulate`` for people: headline figures and three tables."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from pipeloom.analysis.summary import communication
from pipeloom.cli.run_config import dtype_words
from pipeloom.predict.places import describe_places
from pipeloom.predict.step import SimulatedStep, memory_that_would_fit
from pipeloom.schedule import Level
from pipeloom.schedule.kinds import LOAD_OF
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE
from pipeloom.terminal.console import headed, print_table, table, wide_console
from pipeloom.terminal.words import amount, count, passes_of, seconds, short, unit_bytes, unit_s

_PARTS = {
    "compute_s": "compute",
    "startup_s": "start-up",
    "imbalance_s": "imbalance",
    "exposed_p2p_s": "exposed p2p",
    "exposed_data_parallel_s": "exposed data-parallel",
    "host_s": "host",
    "drain_s": "drain",
    "optimizer_s": "optimizer",
}
_MOST_RANKS = 12


def print_step(step: SimulatedStep, *, with_lanes: bool, with_peaks: bool, has_default_dtype: bool = False) -> None:
    """Print the step; what a table has no room for beside the rest follows below.

    Args:
        step: the answer.
        with_lanes: whether to print every lane.
        with_peaks: whether to print when each rank holds most.
        has_default_dtype: whether the type is the devices' default.
    """
    console = wide_console()
    _print_headline(console, step, has_default_dtype=has_default_dtype)
    tables = [_account_table(step), _lane_table(step), _memory_table(step)]
    if with_lanes:
        tables.insert(2, _every_lane_table(step))
    if with_peaks:
        tables.append(_peak_table(step))
    for title, rows in tables:
        console.print(headed(f"\n{title}"))
        print_table(console, rows)
    if step.run.pp > _MOST_RANKS:
        console.print("of many pipeline ranks some are shown, the fullest among them; --json has all")
    _print_fit(console, step)


def _recomputation(step: SimulatedStep) -> str:
    run = step.run
    if run.recompute_layers is not None:
        kinds = Counter(run.recompute_layers)
        return f", recomputation of layers: {', '.join(f'{number} {kind}' for kind, number in kinds.items())}"
    if run.recompute == "none":
        return "" if step.order.choice.keep is not None else ", no recomputation"
    return f", {run.recompute} recomputation"


def _print_headline(console: Console, step: SimulatedStep, *, has_default_dtype: bool) -> None:
    run, prediction, schedule = step.run, step.prediction, step.schedule
    kinds = step.cluster.kinds(run.num_devices)
    peaks = dict.fromkeys(kind.device.peak_flops_per_s[run.precision] / 1e12 for kind, _ in kinds)
    shard = "" if run.shard == "none" else f", {run.shard} sharding over {run.shard_size}"
    cut = f" in {count(len(run.slices), 'slice')}" if run.slices else ""
    order = step.order
    passes = passes_of(order.choice.keep, balance=order.moving.balance, offload=order.moving.offload)
    console.print(
        f"{run.shape.name or 'model'}, {amount(run.shape.parameters)} parameters; {order.choice.family}{passes}: "
        f"{run.pp} pipeline x {run.dp} data x {run.tp} tensor ranks, {count(run.loops, 'loop')}; "
        f"{count(schedule.num_microbatches, 'micro-batch')} of {run.micro_batch} x {run.seq:,} tokens{cut}; "
        f"{dtype_words(run.precision, is_default=has_default_dtype)}{_recomputation(step)}{shard}"
    )
    devices = " and ".join(f"{number:,} x {kind.device.name}" for kind, number in kinds)
    console.print(f"{devices} ({step.cluster.name}), trained by {step.software.name}")
    console.print(
        f"seconds of embedding, layer and head: {'measured there' if step.has_measured_pieces else 'from closed forms'}"
    )
    after_s = prediction.step_time_s - prediction.pipeline_s
    lines = {
        "step time": f"{seconds(prediction.step_time_s)}: pipeline {seconds(prediction.pipeline_s)}, "
        f"then {seconds(after_s)}",
        "tokens/s": f"{step.tokens_per_s:,.0f}",
        "MFU": f"{step.mfu:.1%} of {' and '.join(f'{peak:,.4g}' for peak in peaks)} TFLOP/s on each device",
        "HFU": f"{step.hfu:.1%}, what is recomputed counted",
        "bubble fraction": f"{step.bubble_fraction:.1%} of the ranks' time in the pipeline",
    }
    console.print()
    for name, text in lines.items():
        console.print(f"{name:<18}{text}")
    if len(kinds) > 1:
        for number, text in enumerate(describe_places(step.places)):
            console.print(f"{'' if number else 'pipeline ranks':<18}{text}")


def _account_table(step: SimulatedStep) -> tuple[str, Table]:
    """Parts of the step: mean over the ranks, share, least and most."""
    accounts = [account.to_dict() for account in step.accounts]
    unit, name = unit_s(step.prediction.step_time_s)
    rows = table("", ["mean", "share", "least", "most"])
    for part, label in _PARTS.items():
        values = [account[part] / unit for account in accounts]
        mean = sum(values) / len(values)
        if max(values) > 0:
            share = mean * unit / step.prediction.step_time_s
            rows.add_row(label, short(mean), f"{share:.1%}", short(min(values)), short(max(values)))
    whole = step.prediction.step_time_s / unit
    rows.add_row("step", short(whole), "100.0%", short(whole), short(whole), end_section=True)
    return f"Where the step goes ({name})", rows


def _lane_table(step: SimulatedStep) -> tuple[str, Table]:
    """Lanes of communication, those of one kind together: seconds of a rank in the mean."""
    unit, name = unit_s(step.prediction.step_time_s)
    rows = table("", ["busy", "hidden", "exposed", "hidden %"])
    for label, busy, hidden in _lanes(step):
        cells = [short(seconds / unit) for seconds in (busy, hidden, busy - hidden)]
        rows.add_row(label, *cells, f"{hidden / busy:.1%}")
    if not rows.rows:
        rows.add_row("none", "", "", "", "")
    return f"Communication beside compute ({name}, mean of the ranks)", rows


def _every_lane_table(step: SimulatedStep) -> tuple[str, Table]:
    """Every lane of communication of the ranks that are shown."""
    unit, name = unit_s(step.prediction.step_time_s)
    rows = table("lane", ["actions", "busy", "hidden", "exposed"])
    shown = _shown_ranks(step.run.pp, step.prediction.fullest_rank)
    for use in communication(step.trace) if step.schedule.level is Level.COMMUNICATION else []:
        if use.rank in shown:
            cells = [short(seconds / unit) for seconds in (use.busy_s, use.hidden_s, use.exposed_s)]
            rows.add_row(f"{use.rank}: {use.lane}", str(use.num_actions), *cells)
    if not rows.rows:
        rows.add_row("none", "", "", "", "")
    return f"Lanes of communication by rank ({name})", rows


def _lanes(step: SimulatedStep) -> Iterator[tuple[str, float, float]]:
    """(what, seconds under way, seconds of them that compute hides) in the mean of the ranks, where there are any."""
    ranks, terms = step.run.pp, step.prediction.terms
    uses = communication(step.trace) if step.schedule.level is Level.COMMUNICATION else []
    between = [use for use in uses if use.lane.peer is not None]
    collectives = [use for use in uses if use.lane == DATA_PARALLEL_LANE]
    tiers = ((out.lane, back.lane) for out, back in LOAD_OF.items())
    to_partner, to_host = ([use for use in uses if use.lane.name in lanes] for lanes in tiers)
    rows = [
        (label, sum(use.busy_s for use in chosen) / ranks, sum(use.hidden_s for use in chosen) / ranks)
        for label, chosen in (
            ("between stages", between),
            ("data-parallel", collectives),
            ("to partners and back", to_partner),
            ("to the host and back", to_host),
        )
    ]
    rows.append(("between stages, blocking", sum(step.blocked_s) / ranks, 0.0))
    rows.append(("data-parallel, after the pipeline", terms.reduce_s, 0.0))
    rows.append(("tied embedding, after the pipeline", terms.tied_s, 0.0))
    yield from (row for row in rows if row[1] > 0)


_MEMORY = {
    "weights_bytes": "weights",
    "gradients_bytes": "grads",
    "optimizer_bytes": "optim.",
    "activations_bytes": "activations",
    "head_bytes": "logits",
    "buffers_bytes": "recv",
    "reserve_bytes": "reserve",
    "fragmentation_bytes": "fragm.",
}


def _memory_table(step: SimulatedStep) -> tuple[str, Table]:
    memories, limits = step.prediction.memory_by_rank, step.prediction.device_bytes
    unit, name = unit_bytes(limits[step.prediction.fullest_rank])
    are_alike = len(set(limits)) == 1
    parts = [part for part in _MEMORY if any(asdict(memory)[part] for memory in memories)]
    columns = [*(_MEMORY[part] for part in parts), "total", *([] if are_alike else ["of"])]
    rows = table("rank", columns)
    for rank in _shown_ranks(len(memories), step.prediction.fullest_rank):
        memory = memories[rank]
        style = "" if memory.total_bytes <= limits[rank] else "red"
        cells = [*(short(asdict(memory)[part] / unit) for part in parts), short(memory.total_bytes / unit)]
        rows.add_row(str(rank), *cells, *([] if are_alike else [f"{limits[rank] / unit:.4g}"]), style=style)
    return f"Peak memory of each device ({name}{f' of {limits[0] / unit:.4g}' if are_alike else ''})", rows


_PEAK_PARTS = {
    "always": "always",
    "stage inputs": "inputs",
    "accepted": "accepted",
    "working": "work",
    "gathered weights": "gathered",
    "gradients": "grads",
    "receive buffers": "recv",
    "resident stages": "stages",
}


def _peak_table(step: SimulatedStep) -> tuple[str, Table]:
    unit, name = unit_bytes(step.prediction.device_bytes[step.prediction.fullest_rank])
    time_unit, name_s = unit_s(step.prediction.step_time_s)
    curves = step.memory_over_time
    parts = [part for part in _PEAK_PARTS if any(curve.peak_parts[part] for curve in curves)]
    rows = table("rank", ["peak", "at", *(_PEAK_PARTS[part] for part in parts)])
    for rank in _shown_ranks(len(curves), step.prediction.fullest_rank):
        curve = curves[rank]
        cells = [short(curve.peak_parts[part] / unit) for part in parts]
        rows.add_row(str(rank), short(curve.peak_bytes / unit), short(curve.peak_s / time_unit), *cells)
    return f"Memory over time: the peak ({name}), when ({name_s}) and of what", rows


def _shown_ranks(num_ranks: int, fullest: int) -> list[int]:
    """All of few ranks; of many the first, the last, the fullest and some between."""
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    spread = {round(i * (num_ranks - 1) / (_MOST_RANKS - 2)) for i in range(_MOST_RANKS - 1)}
    return sorted(spread | {fullest})


def _print_fit(console: Console, step: SimulatedStep) -> None:
    prediction = step.prediction
    if prediction.fits:
        return
    limit = prediction.device_bytes[prediction.fullest_rank]
    unit, name = unit_bytes(limit)
    memory = prediction.memory
    parts = {label: asdict(memory)[part] for part, label in _MEMORY.items()}
    largest = sorted(parts, key=lambda label: -parts[label])[:3]
    made_of = ", ".join(f"{label} {short(parts[label] / unit)}" for label in largest)
    needs = (
        f": pipeline rank {prediction.fullest_rank} needs {short(memory.total_bytes / unit)} {name} of "
        f"{limit / unit:.4g}; most of it: {made_of}"
    )
    console.print(headed("\ndoes not fit", needs, "bold red"))
    lower = memory_that_would_fit(step)
    for setting, total in lower.items():
        verdict = "fits" if total <= limit else "still too much"
        console.print(f"  {setting}: {short(total / unit)} {name}, {verdict}")
    if not any(total <= limit for total in lower.values()):
        console.print("  none of these is enough: more layout.pp or layout.tp, or fewer micro-batches in flight")
