"""The tables of the page about BPipe, from its data files."""

from collections.abc import Callable, Sequence

from reproduction.bpipe_cases import CASES, COUNTED, FUSED, GPT_96B, LLAMA_65B, OTHER, PROGRAM, SMALL, Case
from reproduction.machine import Row
from reproduction.tables import FOLDER, fill, percent, table

PAGE = FOLDER / "bpipe.md"
NAMES = ("bpipe", "bpipe_links")
ORDERS = {"1f1b": "1F1B", "bpipe": "BPipe"}

PUBLISHED_GAIN = (1.25, 2.17)
"""BPipe over Megatron-LM, least and most (Kim et al., abstract)."""

Recalled = dict[tuple[str, int, str], float]
RECALLED: dict[tuple[str, str], Recalled] = {
    (GPT_96B.name, "fused-softmax"): {("selective", 1, "1f1b"): 0.340, ("selective", 2, "bpipe"): 0.458},
    (GPT_96B.name, "flash2"): {("none", 1, "1f1b"): 0.520, ("none", 2, "bpipe"): 0.517},
    (LLAMA_65B.name, "fused-softmax"): {
        ("selective", 1, "1f1b"): 0.453,
        ("selective", 2, "1f1b"): 0.460,
        ("selective", 4, "bpipe"): 0.444,
    },
    (LLAMA_65B.name, "flash2"): {
        ("none", 1, "1f1b"): 0.478,
        ("none", 2, "1f1b"): 0.492,
        ("none", 4, "bpipe"): 0.440,
    },
}
"""MFU of the re-evaluation (arXiv 2401.02088) by (recomputed, micro-batch, order), as remembered and not read again."""


def filled(page: str, rows: Sequence[Row], links: Sequence[Row]) -> str:
    """The page with its tables made anew from the data."""
    return fill(page, blocks(rows, links))


def blocks(rows: Sequence[Row], links: Sequence[Row]) -> dict[str, str]:
    """Every block of the page by name."""
    return {
        "answer": _answer(rows),
        "most": _most(rows),
        "reevaluation": _reevaluation(rows),
        "configurations": _configurations(rows),
        "cases": _cases(rows),
        "estimate": _estimate(rows),
        "links": _links(links),
    }


def of(rows: Sequence[Row], case: Case, program: str, attention: str) -> list[Row]:
    """The configurations of a case."""
    return [row for row in rows if (row["case"], row["program"], row["attention"]) == (case.name, program, attention)]


def best_plain(rows: Sequence[Row], *recompute: str) -> Row | None:
    """The fastest configuration that fits without BPipe; of those that recompute this, if given."""
    fitting = [row for row in rows if row["1f1b_fits"] == "yes" and (not recompute or row["recompute"] in recompute)]
    return max(fitting, key=lambda row: float(row["1f1b_mfu"]), default=None)


def best_balanced(rows: Sequence[Row]) -> Row | None:
    """The fastest configuration that fits with BPipe alone."""
    fitting = [row for row in rows if row["bpipe_fits"] == "yes" and row["1f1b_fits"] == "no"]
    return max(fitting, key=lambda row: float(row["bpipe_mfu"]), default=None)


def gain(rows: Sequence[Row], *recompute: str) -> float | None:
    """Throughput of the best that needs BPipe by that of the best that does not; ``None`` if there is none of them."""
    before, after = best_plain(rows, *recompute), best_balanced(rows)
    return None if before is None or after is None else float(after["bpipe_mfu"]) / float(before["1f1b_mfu"])


def best_short(rows: Sequence[Row]) -> Row | None:
    """The fastest configuration that fits if some micro-batches of some ranks are recomputed, or none."""
    fitting = [row for row in rows if row["short_fits"] == "yes"]
    return max(fitting, key=lambda row: float(row["short_mfu"]), default=None)


def gain_over_short(rows: Sequence[Row]) -> float | None:
    """Throughput of the best that needs BPipe by that of the best that fits with recomputation where it is short."""
    before, after = best_short(rows), best_balanced(rows)
    return None if before is None or after is None else float(after["bpipe_mfu"]) / float(before["short_mfu"])


