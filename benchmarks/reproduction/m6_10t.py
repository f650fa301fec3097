"""M6-10T's case (arXiv 2110.03888): what a step costs and holds while layers share their weights, and afterwards."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pipeloom import load_run, predict_step
from pipeloom.cost.exchanges import shared_bytes
from pipeloom.cost.stages import own_layers, shared_layers
from pipeloom.predict.step import SimulatedStep
from reproduction.machine import Row
from reproduction.tables import FOLDER, table

PAGE = FOLDER / "m6_10t.md"
NAME = "m6_10t_steps"
LOSS = "m6_10t_loss"
"""Trained, not predicted."""
SIZES: dict[str, Any] = {"family": "llama", "num_layers": 48, "hidden_size": 2048, "num_heads": 16, "vocab_size": 32000}
"""As many layers as M6-10T, without its experts."""
MODELS: dict[str, int | str | None] = {"own layers": None, "8 sets": 8, "one set": "all"}
CLUSTERS = {"64 H100, nodes of 8": "dgx-h100", "64 A100, nodes of 8": "dgx-a100"}
LAYOUT = {"pp": 4, "dp": 16, "loops": 3}
GRADIENT_BYTES = 4


def step_of(share: int | str | None, cluster: str) -> SimulatedStep:
    """A step of 4 pipeline x 16 data ranks, breadth-first, nothing sharded."""
    return predict_step(
        load_run(
            model={**SIZES, "share_layers": share},
            data={"seq_len": 2048},
            layout={**LAYOUT, "num_microbatches": 8, "microbatch_size": 1, "recompute": "full"},
            schedule={"family": "breadth-first"},
            machine={"cluster": cluster},
        )
    )


def reduced_bytes(step: SimulatedStep) -> float:
    """Bytes of gradients that the fullest rank reduces in a step: of its stages, and of sets of several stages."""
    placed, found = step.placed, [0.0] * step.run.pp
    for stage, parameters in enumerate(placed.trained_parameters):
        found[placed.placement.rank_by_stage[stage]] += parameters * GRADIENT_BYTES
    for ranks, size in shared_bytes(step.run, step.software):
        for rank in ranks:
            found[rank] += size
    return max(found)


def sets_by_rank(step: SimulatedStep) -> list[int]:
    """Number of sets of weights of each pipeline rank."""
    found = list(shared_layers(step.run, step.software))
    for stage, count in enumerate(own_layers(step.run, step.software)):
        found[step.placed.placement.rank_by_stage[stage]] += count
    return found


def step_rows() -> list[Row]:
    """A row for each model on each cluster."""
    found: list[Row] = []
    for cluster, name in CLUSTERS.items():
        for model, share in MODELS.items():
            step = step_of(share, name)
            ranks = step.prediction.memory_by_rank
            memory = max(one.weights_bytes + one.gradients_bytes + one.optimizer_bytes for one in ranks)
            exposed = fmean(one.to_dict()["exposed_data_parallel_s"] for one in step.accounts)
            found.append(
                {
                    "devices": cluster,
                    "model": model,
                    "parameters_m": f"{step.run.shape.parameters / 1e6:.0f}",
                    "state_gb": f"{memory / 1e9:.2f}",
                    "reduced_gb": f"{reduced_bytes(step) / 1e9:.3f}",
                    "step_ms": f"{1e3 * step.prediction.step_time_s:.0f}",
                    "exposed_ms": f"{1e3 * exposed:.1f}",
                    "update_ms": f"{1e3 * step.prediction.terms.optimizer_s:.1f}",
                }
            )
    return found


_HEADS = {
    "devices": "devices",
    "model": "model",
    "parameters_m": "parameters, M",
    "state_gb": "state, GB",
    "reduced_gb": "reduced, GB",
    "step_ms": "step, ms",
    "exposed_ms": "exposed, ms",
    "update_ms": "update, ms",
}
_RUNS = ("never shared", "shared, then delinked", "the same, moments copied", "always shared")


def loss_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each kind of run: mean and range of the seeds."""
    found: list[list[str]] = []
    for run in _RUNS:
        own = [row for row in rows if row["run"] == run]
        losses = [float(row["validation_loss"]) for row in own]
        seeds = f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        found.append([run, own[0]["steps"], own[0]["step_ms"], seeds])
    return found


def blocks(steps: Sequence[Row], losses: Sequence[Row]) -> dict[str, str]:
    """The tables of the page: predicted steps, and trained runs (``benchmarks/shared_layers.py``)."""
    head = ("layers", "steps", "step, ms", "validation loss")
    return {
        "steps": table(tuple(_HEADS.values()), [[row[key] for key in _HEADS] for row in steps]),
        "losses": table(head, loss_lines(losses)),
    }
