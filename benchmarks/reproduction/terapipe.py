"""TeraPipe (arXiv 2102.07988): its dynamic programme on its own measurements, and its settings simulated.

Published figures are those of the paper's figures and appendix tables, version 2, taken from notes that list all of
them and from the authors' code (github.com/zhuohan123/terapipe at 1a17aa2, ``flop_model.py``), not read off the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import differential_evolution

from pipeloom.cost.hardware import Cluster, Link
from pipeloom.cost.shape import ModelShape, Run
from pipeloom.cost.slices import SliceModel
from pipeloom.generate import Choice
from pipeloom.layout import even_slices
from pipeloom.planner.slice_plan import plan_slices
from pipeloom.planner.slices import Latency, LatencyTable, Slicing, best_batches, best_slices
from pipeloom.predict.step import Order, simulate_step
from reproduction.machine import CLUSTER, OWN, Row
from reproduction.tables import table

SEQ = 2048
UNIT = 8
"""Tokens between the lengths that the authors' programme tries."""


@dataclass(frozen=True)
class Ablation:
    """A setting for which seconds of a step were published for several numbers of even slices.

    Attributes:
        num_ranks: pipeline ranks.
        batch: sequences, each by itself.
        even_s: number of slices -> seconds.
        programme_s: seconds with the slices of the authors' programme.
    """

    num_ranks: int
    batch: int
    even_s: dict[int, float]
    programme_s: float