AGAINST: dict[str, Callable[[Sequence[Row]], float | None]] = {
    "full recomputation": lambda rows: gain(rows, "full"),
    "selective recomputation": lambda rows: gain(rows, "selective"),
    "any recomputation": gain,
    "any, and where it is short": gain_over_short,
}
"""With what 1F1B is compared: layers that all recompute the same, and micro-batches recomputed as few as it takes."""


def _answer(rows: Sequence[Row]) -> str:
    programs = (PROGRAM, COUNTED, FUSED, SMALL, OTHER)
    lines = []
    for case in (GPT_96B, LLAMA_65B):
        for attention in ("fused-softmax", "flash2"):
            for title, over in AGAINST.items():
                gains = [_ratio(over(of(rows, case, program, attention))) for program in programs]
                lines.append([case.model, attention, title, *gains])
    return table(("model", "attention", "BPipe over 1F1B with", *programs), lines)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(fraction: float | str) -> str:
    return f"{100 * float(fraction):.1f}"


def find(rows: Sequence[Row], recompute: str, micro_batch: int) -> Row:
    """One configuration of a case."""
    (row,) = [row for row in rows if (row["recompute"], row["micro_batch"]) == (recompute, str(micro_batch))]
    return row


def most(rows: Sequence[Row]) -> tuple[float, Row, Row]:
    """The largest factor between two configurations of a case that fit: any with recomputation, and one with BPipe."""
    found: list[tuple[float, Row, Row]] = []
    for case in CASES:
        for program in (PROGRAM, COUNTED):
            fused = of(rows, case, program, "fused-softmax")
            slow = [row for row in fused if row["1f1b_fits"] == "yes" and row["recompute"] != "none"]
            before, after = min(slow, key=lambda row: float(row["1f1b_mfu"])), best_balanced(fused)
            if after is not None:
                found.append((float(after["bpipe_mfu"]) / float(before["1f1b_mfu"]), before, after))
    return max(found, key=lambda one: one[0])


def _most(rows: Sequence[Row]) -> str:
    factor, before, after = most(rows)
    line = [after["case"], after["program"], _choice(before, "1f1b"), _choice(after, "bpipe"), f"{factor:.2f}"]
    return table(("case", "program", "1F1B", "BPipe", "BPipe over 1F1B"), [line])


def _reevaluation(rows: Sequence[Row]) -> str:
    lines = []
    for (name, attention), recalled in RECALLED.items():
        (case,) = [case for case in CASES if case.name == name]
        first: list[float] = []
        for (recompute, micro_batch, order), mfu in recalled.items():
            found = [find(of(rows, case, p, attention), recompute, micro_batch) for p in (PROGRAM, COUNTED)]
            values = [mfu, *(float(row[f"{order}_mfu"]) for row in found)]
            first = first or values
            lines.append(
                [
                    case.model,
                    attention,
                    recompute,
                    f"{ORDERS[order]}, {micro_batch}",
                    found[0]["kernel"],
                    *(f"{_percent(value)} ({value / base:.2f})" for value, base in zip(values, first, strict=True)),
                ]
            )
    head = ("model", "requested", "recomputed", "order, micro-batch", "kernel", "remembered", PROGRAM, COUNTED)
    return table(head, lines)


def _configurations(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["kernel"],
            row["recompute"],
            row["micro_batch"],
            _percent(row["stage_mfu"]),
            *(_mfu(row, order) for order in ORDERS),
            f"{row['1f1b_fullest_gb']} - {row['1f1b_emptiest_gb']}",
            f"{row['bpipe_fullest_gb']} - {row['bpipe_emptiest_gb']}",
        ]
        for attention in ("fused-softmax", "flash2")
        for row in of(rows, GPT_96B, PROGRAM, attention)
    ]
    head = ("kernel", "recomputed", "micro-batch", "a stage", "1F1B", "BPipe", "1F1B, GB", "BPipe, GB")
    return table(head, lines)


def _mfu(row: Row, order: str) -> str:
    shown = _percent(row[f"{order}_mfu"])
    return f"**{shown}**" if row[f"{order}_fits"] == "yes" else f"({shown})"


