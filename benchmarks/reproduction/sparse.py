"""Sparse, then dense: how much of a published speedup of 4.5 times are FLOPs, and how much is hardware."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from pipeloom import load_run, predict_step
from pipeloom.cost.flops import shape_model_flops
from pipeloom.predict.step import SimulatedStep
from pipeloom.workload.model_shape import ModelShape
from reproduction.machine import Row
from reproduction.tables import FOLDER, read_rows, table

PAGE = FOLDER / "sparse.md"
NAME = "sparse_steps"
PRODUCTS, LOSS = "sparse_products", "sparse_loss"
"""Measured and trained, not predicted."""
DENSITY, SEQ, PUBLISHED = 0.125, 2048, 4.5
SIZES: dict[str, Any] = {
    "family": "gpt2",
    "num_layers": 40,
    "hidden_size": 5120,
    "num_heads": 40,
    "vocab_size": 50257,
    "tied": True,
}
"""GPT-3 13B (arXiv 2005.14165, table 2.1)."""
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "blocks of 64": {"density": DENSITY, "density_block": 64},
    "blocks of 128": {"density": DENSITY, "density_block": 128},
}
PHASES = {"all steps sparse": 1.0, "80 % of the steps sparse": 0.8}


def step_of(model: str) -> SimulatedStep:
    """A step on 64 A100: breadth-first, everything sharded and recomputed."""
    layout = {"pp": 4, "dp": 16, "loops": 5, "shard": "full", "recompute": "full"}
    return predict_step(
        load_run(
            model={**SIZES, **MODELS[model]},
            data={"seq_len": SEQ},
            layout={**layout, "num_microbatches": 8, "microbatch_size": 2},
            schedule={"family": "breadth-first"},
            machine={"cluster": "dgx-a100"},
        )
    )


def parts_of(shape: ModelShape) -> dict[str, float]:
    """Model FLOPs of a token by part, in units of those of the dense matrices of all layers."""
    whole = replace(shape, blocks=None)
    unit = 6 * whole.layers * whole.layer_matrix_parameters
    scores, head = 12 * shape.layers * shape.hidden * SEQ / unit, 6 * shape.embedding_parameters / unit
    found = {"matrices": shape.density, "scores": scores, "head": head}
    assert abs(sum(found.values()) - shape_model_flops(shape, SEQ) / unit) < 1e-9, "FLOPs of no part"
    return found


def ceilings() -> dict[str, float]:
    """How many times fewer FLOPs a training has, for each share of sparse steps."""
    dense, sparse = (sum(parts_of(step_of(name).run.shape).values()) for name in ("dense", "blocks of 64"))
    return {name: dense / (share * sparse + (1 - share) * dense) for name, share in PHASES.items()}


def step_rows() -> list[Row]:
    """A row for each model."""
    found: list[Row] = []
    for model in MODELS:
        step = step_of(model)
        memory, parts = step.prediction.memory, parts_of(step.run.shape)
        found.append(
            {
                "model": model,
                "parameters_b": f"{step.run.shape.parameters / 1e9:.2f}",
                **{f"flops_{part}": f"{value:.3f}" for part, value in parts.items()},
                "flops": f"{sum(parts.values()):.3f}",
                "state_gb": f"{(memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes) / 1e9:.2f}",
                "step_ms": f"{step.prediction.step_time_s * 1e3:.0f}",
            }
        )
    return found


def blocks(rows: Sequence[Row], products: Sequence[Row], losses: Sequence[Row]) -> dict[str, str]:
    """The tables of the page: predictions, measured products, and trained runs."""
    dense = rows[0]
    steps = [
        [
            row["model"],
            *(row[name] for name in ("parameters_b", "flops_matrices", "flops_scores", "flops_head", "flops")),
            *(_times(dense, row, name) for name in ("flops", "step_ms")),
            row["state_gb"],
        ]
        for row in rows
    ]
    head = ("model", "parameters, B", "matrices", "scores", "head", "FLOPs", "fewer FLOPs", "faster step", "state, GB")
    ceiling = [[name, f"{times:.1f} x", f"{PUBLISHED / times:.1f} x"] for name, times in ceilings().items()]
    measured = [
        [f"{row['inputs']} x {row['outputs']}", *list(row.values())[2:-1], f"{row['times']} x"] for row in products
    ]
    rates = list(dict.fromkeys(row["rate"] for row in losses))
    trained = [
        [
            name,
            _one([row["flops"] for row in losses if row["run"] == name]),
            *(_of_seeds(losses, name, rate) for rate in rates),
        ]
        for name in dict.fromkeys(row["run"] for row in losses)
    ]
    return {
        "steps": table(head, steps),
        "ceiling": table(("steps", "fewer FLOPs", "left of 4.5 x"), ceiling),
        "products": table(("matrix", "density", "block", "dense, ms", "blocks, ms", "faster"), measured),
        "loss": table(("run", "FLOPs", *(f"rate {rate}" for rate in rates)), trained),
    }


def page_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """``blocks`` with what was measured and trained before."""
    return blocks(rows, read_rows(PRODUCTS), read_rows(LOSS))


def losses_of(losses: Sequence[Row], name: str, rate: str) -> list[float]:
    """Validation losses of a kind of run, by seed."""
    return [float(row["validation_loss"]) for row in losses if (row["run"], row["rate"]) == (name, rate)]


def _times(dense: Row, row: Row, name: str) -> str:
    return f"{float(dense[name]) / float(row[name]):.2f} x"


def _one(values: Sequence[str]) -> str:
    (value,) = set(values)
    return value


def _of_seeds(losses: Sequence[Row], name: str, rate: str) -> str:
    numbers = sorted(losses_of(losses, name, rate))
    return f"{fmean(numbers):.3f} ({numbers[0]:.3f} to {numbers[-1]:.3f})"