ABLATIONS = {
    "175B (9)": Ablation(96, 2, {1: 9.990, 4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252}, 1.481),
    "44B (8)": Ablation(48, 8, {1: 2.662, 4: 1.241, 8: 1.255, 16: 1.241}, 1.111),
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


def programmed(ablation: Ablation, parameters: Sequence[float]) -> Slicing:
    """The slices that the dynamic programme chooses."""
    return best_slices(LatencyTable(latency(parameters), SEQ, UNIT), ablation.num_ranks, ablation.batch)


def ablation_rows() -> list[Row]:
    """Even slices and the programme's: published, and by the fitted latency."""
    rows: list[Row] = []
    for name, ablation in ABLATIONS.items():
        parameters = fitted(ablation)
        best = programmed(ablation, parameters)
        found = {str(number): seconds for number, seconds in even_s(ablation, parameters).items()}
        found["programme"] = best.step_s(ablation.num_ranks, ablation.batch)
        published = {**{str(number): seconds for number, seconds in ablation.even_s.items()}}
        published["programme"] = ablation.programme_s
        rows += [
            {
                "setting": name,
                "slices": number,
                "published_s": f"{published[number]:.3f}",
                "fitted_s": f"{seconds:.3f}",
                "lengths": " ".join(map(str, best.lengths)) if number == "programme" else "",
            }
            for number, seconds in found.items()
        ]
    return rows


@dataclass(frozen=True)
class Setting:
    """A model on the paper's cluster.

    Attributes:
        layers, hidden: of the model; heads of 128.
        tp: ranks that share each matrix.
        pp: pipeline ranks.
        batch: sequences of a step.
        without_s, with_s: published seconds of a step, of whole sequences and of the programme's slices.
    """

    layers: int
    hidden: int
    tp: int
    pp: int
    batch: int
    without_s: float
    with_s: float


SETTINGS = {
    "13B (5)": Setting(40, 5120, 8, 40, 32, 1.863, 1.328),
    "44B (8)": Setting(96, 6144, 8, 48, 8, 2.662, 1.111),
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
CLUSTERS = {"in tiles": P3, "smooth": SMOOTH}
"""Products take whole waves of tiles, as the catalog has it, so that multiples of 128 tokens are best; or as many
seconds for each token, whatever their number."""
MOST_EVEN = 32


def run_of(setting: Setting, micro_batch: int = 1) -> Run:
    """The setting as the cost model sees it."""
    shape = ModelShape(
        name="gpt",
        layers=setting.layers,
        hidden=setting.hidden,
        heads=setting.hidden // 128,
        kv_heads=setting.hidden // 128,
        ffn=4 * setting.hidden,
        vocab=50257,
        mlp="gelu",
        tied=False,
    )
    sizes = {"tp": setting.tp, "pp": setting.pp, "micro_batch": micro_batch, "global_batch": setting.batch}
    return Run(shape=shape, seq=SEQ, attention="plain", precision="fp16", **sizes)


def group_sizes(setting: Setting) -> str:
    """How many sequences go together by the joint programme, of 1, 2 and 4."""
    sizes = [size for size in (1, 2, 4) if size <= setting.batch]
    tables = {size: LatencyTable(SliceModel(run_of(setting, size), P3, OWN).seconds, SEQ, 4 * UNIT) for size in sizes}
    return " ".join(sorted({str(size) for size, _ in best_batches(tables, setting.batch, setting.pp)}))


def setting_rows() -> list[Row]:
    """Each setting: whole sequences, the best even slices, the programme's; simulated as GPipe with messages."""
    return [setting_row(name, kernels) for name in SETTINGS for kernels in CLUSTERS]


def setting_row(name: str, kernels: str) -> Row:
    """One of them."""
    setting, cluster = SETTINGS[name], CLUSTERS[kernels]
    run, order = run_of(setting), Order(choice=Choice(family="gpipe", pp=setting.pp, num_microbatches=setting.batch))
    plan = plan_slices(run, cluster, OWN, order, UNIT)
    even_s = {number: _even_s(run, cluster, order, number) for number in range(2, MOST_EVEN + 1)}
    best = min(even_s, key=even_s.__getitem__)
    return {
        "setting": name,
        "kernels": kernels,
        "published_without_s": f"{setting.without_s:.3f}",
        "published_with_s": f"{setting.with_s:.3f}",
        "whole_s": f"{plan.even[0].step.prediction.pipeline_s:.3f}",
        "even": str(best),
        "even_s": f"{even_s[best]:.3f}",
        "lengths": " ".join(map(str, plan.lengths)),
        "programme_s": f"{plan.step.prediction.pipeline_s:.3f}",
        "group_sizes": group_sizes(setting),
    }


def _even_s(run: Run, cluster: Cluster, order: Order, number: int) -> float:
    lengths = tuple(length * UNIT for length in even_slices(SEQ // UNIT, number))
    chosen = replace(order, choice=replace(order.choice, num_slices=number))
    return simulate_step(replace(run, slices=lengths), cluster, OWN, chosen).prediction.pipeline_s


def terapipe_blocks(ablations: Sequence[Row], settings: Sequence[Row]) -> dict[str, str]:
    """The tables of the page."""
    lines = [
        [row["setting"], row["slices"], row["published_s"], row["fitted_s"], _off(row["fitted_s"], row["published_s"])]
        for row in ablations
    ]
    simulated = [
        [
            row["setting"],
            row["kernels"],
            row["whole_s"],
            f"{row['even_s']} ({row['even']})",
            f"{row['programme_s']} ({len(row['lengths'].split())})",
            f"{float(row['whole_s']) / float(row['programme_s']):.2f}",
            f"{row['published_without_s']}, {row['published_with_s']}",
            f"{float(row['published_without_s']) / float(row['published_with_s']):.2f}",
        ]
        for row in settings
    ]
    lengths = [
        [row["setting"], row.get("kernels", "fitted"), row["lengths"]]
        for row in [*ablations, *settings]
        if row["lengths"]
    ]
    return {
        "ablation": table(("setting", "slices", "published, s", "fitted, s", "off by"), lines),
        "settings": table(
            ("setting", "products", "whole, s", "best even, s", "programme, s", "faster", "published, s", "faster"),
            simulated,
        ),
        "lengths": table(("setting", "costs", "lengths"), lengths),
    }


def _off(found: str, expected: str) -> str:
    return f"{float(found) / float(expected) - 1:+.1%}".replace("%", " %")
