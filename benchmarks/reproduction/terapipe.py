"""TeraPipe (arXiv 2102.07988): its dynamic program on its own measurements, and its settings simulated.

Published figures are those of the paper's figures and appendix tables, version 2, taken from notes that list all of
them and from the authors' code (github.com/zhuohan123/terapipe at 1a17aa2, ``flop_model.py``), not read off the paper.
What their program does is read from that code (``transformer_models.py``, ``test_transformer_terapipe.py``,
``latency_model.py``): it trains layers alone, without embedding and head, on made-up inputs; attention is plain, in
half precision, without dropout; and messages go in the order of compute, which waits for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import differential_evolution

from pipeloom.cost.hardware import Cluster, Link
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.families import Choice
from pipeloom.planner.slice_lengths import Latency, LatencyTable, Slicing, best_slices, modelled_table
from pipeloom.predict.step import simulate_step
from pipeloom.recipe import Knobs
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run
from reproduction.machine import CLUSTER, OWN, Row
from reproduction.tables import table

SEQ = 2048
UNIT = 8
"""Tokens between the lengths that the authors' program tries."""


@dataclass(frozen=True)
class Ablation:
    """A setting for which seconds of a step were published for several numbers of even slices.

    Attributes:
        num_ranks: pipeline ranks.
        batch: sequences, each by itself.
        even_s: number of slices -> seconds.
        program_s: seconds with the slices of the authors' program.
        lengths: of these, in tokens.
    """

    num_ranks: int
    batch: int
    even_s: dict[int, float]
    program_s: float
    lengths: tuple[int, ...]


ABLATIONS = {
    "175B (9)": Ablation(
        num_ranks=96,
        batch=2,
        even_s={1: 9.990, 4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252},
        program_s=1.481,
        lengths=(*[120] * 4, *[112] * 6, *[104] * 8, 64),
    ),
    "44B (8)": Ablation(
        num_ranks=48,
        batch=8,
        even_s={1: 2.662, 4: 1.241, 8: 1.255, 16: 1.241},
        program_s=1.111,
        lengths=(384, 384, 368, 320, 296, 296),
    ),
}
"""Slices of one sequence each; figure and table of the ablation."""

_BOUNDS = [(1e-4, 5e-2), (1e-6, 2e-2), (1e-7, 2e-4), (1e-12, 1e-7)]
"""Of the four parameters below: seconds of a slice, of launching, of a token, of a pair of tokens."""


