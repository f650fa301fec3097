"""LOMO's case (arXiv 2306.09782): models of 7 and 65 billion parameters fine-tuned whole on devices of 24 GB."""

from collections.abc import Sequence
from typing import Any

from pipeloom import load_run, predict_step
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
    "65B": {"dp": 8, "shard": "full"},
}
WAYS = {"AdamW": ("adamw", "step"), "LOMO": ("lomo", "step"), "LOMO within the step": ("lomo", "stage")}


def step_of(model: str, way: str) -> SimulatedStep:
    """A step of one sequence per device, breadth-first with a stage for each layer, everything recomputed.

    Sharded gradients that wait for the end of the step have two buffers, the fewest that hide their reductions.
    """
    name, update = WAYS[way]
    sizes = {"family": "llama", "vocab_size": 32000, **SIZES[model]}
    layout = {"pp": 1, "loops": sizes["num_layers"] + 2, "num_microbatches": 1, "microbatch_size": 1}
    return predict_step(
        load_run(
            model=sizes,
            data={"seq_len": SEQ},
            layout={**layout, **LAYOUTS[model], "recompute": "full"},
            schedule={
                "family": "breadth-first",
                "gradient_buffers": 2 if model == "65B" and update == "step" else None,
            },
            optimizer={"name": name, "update": update, "clip": "none"},
            training={"dtype": "bfloat16"},
            machine={"cluster": CLUSTER},
        )
    )


def memory_rows() -> list[Row]:
    """Bytes on the fullest device of each run, by part."""
    return [_row(model, way, step_of(model, way)) for model in SIZES for way in WAYS]


def _row(model: str, way: str, step: SimulatedStep) -> Row:
    memory, prediction = step.prediction.memory, step.prediction
    room = min(prediction.device_bytes)
    weights = memory.optimizer_bytes if "LOMO" in way else step.run.shape.parameters * 4 / step.run.num_shards
    parts = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "float32_weights": weights,
        "moments": memory.optimizer_bytes - weights,
        "rest": memory.total_bytes - memory.weights_bytes - memory.gradients_bytes - memory.optimizer_bytes,
        "total": memory.total_bytes,
        "beyond_device": memory.total_bytes - room,
        "without_float32_weights": memory.total_bytes - weights,
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
            "fits" if float(row["beyond_device_gb"]) <= 0 else f"misses by {row['beyond_device_gb']} GB",
            _without(row),
        ]
        for row in rows
        if row["way"] != "LOMO"
    ]
    return {
        "memory": table(("model", "update", *(name.replace("_", " ") for name in head)), lines),
        "claims": table(("claim", "published", "update", "here", "without float32 weights"), claims),
    }


def _without(row: Row) -> str:
    size, room = float(row["without_float32_weights_gb"]), float(row["device_gb"])
    return f"{size:.2f} GB: fits" if size <= room else f"{size:.2f} GB: misses by {size - room:.2f} GB"
