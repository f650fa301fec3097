"""LOMO's case (arXiv 2306.09782): models of 7 and 65 billion parameters fine-tuned whole on devices of 24 GB."""

from collections.abc import Sequence
from typing import Any

from pipeloom import RunConfig, load_run, plan, predict_step
from pipeloom.planner.fewer_nodes import question_on
from pipeloom.predict.describe import describe
from pipeloom.predict.step import SimulatedStep
from reproduction.machine import Row
from reproduction.tables import FOLDER, table

PAGE = FOLDER / "lomo.md"
NAME = "lomo_memory"
CLUSTER = "rtx-4090"
"""The published runs are on RTX 3090, which have as much memory."""
SEQ = 1024
SIZES: dict[str, dict[str, Any]] = {
    "7B": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008},
    "65B": {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_size": 22016},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "7B": {"dp": 1},
    "65B": {"tp": 8, "sequence_parallel": True},
}
"""Tensor parallelism, as in the memory table of CoLLiE's documentation."""
WAYS = {
    "AdamW": ("adamw", "step", True),
    "LOMO": ("lomo", "step", True),
    "LOMO within the step": ("lomo", "stage", True),
    "LOMO within the step, bfloat16 weights alone": ("lomo", "stage", False),
}
"""Way -> rule, when it updates, and whether it updates a float32 copy of the weights."""


def run_of(model: str, way: str) -> RunConfig:
    """A run of one sequence, breadth-first with a stage for each layer, everything recomputed."""
    name, update, wide = WAYS[way]
    sizes = {"family": "llama", "vocab_size": 32000, **SIZES[model]}
    layout = {"pp": 1, "loops": sizes["num_layers"] + 2, "num_microbatches": 1, "microbatch_size": 1}
    return load_run(
        model=sizes,
        data={"seq_len": SEQ},
        layout={**layout, **LAYOUTS[model], "recompute": "full"},
        schedule={"family": "breadth-first"},
        optimizer={"name": name, "update": update, "clip": "none", "wide_weights": wide},
        training={"dtype": "bfloat16"},
        machine={"cluster": CLUSTER},
    )


def step_of(model: str, way: str) -> SimulatedStep:
    """The predicted step of ``run_of``."""
    return predict_step(run_of(model, way))


def planned(model: str, way: str) -> Row:
    """What ``pipeloom plan --strategies none`` answers for the sequence on as many devices, with its default headroom.

    The fastest layout that fits, or by how much the layout misses that needs least. No strategy: nothing moves to the
    host.
    """
    config = run_of(model, way)
    question = question_on(config, describe(config).run, CLUSTER, "pipeloom", num_devices=config.layout.num_ranks)
    answer = plan(question.limited(strategies=("none",)), 1, explains=False)
    if answer.best is not None:
        held, beyond = answer.best.prediction.memory.total_bytes, 0.0
    else:
        assert answer.closest is not None, "a complete answer has a layout or the closest one"
        held, beyond = answer.closest.least_bytes, answer.closest.missing_bytes
    return {"plan_total_gb": f"{held / 1e9:.2f}", "plan_misses_gb": f"{beyond / 1e9:.2f}"}


def memory_rows() -> list[Row]:
    """Bytes on the fullest device of each run, by part."""
    return [_row(model, way, step_of(model, way)) | planned(model, way) for model in SIZES for way in WAYS]


def _row(model: str, way: str, step: SimulatedStep) -> Row:
    memory, prediction = step.prediction.memory, step.prediction
    room = min(prediction.device_bytes)
    weights = memory.optimizer_bytes if "LOMO" in way else memory.gradients_bytes
    parts = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "float32_weights": weights,
        "moments": memory.optimizer_bytes - weights,
        "rest": memory.total_bytes - memory.weights_bytes - memory.gradients_bytes - memory.optimizer_bytes,
        "total": memory.total_bytes,
        "beyond_device": memory.total_bytes - room,
        "device": room,
    }
    return {"model": model, "way": way, **{f"{name}_gb": f"{size / 1e9:.2f}" for name, size in parts.items()}}


def memory_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The table of the page."""
    head = ("weights", "gradients", "float32_weights", "moments", "rest", "total", "beyond_device")
    lines = [[row["model"], row["way"], *(row[f"{name}_gb"] for name in head)] for row in rows]
    claims = [
        [
            f"{row['model']} on {'one device' if row['model'] == '7B' else 'eight devices'} of 24 GB",
            "fits, with LOMO",
            row["way"],
            _whether(row),
            _whether_planned(row),
        ]
        for row in rows
        if row["way"] != "LOMO"
    ]
    return {
        "memory": table(("model", "update", *(name.replace("_", " ") for name in head)), lines),
        "claims": table(("claim", "published", "update", "here", "`pipeloom plan`"), claims),
    }


def _whether(row: Row) -> str:
    beyond = float(row["beyond_device_gb"])
    return f"{row['total_gb']} GB: " + ("fits" if beyond <= 0 else f"misses by {beyond:.2f} GB")


def _whether_planned(row: Row) -> str:
    misses = float(row["plan_misses_gb"])
    return "fits" if not misses else f"nothing fits: the least misses by {misses:.2f} GB"