def latency(parameters: Sequence[float]) -> Latency:
    """A slice of l tokens behind c takes ``max(floor, launch + token l) + pair l (c + l / 2)`` seconds."""
    floor, launch, token, pair = parameters

    def seconds(length: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(floor, launch + token * length) + pair * length * (before + length / 2)

    return seconds


def even_s(ablation: Ablation, parameters: Sequence[float]) -> dict[int, float]:
    """Seconds of a step with each number of even slices, by the paper's formula."""
    found: dict[int, float] = {}
    for number in ablation.even_s:
        length = SEQ / number
        seconds = latency(parameters)(np.full(number, length), np.arange(number) * length)
        found[number] = ablation.batch * float(seconds.sum()) + (ablation.num_ranks - 1) * float(seconds.max())
    return found


def fitted(ablation: Ablation) -> list[float]:
    """The parameters with which the even points come out best, by the squares of their relative errors."""
    expected = np.log(list(ablation.even_s.values()))

    def error(logs: NDArray[np.float64]) -> float:
        found = np.log(list(even_s(ablation, np.exp(logs).tolist()).values()))
        return float(((found - expected) ** 2).sum())

    bounds = [(float(np.log(low)), float(np.log(high))) for low, high in _BOUNDS]
    best = differential_evolution(error, bounds, seed=0, maxiter=600, tol=1e-10, popsize=20)
    return np.exp(best.x).tolist()


def fitted_table(parameters: Sequence[float]) -> LatencyTable:
    """Seconds of every slice by the fitted latency."""
    return LatencyTable(latency(parameters), SEQ, UNIT)


def programmed(ablation: Ablation, parameters: Sequence[float]) -> Slicing:
    """The slices that the dynamic program chooses."""
    return best_slices(fitted_table(parameters), ablation.num_ranks, ablation.batch)


def best_even(ablation: Ablation, parameters: Sequence[float]) -> Slicing:
    """Of all numbers of even slices the one with which a step is fastest."""
    one = fitted_table(parameters)
    every = [one.even(number) for number in range(1, one.num_units + 1)]
    return min(every, key=lambda even: even.step_s(ablation.num_ranks, ablation.batch))


def published_slices(ablation: Ablation, parameters: Sequence[float]) -> Slicing:
    """The slices that the authors' program chose, with the fitted latency."""
    return fitted_table(parameters).slicing([0, *(np.cumsum(ablation.lengths) // UNIT).tolist()])


def ablation_rows() -> list[Row]:
    """Even slices and the program's: published, and by the fitted latency."""
    return [row for name, ablation in ABLATIONS.items() for row in _ablation_rows(name, ablation, fitted(ablation))]


def _ablation_rows(name: str, ablation: Ablation, parameters: Sequence[float]) -> list[Row]:
    published = {str(number): f"{seconds:.3f}" for number, seconds in ablation.even_s.items()}
    found = {str(number): (seconds, "") for number, seconds in even_s(ablation, parameters).items()}
    chosen = {
        "best even": (best_even(ablation, parameters), ""),
        "program": (programmed(ablation, parameters), f"{ablation.program_s:.3f}"),
        "the paper's": (published_slices(ablation, parameters), f"{ablation.program_s:.3f}"),
    }
    for which, (one, seconds) in chosen.items():
        found[which] = (one.step_s(ablation.num_ranks, ablation.batch), " ".join(map(str, one.lengths)))
        published[which] = seconds
    return [
        {
            "setting": name,
            "slices": which,
            "published_s": published[which],
            "fitted_s": f"{seconds:.3f}",
            "lengths": lengths,
        }
        for which, (seconds, lengths) in found.items()
    ]


@dataclass(frozen=True)
class Setting:
    """A model on the paper's cluster.

    Attributes:
        layers, hidden: of the model; heads of 128.
        tp: ranks that share each matrix.
        pp: pipeline ranks.
        batch: sequences of a step.
        without_s, with_s: published seconds of a step, of whole sequences and of the program's slices.
        lengths: tokens of these; empty where they are not known.
    """

    layers: int
    hidden: int
    tp: int
    pp: int
    batch: int
    without_s: float
    with_s: float
    lengths: tuple[int, ...] = ()


SETTINGS = {
    "13B (5)": Setting(40, 5120, 8, 40, 32, 1.863, 1.328, (704, 688, 656)),
    "44B (8)": Setting(96, 6144, 8, 48, 8, 2.662, 1.111, ABLATIONS["44B (8)"].lengths),
    "175B (9)": Setting(96, 12288, 4, 96, 2, 9.990, 1.481, ABLATIONS["175B (9)"].lengths),
    "175B (10)": Setting(96, 12288, 8, 48, 2, 5.822, 1.160),
}
P3 = replace(
    CLUSTER,
    name="p3.16xlarge",
    inter=Link(latency_s=CLUSTER.inter.latency_s, bytes_per_s=25e9 / 8),
    adapters_per_node=1,
)
"""Eight V100 in a node over NVLink, 25 Gb/s between nodes; kernels as on the page about breadth-first."""

SMOOTH = replace(P3, name="p3.16xlarge without tiles", device=replace(P3.device, num_multiprocessors=0))
PRODUCTS = {"in tiles": P3, "smooth": SMOOTH}
"""Products take whole waves of tiles, as the catalog has it, so that multiples of 64 and 128 tokens are best; or as
many seconds for each token, whatever their number."""

LANES = replace(OWN, partition="even")
MESSAGES = {"wait": replace(LANES, name="terapipe", is_blocking=True), "lanes": LANES}
"""Compute waits for messages, as in the authors' program; or they have lanes of their own, as in this one."""

PAPER_EVEN = tuple(sorted({number for ablation in ABLATIONS.values() for number in ablation.even_s}))
"""Numbers of even slices that the paper's ablations have."""
MOST_EVEN = 40


def run_of(setting: Setting, micro_batch: int = 1) -> Run:
    """The setting as the cost model sees it; messages of two stages on one node stay there."""
    shape = ModelShape(
        name="gpt",
        layers=setting.layers,
        hidden=setting.hidden,
        heads=setting.hidden // 128,
        kv_heads=setting.hidden // 128,
        ffn=4 * setting.hidden,
        vocab=0,
        family="gpt2",
        tied=False,
    )
    sizes = {"tp": setting.tp, "pp": setting.pp, "micro_batch": micro_batch, "global_batch": setting.batch}
    order = tuple(range(setting.pp))
    return Run(shape=shape, seq=SEQ, attention="plain", precision="fp16", pipeline_order=order, **sizes)


def group_sizes(setting: Setting, messages: str) -> str:
    """How many sequences go together by the joint program, of 1, 2 and 4."""
    sizes = [size for size in (1, 2, 4) if size <= setting.batch]
    tables = {size: modelled_table(Placed(run_of(setting, size), P3, MESSAGES[messages]), 4 * UNIT) for size in sizes}
    return " ".join(sorted({str(size) for size, _ in best_batches(tables, setting.batch, setting.pp)}))


def best_batches(tables: Mapping[int, LatencyTable], num_sequences: int, num_ranks: int) -> list[tuple[int, Slicing]]:
    """How many sequences go together, and how each group is sliced, so that a step is fastest.

    For each longest slice, S of groups of each size is known, and how a batch is made up of groups follows in the same
    way: G(n) = min over b of G(n - b) + S_b (arXiv 2102.07988, section 3.4).

    Args:
        tables: sequences of a group -> seconds of its slices.
        num_sequences: of a step, on one pipeline.
        num_ranks: pipeline ranks.

    Returns:
        The groups in their order: sequences, and slices.
    """
    longest_s, best_s = np.inf, np.inf
    best: list[tuple[int, Slicing]] = []
    while groups := _best_groups(tables, num_sequences, longest_s):
        sum_s = sum(one.sum_s for _, one in groups)
        if sum_s >= best_s:
            break
        slowest_s = max(max(one.through_s) for _, one in groups)
        if sum_s + (num_ranks - 1) * slowest_s < best_s:
            best, best_s = groups, sum_s + (num_ranks - 1) * slowest_s
        longest_s = np.nextafter(slowest_s, 0.0)
    return best


def _best_groups(tables: Mapping[int, LatencyTable], num_sequences: int, longest_s: float) -> list[tuple[int, Slicing]]:
    """The groups whose seconds add up to the least, no slice longer; empty if there are no such ones."""
    found = {size: table.shortest(longest_s) for size, table in tables.items() if size <= num_sequences}
    best: list[tuple[float, list[tuple[int, Slicing]]] | None] = [(0.0, [])]
    for count in range(1, num_sequences + 1):
        ways = [
            (before[0] + one.sum_s, [*before[1], (size, one)])
            for size, one in found.items()
            if size <= count and one is not None and (before := best[count - size]) is not None
        ]
        best.append(min(ways, key=lambda way: way[0], default=None))
    last = best[num_sequences]
    return [] if last is None else last[1]


def simulated_s(setting: Setting, software: Software, cluster: Cluster, lengths: tuple[int, ...]) -> float:
    """Seconds of a step with slices of some lengths, or with whole sequences if there is one."""
    choice = Choice(family="gpipe", pp=setting.pp, num_microbatches=setting.batch, num_slices=len(lengths))
    run = replace(run_of(setting), slices=lengths if len(lengths) > 1 else ())
    return simulate_step(Placed(run, cluster, software), Knobs(choice=choice)).prediction.pipeline_s


def curve_rows() -> list[Row]:
    """The ablations simulated: even slices, and those of the authors' program."""
    return [row for name in ABLATIONS for row in curve_of(name)]


def curve_of(name: str) -> list[Row]:
    """One of them."""
    ablation, setting = ABLATIONS[name], SETTINGS[name]
    lengths = {str(number): (SEQ // number,) * number for number in ablation.even_s} | {"the paper's": ablation.lengths}
    published = {str(number): seconds for number, seconds in ablation.even_s.items()} | {
        "the paper's": ablation.program_s
    }
    return [
        {
            "setting": name,
            "slices": which,
            "published_s": f"{published[which]:.3f}",
            **{
                f"{products}_s": f"{simulated_s(setting, MESSAGES['wait'], cluster, each):.3f}"
                for products, cluster in PRODUCTS.items()
            },
        }
        for which, each in lengths.items()
    ]


def setting_rows() -> list[Row]:
    """Each setting: whole sequences, even slices, the program's; simulated as GPipe."""
    return [setting_row(*each) for each in product(SETTINGS, MESSAGES, PRODUCTS)]


def setting_row(name: str, messages: str, products: str) -> Row:
    """One of them."""
    setting, software, cluster = SETTINGS[name], MESSAGES[messages], PRODUCTS[products]
    known = modelled_table(Placed(run_of(setting), cluster, software), UNIT)
    program = best_slices(known, setting.pp, setting.batch).lengths
    step_s = partial(simulated_s, setting, software, cluster)
    even = {number: step_s(known.even(number).lengths) for number in range(1, MOST_EVEN + 1)}
    best = min(even, key=even.__getitem__)
    paper = min((number for number in PAPER_EVEN if number <= MOST_EVEN), key=even.__getitem__)
    return {
        "setting": name,
        "messages": messages,
        "products": products,
        "published_without_s": f"{setting.without_s:.3f}",
        "published_with_s": f"{setting.with_s:.3f}",
        "whole_s": f"{even[1]:.4f}",
        "paper_even": str(paper),
        "paper_even_s": f"{even[paper]:.4f}",
        "even": str(best),
        "even_s": f"{even[best]:.4f}",
        "lengths": " ".join(map(str, program)),
        "program_s": f"{step_s(program):.4f}",
        "group_sizes": group_sizes(setting, messages),
    }


def terapipe_blocks(ablations: Sequence[Row], curves: Sequence[Row], settings: Sequence[Row]) -> dict[str, str]:
    """The tables of the page."""
    lines = [
        [
            row["setting"],
            f"{len(row['lengths'].split())}, the best even" if row["slices"] == "best even" else row["slices"],
            row["published_s"],
            row["fitted_s"],
            _off(row["fitted_s"], row["published_s"]) if row["published_s"] else "",
        ]
        for row in ablations
    ]
    lengths = [
        [row["setting"], row.get("messages", "fitted"), row.get("products", ""), row["lengths"]]
        for row in [*ablations, *settings]
        if row["lengths"] and row.get("slices", "program") == "program"
    ]
    simulated = [
        [
            row["setting"],
            row["slices"],
            row["published_s"],
            *(f"{row[f'{each}_s']} {_off(row[f'{each}_s'], row['published_s'])}" for each in PRODUCTS),
        ]
        for row in curves
    ]
    heads = ("setting", "messages", "products", "whole, s", "even of the paper, s", "any even, s", "program, s")
    return {
        "ablation": table(("setting", "slices", "published, s", "fitted, s", "off by"), lines),
        "curve": table(("setting", "slices", "published, s", *(f"{each}, s" for each in PRODUCTS)), simulated),
        "settings": table((*heads, "whole by program", "published"), [_setting_line(row) for row in settings]),
        "lengths": table(("setting", "messages", "products", "lengths"), lengths),
    }


def _setting_line(row: Row) -> list[str]:
    best_s = row["program_s"]
    without_s, with_s = row["published_without_s"], row["published_with_s"]
    return [
        row["setting"],
        row["messages"],
        row["products"],
        f"{float(row['whole_s']):.3f}",
        *(
            f"{float(row[f'{which}_s']):.3f} ({row[which]}) {_off(row[f'{which}_s'], best_s)}"
            for which in ("paper_even", "even")
        ),
        f"{float(best_s):.3f} ({len(row['lengths'].split())})",
        f"{float(row['whole_s']) / float(best_s):.2f}",
        f"{without_s}, {with_s}: {float(without_s) / float(with_s):.2f}",
    ]


def _off(found: str, expected: str) -> str:
    return f"{float(found) / float(expected) - 1:+.1%}".replace("%", " %")