def _cases(rows: Sequence[Row]) -> str:
    lines = []
    for case in CASES:
        fused, flash = (of(rows, case, PROGRAM, attention) for attention in ("fused-softmax", "flash2"))
        counted = of(rows, case, COUNTED, "fused-softmax")
        before, after = best_plain(fused), best_balanced(fused)
        lines.append(
            [
                case.name,
                _choice(before, "1f1b"),
                _choice(after, "bpipe"),
                *(_ratio(over(fused)) for over in AGAINST.values()),
                _ratio(gain(counted)),
                _ratio(gain(flash)),
            ]
        )
    head = ("case", "best 1F1B", "best that needs BPipe", *AGAINST, "any, softmax counted", "any, flash2")
    return table(head, lines)


def _choice(row: Row | None, order: str) -> str:
    if row is None:
        return "-"
    return f"{_percent(row[f'{order}_mfu'])}: {row['micro_batch']}, {row['recompute']}, {row['kernel']}"


PAIRS = ((1, 2), (2, 4), (1, 4))


def _estimate(rows: Sequence[Row]) -> str:
    lines = []
    for case in (GPT_96B, LLAMA_65B):
        for attention, recompute in (("fused-softmax", "selective"), ("flash2", "none")):
            found = of(rows, case, PROGRAM, attention)
            for pair in PAIRS:
                before, after = (find(found, recompute, micro_batch) for micro_batch in pair)
                estimate, simulated = compared(case, before, after)
                lines.append(
                    [
                        case.model,
                        f"{attention}, {recompute}",
                        f"{pair[0]} to {pair[1]}",
                        f"{float(after['stage_mfu']) / float(before['stage_mfu']):.3f}",
                        f"{bubble_factor(case, *pair):.3f}",
                        f"{estimate:.3f}",
                        f"{simulated:.3f}",
                    ]
                )
    return table(("model", "kernel", "micro-batch", "a stage", "bubble", "estimate", "simulated"), lines)


def estimated(batch: int, pp: int, before: tuple[int, float], after: tuple[int, float]) -> float:
    """MFU after by MFU before: the re-evaluation's estimate, from micro-batches and the MFU of a stage alone.

    A step takes (B / b + P - 1) slots, so that MFU(b) = B / (B + b (P - 1)) MFU_stage(b) (arXiv 2401.02088).

    Args:
        batch: B, sequences of a pipeline's step.
        pp: P.
        before: micro-batch size and MFU of a stage.
        after: the same.
    """
    (x, mfu_x), (y, mfu_y) = before, after
    return (batch + x * (pp - 1)) / (batch + y * (pp - 1)) * mfu_y / mfu_x


def bubble_factor(case: Case, before: int, after: int) -> float:
    """What a larger micro-batch costs in bubble, with stages that are as fast."""
    return estimated(case.batch, case.pp, (before, 1.0), (after, 1.0))


def compared(case: Case, before: Row, after: Row) -> tuple[float, float]:
    """MFU with BPipe by MFU without, by the formula and simulated."""
    sides = [(int(row["micro_batch"]), float(row["stage_mfu"])) for row in (before, after)]
    return estimated(case.batch, case.pp, sides[0], sides[1]), float(after["bpipe_mfu"]) / float(before["1f1b_mfu"])


def _links(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["case"].split(":")[0],
            f"{row['micro_batch']}, {row['recompute']}, {row['attention']}",
            row["link"],
            row["kept_gb"],
            row["swap_ms"],
            row["forward_ms"],
            row["message_ms"],
            percent(float(row["slower"])) if row["slower"] else "-",
            row["moved"] or "-",
            percent(float(row["in_the_way"])) if row["in_the_way"] else "-",
            f"{row['fullest_gb'] or '-'} ({row['plain_gb']})",
        ]
        for row in rows
    ]
    head = (
        "model",
        "micro-batch",
        "pairs over",
        "GB moved",
        "takes ms",
        "forward ms",
        "message ms",
        "step",
        "moves",
        "in the way",
        "fullest GB (1F1B)",
    )
    return table(head, lines)
