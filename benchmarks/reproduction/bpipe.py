"""BPipe (Kim et al., ICML 2023) and its re-evaluation (arXiv 2401.02088): 1F1B beside balanced 1F1B.

The program is Megatron-LM as calibrated on its own published rows of 1.7 to 22 billion parameters; nothing is fitted
here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.shape import Attention, ModelShape, Run
from pipeloom.generate import Choice
from pipeloom.layout import Recompute, paired_order
from pipeloom.predict.moving import Moving
from pipeloom.predict.step import Order, SimulatedStep, simulate_step
from reproduction.machine import Row
from reproduction.tables import table

CLUSTER = load_cluster("dgx-a100")
PROGRAM = load_software("megatron-2021")
TP, SEQ, BATCH = 4, 2048, 128


class Case(NamedTuple):
    """A model and how it is laid out.

    Attributes:
        shape: of the model.
        pp: pipeline ranks, of four tensor-parallel ranks each.
    """

    shape: ModelShape
    pp: int


def _gpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, mlp="gelu", vocab=51200, tied=True,
        name=name,
    )  # fmt: skip


CASES = {
    "gpt-96b": Case(_gpt("gpt-96b", 80, 9984, 104), 8),
    "gpt-134b, 84 heads": Case(_gpt("gpt-134b", 96, 10752, 84), 12),
    "gpt-134b, 96 heads": Case(_gpt("gpt-134b", 96, 10752, 96), 12),
    "llama-65b": Case(load_model("llama-65b"), 8),
}
"""80 layers do not divide by 12, so that 96B runs on 32 devices, as in the re-evaluation. The shape of 134B is not
known: 96 layers of 10752 have as many parameters and divide by 12 ranks, which makes 48 devices; with heads of 128 or
of 112."""
MICRO_BATCHES = (1, 2, 4)
SETTINGS: dict[str, tuple[Attention, tuple[Recompute, ...]]] = {
    "recompute": ("fused-softmax", ("selective", "full")),
    "flash": ("flash2", ("none", "full")),
}
"""The re-evaluation's two: attention that is recomputed, and flash attention."""


def run_of(model: str, kernels: str, micro_batch: int, recompute: Recompute) -> Run:
    """A configuration; partners share nodes."""
    case = CASES[model]
    return Run(
        shape=case.shape,
        seq=SEQ,
        tp=TP,
        pp=case.pp,
        micro_batch=micro_batch,
        global_batch=BATCH,
        recompute=recompute,
        schedule="1f1b",
        sequence_parallel=True,
        attention=SETTINGS[kernels][0],
        precision="fp16",
    )


def step_of(run: Run, *, is_balanced: bool) -> SimulatedStep:
    """The step, plain or balanced."""
    choice = Choice(family="1f1b", pp=run.pp, num_microbatches=run.num_microbatches)
    if is_balanced:
        run = replace(run, pipeline_order=paired_order(tuple(reversed(range(run.pp)))))
    return simulate_step(run, CLUSTER, PROGRAM, Order(choice=choice, moving=Moving(balance=is_balanced)))


def steps(model: str, kernels: str) -> Iterator[tuple[bool, SimulatedStep]]:
    """Every configuration, with whether it is balanced."""
    for is_balanced, size, kind in product((False, True), MICRO_BATCHES, SETTINGS[kernels][1]):
        yield is_balanced, step_of(run_of(model, kernels, size, kind), is_balanced=is_balanced)


def bpipe_rows() -> list[Row]:
    """All of them."""
    return [
        {
            "model": model,
            "kernels": kernels,
            "schedule": "balanced" if is_balanced else "1f1b",
            "micro_batch": str(step.run.micro_batch),
            "recompute": step.run.recompute,
            "attention": step.run.effective_attention,
            "step_s": f"{step.prediction.step_time_s:.4g}",
            "mfu": f"{step.mfu:.4f}",
            "fullest_gb": f"{step.prediction.memory.total_bytes / 1e9:.1f}",
            "fits": "yes" if step.prediction.fits else "no",
        }
        for model, kernels in product(CASES, SETTINGS)
        for is_balanced, step in steps(model, kernels)
    ]


TITLES = {"recompute": "attention recomputed", "flash": "flash attention"}


def best(rows: Sequence[Row], model: str, kernels: str, schedule: str, *, recompute: str = "") -> Row:
    """The fastest configuration of a schedule that fits; with one kind of recomputation, if it is named."""
    return min(
        (
            row
            for row in rows
            if (row["model"], row["kernels"], row["schedule"], row["fits"]) == (model, kernels, schedule, "yes")
            and recompute in ("", row["recompute"])
        ),
        key=lambda row: float(row["step_s"]),
    )


def gain(rows: Sequence[Row], model: str, kernels: str, *, recompute: str = "") -> float:
    """How many times as fast balanced 1F1B is as plain 1F1B; that with one kind of recomputation, if it is named."""
    plain = best(rows, model, kernels, "1f1b", recompute=recompute)
    return float(plain["step_s"]) / float(best(rows, model, kernels, "balanced")["step_s"])


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of the page."""
    gains = [
        [
            model,
            TITLES[kernels],
            *(_point(best(rows, model, kernels, schedule)) for schedule in ("1f1b", "balanced")),
            f"{gain(rows, model, kernels):.2f}",
            f"{gain(rows, model, kernels, recompute='full'):.2f}",
        ]
        for model, kernels in product(CASES, TITLES)
    ]
    every = [
        [
            row["model"],
            TITLES[row["kernels"]],
            row["micro_batch"],
            row["recompute"],
            row["attention"],
            *(_cell(each) for each in (row, balanced)),
        ]
        for row, balanced in _paired(rows)
    ]
    return {
        "bpipe gains": table(("model", "kernels", "1F1B", "balanced", "gain", "over full recomputation"), gains),
        "bpipe steps": table(
            ("model", "kernels", "micro-batch", "recomputed", "attention's kernel", "1F1B", "balanced"), every
        ),
    }


def _paired(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each plain configuration with its balanced one."""
    keys = ("model", "kernels", "micro_batch", "recompute")
    balanced = {tuple(row[key] for key in keys): row for row in rows if row["schedule"] == "balanced"}
    for row in rows:
        if row["schedule"] == "1f1b":
            yield row, balanced[tuple(row[key] for key in keys)]


def _point(row: Row) -> str:
    return f"{_mfu(row)}, micro-batch {row['micro_batch']}, recomputes {row['recompute']}"


def _cell(row: Row) -> str:
    return f"{_mfu(row)}, {row['fullest_gb']} GB" if row["fits"] == "yes" else f"does not fit: {row['fullest_gb']} GB"


def _mfu(row: Row) -> str:
    return f"{float(row['mfu']):.1%}".replace("%", " %")
