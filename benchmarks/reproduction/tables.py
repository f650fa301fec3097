"""Data files, and the tables of the page that are made from them."""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from reproduction.batch import BATCHES, METHODS
from reproduction.cost_time import CRITICAL, SIZES, Best, curve, with_devices
from reproduction.facts import TITLES
from reproduction.loops import LOOPS, MICROBATCHES, NETWORKS
from reproduction.machine import MODELS, NUM_DEVICES, Row
from reproduction.sensitivity import BASELINES

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
PAGE = FOLDER / "README.md"
NAMES = ("facts", "group_traffic", "loops", "batch", "kept", "scaled", "sensitivity", "needed")


def write_rows(name: str, rows: Sequence[Row]) -> None:
    """Write a data file."""
    with (FOLDER / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(name: str) -> list[dict[str, str]]:
    """Read a data file."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def filled(page: str, data: dict[str, Sequence[Row]]) -> str:
    """The page with its blocks made anew from the data."""
    return fill(page, blocks(data))


def fill(page: str, made: dict[str, str]) -> str:
    """The page with what stands between ``<!-- NAME -->`` and ``<!-- end -->`` replaced by the block of that name."""
    left = dict(made)

    def block(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{left.pop(match[1])}\n<!-- end -->"

    text = re.sub(r"<!-- ([\w. -]+?) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)
    assert not left, f"the page has no place for {sorted(left)}"
    return text


def blocks(data: dict[str, Sequence[Row]]) -> dict[str, str]:
    """Every block of the page by name."""
    batch, loops = data["batch"], data["loops"]
    return {
        "facts": _facts(data["facts"]),
        "group traffic": _group_traffic(data["group_traffic"]),
        "loops": "\n\n".join(_loops(loops, network) for network in NETWORKS),
        **{f"batch {model}": _batch(batch, model) for model in MODELS},
        "gains": _gains(batch),
        **{f"kept {model}": _kept(data["kept"], model) for model in MODELS},
        **{f"cost time {model}": _cost_time(with_devices(batch, data["scaled"]), model) for model in MODELS},
        "cost time gains": _cost_time_gains(with_devices(batch, data["scaled"])),
        "sensitivity": _sensitivity(data["sensitivity"]),
        "needed": _needed(data["needed"]),
        "answer": _answer(data),
    }


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    names = list(head)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(part: float) -> str:
    """A signed percentage."""
    return f"{part:+.1%}".replace("%", " %")


def _facts(rows: Sequence[Row]) -> str:
    lines = []
    for group, title in TITLES.items():
        of_group = [row for row in rows if row["group"] == group]
        for formula in dict.fromkeys(row["formula"] for row in of_group):
            same = [row for row in of_group if row["formula"] == formula]
            agree = sum(row["agrees"] == "yes" for row in same)
            middle = same[len(same) // 2]
            example = f"{middle['what']}: {middle['expected']}, {middle['simulated']}"
            is_first = formula == of_group[0]["formula"]
            lines.append([title if is_first else "", f"`{formula}`", f"{agree} of {len(same)}", example])
    return table(("fact", "formula", "equal", "for example: formula, simulation"), lines)


def _group_traffic(rows: Sequence[Row]) -> str:
    lines = [[row[key] for key in ("loops", "num_microbatches", "twelve_per_group")] for row in rows]
    counted = {(row["loops"], row["num_microbatches"], row["resident"]): row["counted"] for row in rows}
    sizes = list(dict.fromkeys(map(tuple, lines)))
    return table(
        ("V", "M", "12 M / P", "one resident", "two", "three"),
        ([*size, *(counted[size[0], size[1], resident] for resident in "123")] for size in sizes),
    )


NETWORK_TITLES = {
    "cut": "messages cut over the tensor-parallel ranks",
    "whole": "whole messages",
    "slow": "whole messages at 0.16 of the link",
}


def _loops(rows: Sequence[Row], network: str) -> str:
    found = {
        (row["schedule"], row["num_microbatches"], row["loops"]): f"{float(row['tflop_per_s']):.1f}"
        for row in rows
        if row["network"] == network
    }
    lines = [
        [schedule, str(count), *(found.get((schedule, str(count), str(loops)), "-") for loops in LOOPS)]
        for count in MICROBATCHES
        for schedule in ("breadth-first", "depth-first")
    ]
    return table((NETWORK_TITLES[network], "M", *(f"V = {loops}" for loops in LOOPS)), lines)


def _batch(rows: Sequence[Row], model: str) -> str:
    found = {(row["method"], row["batch"]): row for row in rows if row["model"] == model and row["messages"] == "cut"}
    lines = [
        [f"{batch / NUM_DEVICES:g}", *(_point(found.get((method, str(batch)))) for method in METHODS)]
        for batch in BATCHES
    ]
    return table(("batch per device", *METHODS), lines)


def _point(row: Row | None) -> str:
    if row is None:
        return "-"
    sizes = f"{row['tp']}/{row['pp']}/{row['dp']} {row['loops']} {row['num_microbatches']}x{row['microbatch_size']}"
    shard = "" if row["shard"] == "none" else f" {row['shard']}"
    order = " depth-first" if row["method"] == "no pipeline" and row["family"] == "depth-first" else ""
    return f"**{float(row['tflop_per_s']):.1f}** {sizes}{shard}{order}"


def gains(rows: Sequence[Row], model: str, messages: str) -> dict[int, tuple[float, float | None]]:
    """Batch -> gain of breadth-first over the best of Megatron-LM, and over its depth-first where there is one."""
    found = {
        (row["method"], int(row["batch"])): float(row["tflop_per_s"])
        for row in rows
        if row["model"] == model and row["messages"] == messages
    }
    result: dict[int, tuple[float, float | None]] = {}
    for batch in BATCHES:
        others = [found[method, batch] for method in BASELINES if (method, batch) in found]
        if others and ("breadth-first", batch) in found:
            ours, looped = found["breadth-first", batch], found.get(("depth-first", batch))
            result[batch] = (ours / max(others) - 1, None if looped is None else ours / looped - 1)
    return result


def _gains(rows: Sequence[Row]) -> str:
    columns = {(model, messages): gains(rows, model, messages) for model in MODELS for messages in ("cut", "whole")}
    lines = [
        [
            f"{batch / NUM_DEVICES:g}",
            *(percent(found[batch][0]) if batch in found else "-" for found in columns.values()),
        ]
        for batch in BATCHES
    ]
    return table(("batch per device", *(f"{model}, {messages}" for model, messages in columns)), lines)


def kept_mfu(rows: Sequence[Row], model: str) -> dict[float, dict[str, Row]]:
    """Batch per device -> method -> its best configuration, if nothing has to be recomputed."""
    found: dict[float, dict[str, Row]] = {}
    for row in rows:
        if row["model"] == model:
            found.setdefault(float(row["batch_per_device"]), {})[row["method"]] = row
    return found


def _kept(rows: Sequence[Row], model: str) -> str:
    lines = []
    for batch, of_batch in kept_mfu(rows, model).items():
        best = max(of_batch.values(), key=lambda row: float(row["mfu"]))
        cells = [_kept_point(of_batch.get(method), best) for method in METHODS]
        lines.append([f"{batch:g}", *cells])
    return table(("batch per device", *METHODS), lines)


def _kept_point(row: Row | None, best: Row) -> str:
    if row is None:
        return "-"
    mfu = f"{float(row['mfu']):.1%}".replace("%", " %")
    again = "" if row["recompute"] == "none" else " r"
    return f"{f'**{mfu}**' if row is best else mfu}{again}"


def _curves(
    rows: Sequence[Row], model: str, messages: str, critical: str, *, is_simulated: bool
) -> dict[str, list[Best]]:
    return {method: curve(rows, model, messages, method, critical, is_simulated=is_simulated) for method in METHODS}


def _cost_time(rows: Sequence[Row], model: str) -> str:
    curves = _curves(rows, model, "cut", "recalled", is_simulated=True)
    lines = []
    for devices in SIZES:
        found = {method: best for method, points in curves.items() for best in points if best.devices == devices}
        least = min(best.days for best in found.values())
        lines.append([f"{devices:,}", *(_cost_point(found.get(method), least) for method in METHODS)])
    return table(("GPUs", *METHODS), lines)


def _cost_point(best: Best | None, least: float) -> str:
    if best is None:
        return "-"
    days = f"{best.days:,.1f}" if best.days < 100 else f"{best.days:,.0f}"
    return (
        f"{f'**{days}**' if best.days == least else days} at {best.batch_per_device:g}: {best.device_days / 1000:,.1f}"
    )


def cost_time_gains(
    rows: Sequence[Row], model: str, messages: str, critical: str, *, is_simulated: bool
) -> dict[int, float]:
    """Devices -> what breadth-first gains in training speed, and in cost, over the best of Megatron-LM."""
    curves = _curves(rows, model, messages, critical, is_simulated=is_simulated)
    days = {method: {best.devices: best.days for best in points} for method, points in curves.items()}
    return {
        devices: min(days[method][devices] for method in BASELINES) / days["breadth-first"][devices] - 1
        for devices in SIZES
    }


def _cost_time_gains(rows: Sequence[Row]) -> str:
    columns = [(messages, is_simulated) for messages in ("cut", "whole") for is_simulated in (True, False)]
    lines = []
    for model in MODELS:
        for critical, sizes in CRITICAL.items():
            found = [
                cost_time_gains(rows, model, messages, critical, is_simulated=is_simulated)
                for messages, is_simulated in columns
            ]
            title = [model, f"{sizes[model]:,.0f}, {critical}"]
            lines += [[*title, f"{devices:,}", *(percent(gain[devices]) for gain in found)] for devices in SIZES]
    heads = (f"{messages}, {'simulated' if is_simulated else 'as assumed'}" for messages, is_simulated in columns)
    return table(("model", "B_crit", "GPUs", *heads), lines)


def _sensitivity(rows: Sequence[Row]) -> str:
    by_change = dict.fromkeys((row["change"], row["messages"]) for row in rows)
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    found = {(row["change"], row["messages"], row["batch"]): row for row in rows}
    lines = []
    for change, messages in by_change:
        of_change = [found[change, messages, batch] for batch in batches]
        both = (f"{percent(float(row['gain']))} ({percent(float(row['gain_over_1f1b']))})" for row in of_change)
        lines.append([change, messages, *both])
    return table(("changed", "messages", *(f"{int(batch) / NUM_DEVICES:g}" for batch in batches)), lines)


def _needed(rows: Sequence[Row]) -> str:
    return table(
        ("for this at 1/8 of a sequence per device", "messages", "each exchange would need, in addition to its bytes"),
        ([row["observation"], row["messages"], f"{row['exchange_ms']} ms"] for row in rows),
    )


REFUSED = 9
"""Sequences in a batch of which no pipeline of several replicas, and no depth-first one, can be made."""


def _answer(data: dict[str, Sequence[Row]]) -> str:
    smallest = {
        row["messages"]: row
        for row in data["sensitivity"]
        if row["change"] == "as in the catalog" and row["batch"] == str(BATCHES[0])
    }
    largest = {
        messages: max(
            (gain, batch)
            for batch, (gain, looped) in gains(data["batch"], "gpt-52b", messages).items()
            if looped is not None
        )
        for messages in smallest
    }
    return table(
        ("52B, breadth-first against", "cut messages", "whole messages"),
        [
            ["Megatron-LM's 1F1B at 1/8", *(percent(float(row["gain_over_1f1b"])) for row in smallest.values())],
            ["the best of Megatron-LM at 1/8", *(percent(float(row["gain"])) for row in smallest.values())],
            [
                f"the best of Megatron-LM at {REFUSED}/64, where its depth-first is refused",
                *(percent(gains(data["batch"], "gpt-52b", messages)[REFUSED][0]) for messages in smallest),
            ],
            [
                "the best of Megatron-LM at any batch that depth-first divides",
                *(f"{percent(gain)} at {batch / NUM_DEVICES:g}" for gain, batch in largest.values()),
            ],
        ],
    )
