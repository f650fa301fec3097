"""Layouts in tables: their settings and figures in cells, and a legend of the columns."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from pipeloom.cli.plan_layouts import communication_cells, layout_cells
from pipeloom.cost.flops import attention_share
from pipeloom.cost.hardware import Cluster
from pipeloom.planner.comparison import without_pipeline
from pipeloom.planner.plan import Plan
from pipeloom.planner.question import Question
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.console import table
from pipeloom.terminal.words import short, unit_bytes, unit_s

_SHORT_SHARDED = {"optimizer": "optim", "gradients": "grads"}
_PRICE = "$/1e9"
_LEGEND: Mapping[str, str] = {
    "tp": "+sp with sequence parallelism",
    "ep": "ranks that share experts, +o with layout.ep_overlap",
    "micro": "micro-batches of each data-parallel rank x sequences in each",
    "schedule": (_DATA_PARALLEL := "DP (data parallelism) and FSDP have no pipeline"),
    "method": _DATA_PARALLEL,
    "loops": "stages of each pipeline rank, +v in V placement",
    "sharded": "optim, grads, full (layout.shard)",
    "recomp": "recomputed layers",
    "bubble": "ranks of a pipeline do not compute, with or without communication",
    "exposed": "communication beside which nothing computes",
    "error": "mean error of comparable step times; ?: unknown, or may be larger, since no step on these devices, or of "
    "such a layout, was measured",
    _PRICE: "dollars for 1e9 tokens",
}
"""Title of a column -> what its cells are."""
_MUCH_ATTENTION = 0.3
"""Fraction of the FLOPs of MFU above which attention is named. Chosen: with half of it, MFU is 0.85 of that."""


def table_of_cells(first: str, rows: Mapping[str, Mapping[str, str]], texts: Sequence[str] = ()) -> Table:
    """Name of a row -> title of a column -> cell, as a table.

    Args:
        first: title of the names.
        rows: at least one.
        texts: titles of columns of words.
    """
    cells = list(rows.values())
    # Columns without any value would take width from the others.
    columns = [title for title in cells[0] if any(row[title] != "-" for row in cells)]
    found = table(first, columns, texts=texts)
    for name, row in rows.items():
        found.add_row(name, *(row[title] for title in columns))
    return found


def short_cells(step: SimulatedStep) -> dict[str, str]:
    """``layout_cells`` in few characters, so that the table fits 100 columns."""
    cells, run = layout_cells(step), step.run
    if cells["schedule"] == "-":
        cells["schedule"] = without_pipeline(run)
    cells["micro"] = cells["micro"].replace(" ", "")
    cells["sharded"] = _SHORT_SHARDED.get(cells["sharded"], cells["sharded"])
    cells["recomp"] = cells.pop("recompute").replace(" of ", "/").replace("attention", "attn")
    return cells


def _figure_cells(step: SimulatedStep, time: tuple[float, str], memory: tuple[float, str]) -> dict[str, str]:
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
        _PRICE: "-" if dollars is None else f"{dollars:,.0f}",
    }


def layouts_table(
    first: str, steps: Mapping[str, SimulatedStep], question: Question, more: Mapping[str, Mapping[str, str]]
) -> Table:
    """Layouts with their step times, MFU, memory and price.

    Args:
        first: title of the names.
        steps: name of a row -> its layout, at least one.
        question: whose cluster has the unit of the memory.
        more: name of a row -> title of a column behind these -> cell.
    """
    time = unit_s(min(step.prediction.step_time_s for step in steps.values()))
    memory = unit_bytes(question.cluster.device.memory_bytes)
    rows = {
        name: {**short_cells(step), **_figure_cells(step, time, memory), **more[name]} for name, step in steps.items()
    }
    return table_of_cells(first, rows)


def best_table(plan: Plan) -> Table:
    """The layouts of a plan by their numbers."""
    names = [f"{number}{'~' if 1 < plan.num_equivalent >= number else ''}" for number in range(1, len(plan.rows) + 1)]
    rows = dict(zip(names, plan.rows, strict=True))
    return layouts_table("", rows, plan.question, {name: communication_cells(step) for name, step in rows.items()})


def legend(rows: Table, question: Question) -> str:
    """What the columns of ``layouts_table`` mean, a sentence for each that is there."""
    titles = [str(column.header) for column in rows.columns]
    texts = {**_LEGEND, _PRICE: f"{_LEGEND[_PRICE]}{_on_price(question)}"}
    share = attention_share(question.shape, question.seq, question.adapter)
    if share > _MUCH_ATTENTION:
        texts["MFU"] = f"with all scores of attention, {share:.0%} of its FLOPs, of which a causal mask needs half"
    return " ".join(f"{title}: {text}." for title, text in texts.items() if title in titles)


def _on_price(question: Question) -> str:
    """The prices of the devices, and where they are from."""
    kinds = [kind for kind, _ in kinds_of(question)]
    found = dict.fromkeys((kind.device.name, kind.price_per_device_hour, kind.price_source) for kind in kinds)
    each = [
        f"{f'{name}: ' if len(found) > 1 else ''}${price:.3g} a device-hour{f': {source}' if source else ''}"
        for name, price, source in found
        if price is not None
    ]
    return f" ({'; '.join(each)})"


def kinds_of(question: Question) -> Sequence[tuple[Cluster, int]]:
    """The kinds of nodes that layouts may use, each with its number of devices."""
    # Which kinds a layout uses differs between layouts; the question is about all of them.
    return question.cluster.kinds(question.cluster.num_devices or question.num_devices)
