"""The text that ``pipeloom simulate`` prints: headline figures and three tables of what ``--json`` prints."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeloom.cli.run_config import dtype_words
from pipeloom.predict.places import describe_places
from pipeloom.predict.step import SimulatedStep
from pipeloom.predict.traffic import boundary_traffic
from pipeloom.schedule.kinds import LOAD_OF
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE, Lane
from pipeloom.terminal.console import headed, print_table, table, wide_console
from pipeloom.terminal.words import count, memory_lack, parameters, passes_of, seconds, short, unit_bytes, unit_s

_ACCOUNT = {
    "compute_s": "compute",
    "startup_s": "start-up",
    "imbalance_s": "imbalance",
    "exposed_p2p_s": "exposed p2p",
    "exposed_swaps_s": "exposed swaps",
    "exposed_data_parallel_s": "exposed data-parallel",
    "host_s": "host",
    "drain_s": "drain",
    "optimizer_s": "optimizer",
}
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
_PEAK = {
    "always": "always",
    "stage inputs": "inputs",
    "accepted": "accepted",
    "working": "work",
    "gathered weights": "gathered",
    "receive buffers": "recv",
    "resident stages": "stages",
}
_LANES = {
    "between stages": {"send", "recv"},
    "data-parallel": {DATA_PARALLEL_LANE.name},
    **{
        name: {out.lane, back.lane}
        for name, (out, back) in zip(("to partners and back", "to the host and back"), LOAD_OF.items(), strict=True)
    },
}
_USE = ("busy_s", "hidden_s", "exposed_s")
_AFTER = {
    "reduce_s": "data-parallel, after the pipeline",
    "tied_s": "tied embedding, after the pipeline",
    "shared_s": "shared layers, after the pipeline",
    "average_s": "average of replicas, share of an update",
}
_WITH_TENSOR = "compute+tp"
"""Label of compute on tensor-parallel ranks: their collectives are inside the actions, whose parts no trace shows."""
_MOST_RANKS = 12


def print_step(step: SimulatedStep, tree: Mapping[str, Any], *, with_lanes: bool) -> None:
    """Print the step; what does not fit into a table follows below it.

    Args:
        step: the answer.
        tree: what ``--json`` prints of it.
        with_lanes: whether to print every lane.
    """
    console = wide_console()
    _print_headline(console, step, tree)
    for title, rows in _tables(step, tree, with_lanes):
        console.print(headed(f"\n{title}"))
        print_table(console, rows)
    console.print(
        "activations: held for backwards, as `pipeloom train` counts them; reserve: of the process and its libraries; "
        "fragm.: of the allocator",
        style="dim",
    )
    if step.run.tp > 1:
        console.print(f"{_WITH_TENSOR}: tensor-parallel communication included", style="dim")
    if any(tree["checkpoint_copy_bytes"]):
        console.print(
            "copy: in host memory, while a thread writes a checkpoint; not in the total, since training waits where it "
            "has no room",
            style="dim",
        )
    if step.run.pp > _MOST_RANKS:
        console.print("of many pipeline ranks some are shown, the fullest among them; --json has all")
    if not tree["fits"]:
        _print_misfit(console, tree)


def order_words(step: SimulatedStep, order: Mapping[str, float]) -> str:
    """A sentence about an order that was searched.

    Args:
        step: with the order.
        order: what ``--json`` has of the order.
    """
    own_s, least_s, step_s = order["schedule_step_time_s"], order["least_step_time_s"], step.prediction.step_time_s
    bound = f"no order of this placement takes less than {seconds(least_s)}, {1 - least_s / step_s:.1%} less"
    if step.knobs.found is None:
        return f"order: none was found that is faster than the schedule's; {bound}"
    saved = f"{seconds(step_s)} instead of {seconds(own_s)} ({step_s / own_s - 1:+.1%})"
    return f"order: found for this step, {saved}; {bound}"


def _recomputation(step: SimulatedStep) -> str:
    run = step.run
    if run.recompute_layers is not None:
        kinds = Counter(run.recompute_layers)
        return f", recomputation of layers: {', '.join(f'{number} {kind}' for kind, number in kinds.items())}"
    if run.recompute == "none":
        return "" if step.knobs.choice.keep is not None else ", no recomputation"
    return f", {run.recompute} recomputation"


def _print_headline(console: Console, step: SimulatedStep, tree: Mapping[str, Any]) -> None:
    run, knobs = step.run, step.knobs
    sizes = parameters(run.shape.parameters, run.shape.active_parameters)
    kinds = step.cluster.kinds(run.num_devices)
    peaks = dict.fromkeys(kind.device.peak_flops_per_s[run.peak_precision] / 1e12 for kind, _ in kinds)
    shard = "" if run.shard == "none" else f", {run.shard} sharding over {run.shard_size}"
    cut = f" in {count(len(run.slices), 'slice')}" if run.slices else ""
    cut += "" if run.updates is None else f", one of {count(max(run.updates), 'update')} until an average"
    most = "" if run.microbatches is None else " (the replica with most)"
    family = knobs.choice.family if knobs.found is None else "found order"
    passes = passes_of(knobs.choice.keep, balance=knobs.moves.balance, offload=knobs.moves.offload)
    console.print(
        f"{run.shape.name or 'model'}, {sizes}; {family}{passes}: "
        f"{run.axes.ranks}, {count(run.loops, 'loop')}; "
        f"{count(step.schedule.num_microbatches, 'micro-batch')}{most} of {run.micro_batch} x {run.seq:,} tokens{cut}; "
        f"{dtype_words(run.precision, run.products, is_default=tree['has_default_dtype'])}{_recomputation(step)}{shard}"
    )
    devices = " and ".join(f"{number:,} x {kind.device.name}" for kind, number in kinds)
    nodes = count(max(place.last_node for place in step.places) + 1, "node")
    console.print(f"{devices} ({step.cluster.name}) on {nodes}, trained by {step.software.name}")
    source = "measured there" if tree["has_measured_pieces"] else "from closed forms"
    console.print(f"seconds of embedding, layer and head: {source}\n")
    whole_s, pipeline_s = tree["step_time_s"], tree["pipeline_s"]
    lines = {
        "step time": f"{seconds(whole_s)}: pipeline {seconds(pipeline_s)}, then {seconds(whole_s - pipeline_s)}",
        "tokens/s": f"{tree['tokens_per_s']:,.0f}",
        "MFU": f"{tree['mfu']:.1%} of {' and '.join(f'{peak:,.4g}' for peak in peaks)} TFLOP/s on each device",
        "HFU": f"{tree['hfu']:.1%}, what is recomputed counted",
    }
    if run.pp > 1:
        lines["bubble fraction"] = f"{tree['bubble_fraction']:.1%} of the ranks' time in the pipeline"
    traffic = boundary_traffic(step.placed)
    if traffic is not None:
        lines["between stages"] = str(traffic)
    for name, text in lines.items():
        console.print(f"{name:<18}{text}")
    for number, text in enumerate(describe_places(step.places) if len(kinds) > 1 else ()):
        console.print(f"{'' if number else 'pipeline ranks':<18}{text}")


def _tables(step: SimulatedStep, tree: Mapping[str, Any], with_lanes: bool) -> Iterator[tuple[str, Table]]:
    (time, s), (size, gb) = unit_s(tree["step_time_s"]), _memory_unit(step)
    shown = _shown_ranks(step)
    yield f"Where the step goes ({s})", _account_table(tree, time)
    lanes = [
        [label, *_texts((busy, hidden, busy - hidden), time), f"{hidden / busy:.1%}"]
        for label, busy, hidden in _lanes(step, tree)
        if busy > 0
    ]
    title = f"Communication beside compute ({s}, mean of the ranks)"
    yield title, _filled(table("", ["busy", "hidden", "exposed", "hidden %"]), lanes)
    if with_lanes:
        every = [
            [f"{use['rank']}: {use['lane']}", str(use["actions"]), *_texts((use[key] for key in _USE), time)]
            for use in tree["communication"]
            if use["rank"] in shown
        ]
        title = f"Lanes of communication by rank ({s})"
        yield title, _filled(table("lane", ["actions", "busy", "hidden", "exposed"]), every)
    yield memory_table(step, tree["checkpoint_copy_bytes"])
    if curves := tree.get("memory_over_time"):
        columns = {
            "peak": _texts((curve["peak_bytes"] for curve in curves), size),
            "at": _texts((curve["peak_s"] for curve in curves), time),
            **_parts([curve["peak_parts"] for curve in curves], _PEAK, size),
        }
        yield f"Memory over time: the peak ({gb}), when ({s}) and of what", _by_rank(columns, shown)


def _memory_unit(step: SimulatedStep) -> tuple[float, str]:
    # By what is held, not by the devices: small runs on large ones would be columns of 0.00.
    return unit_bytes(max(memory.total_bytes for memory in step.prediction.memory_by_rank))


def memory_table(step: SimulatedStep, copies: Sequence[float] = ()) -> tuple[str, Table]:
    """Title and table of the peak memory of the ranks, by part.

    Args:
        step: of the layout.
        copies: bytes of a checkpoint in host memory, by rank.
    """
    prediction, shown, (size, gb) = step.prediction, _shown_ranks(step), _memory_unit(step)
    limits = [place.device_memory_bytes for place in step.places]
    totals = [memory.total_bytes for memory in prediction.memory_by_rank]
    columns = _parts([asdict(memory) for memory in prediction.memory_by_rank], _MEMORY, size)
    columns["total"] = _texts(totals, size)
    are_alike = len(set(limits)) == 1
    if not are_alike:
        columns["of"] = [f"{limit / size:,.5g}" for limit in limits]
    if any(copies):
        columns["copy"] = _texts(copies, size)
    too_full = [rank for rank in shown if totals[rank] > limits[rank]]
    title = f"Peak memory of each device ({gb}{f' of {limits[0] / size:,.5g}' if are_alike else ''})"
    return title, _by_rank(columns, shown, too_full)


def _texts(values: Iterable[float], unit: float) -> list[str]:
    return [short(value / unit) for value in values]


def _parts(values: Sequence[Mapping[str, float]], labels: Mapping[str, str], unit: float) -> dict[str, list[str]]:
    """A column for each part that a rank has; by rank."""
    return {
        label: _texts((value[part] for value in values), unit)
        for part, label in labels.items()
        if any(value[part] for value in values)
    }


def _by_rank(columns: Mapping[str, Sequence[str]], shown: Sequence[int], marked: Sequence[int] = ()) -> Table:
    rows = table("rank", list(columns))
    for rank in shown:
        rows.add_row(str(rank), *(texts[rank] for texts in columns.values()), style="red" if rank in marked else "")
    return rows


def _filled(rows: Table, lines: Sequence[Sequence[str]]) -> Table:
    for line in lines or [["none"]]:
        rows.add_row(*line)
    return rows


def _account_table(tree: Mapping[str, Any], unit: float) -> Table:
    """Parts of the step: mean over the ranks, share, least and most."""
    rows, whole = table("", ["mean", "share", "least", "most"]), tree["step_time_s"]
    for part, label in _ACCOUNT.items():
        values = [account[part] for account in tree["accounts"]]
        mean, least, most = sum(values) / len(values), min(values), max(values)
        if most > 0:
            title = _WITH_TENSOR if part == "compute_s" and tree["run"]["tp"] > 1 else label
            rows.add_row(title, short(mean / unit), f"{mean / whole:.1%}", *_texts((least, most), unit))
    step = short(whole / unit)
    rows.add_row("step", step, "100.0%", step, step, end_section=True)
    return rows


def _lanes(step: SimulatedStep, tree: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """(what, seconds under way, seconds of them that compute hides) in the mean of the ranks."""
    ranks = step.run.pp
    for label, names in _LANES.items():
        uses = [use for use in tree["communication"] if Lane.parse(use["lane"]).name in names]
        yield label, sum(use["busy_s"] for use in uses) / ranks, sum(use["hidden_s"] for use in uses) / ranks
    for label, inner in {"context-parallel": step.ring_s, "expert-parallel": step.travel_s}.items():
        yield label, inner.busy_s, inner.busy_s - inner.exposed_s
    busy_s, exposed_s = (sum(part) / ranks for part in zip(*step.gathered_s, strict=True))
    yield "data-parallel, layer by layer", busy_s, busy_s - exposed_s
    yield "between stages, blocking", sum(step.blocked_s) / ranks, 0.0
    for part, label in _AFTER.items():
        yield label, tree["after_s"][part], 0.0


def _shown_ranks(step: SimulatedStep) -> list[int]:
    """All of few ranks; of many the first, the last, the fullest and some between."""
    num_ranks, fullest = len(step.prediction.memory_by_rank), step.prediction.fullest_rank
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    spread = {round(i * (num_ranks - 1) / (_MOST_RANKS - 2)) for i in range(_MOST_RANKS - 1)}
    return sorted(spread | {fullest})


def _print_misfit(console: Console, tree: Mapping[str, Any]) -> None:
    limit, fullest = tree["device_memory_bytes"], tree["fullest_rank"]
    unit, name = unit_bytes(limit)
    memory = tree["memory"][fullest]
    largest = sorted(_MEMORY, key=lambda part: -memory[part])[:3]
    made_of = ", ".join(f"{_MEMORY[part]} {short(memory[part] / unit)}" for part in largest)
    needs = f": {memory_lack(fullest, memory['total_bytes'], limit)}; most of it: {made_of}"
    console.print(headed("\ndoes not fit", needs, "bold red"))
    for setting, total in tree["help"].items():
        verdict = "fits" if total <= limit else "still too much"
        console.print(f"  {setting}: {short(total / unit)} {name}, {verdict}")
    if not any(total <= limit for total in tree["help"].values()):
        more = "more layout.pp or layout.tp, or fewer micro-batches in flight"
        if memory["reserve_bytes"] > limit:
            more = "the reserve alone is larger than the device"
        console.print(f"  none of these is enough: {more}")
