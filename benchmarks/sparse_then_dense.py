"""Loss at equal FLOPs: sparse, then dense, beside dense runs of as many steps and of as many FLOPs; three seeds.

python benchmarks/sparse_then_dense.py         # writes docs/reproduction/sparse_loss.csv, in about 12 minutes
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeloom.checkpoint.checkpoint_folder import FOLDER, name_of
from pipeloom.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    TrainingConfig,
)
from pipeloom.config.file import read_run_file
from pipeloom.cost.flops import shape_model_flops
from pipeloom.runs.run_folder import CONFIG
from pipeloom.training.conversions.densify import densify
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import shape_of
from reproduction.machine import Row
from reproduction.tables import write_rows

SEEDS, RATES = (0, 1, 2), (1e-3, 3e-3)
STEPS, SPARSE = 600, 480
"""Of a whole run, and of its sparse phase: 80 %."""
MODEL = ModelConfig(num_layers=3, hidden_size=128, num_heads=4, ffn_size=384)
DENSITY, BLOCK = 0.125, 16
SEQ, VOCABULARY = 64, 257


def flops(steps: int, density: float | None) -> float:
    """Model FLOPs per token of so many steps, with scores and head."""
    model = replace(MODEL, density=density, density_block=BLOCK if density else None)
    return steps * shape_model_flops(shape_of(model.resolve(VOCABULARY)), SEQ)


def equal_steps() -> int:
    """Steps of a dense run with the FLOPs of a sparse phase and a dense one."""
    return round((flops(SPARSE, DENSITY) + flops(STEPS - SPARSE, None)) / flops(1, None))


def run_of(folder: Path, rate: float, seed: int, steps: int, density: float | None = None) -> RunConfig:
    """A run whose learning rate falls until its last step, with a checkpoint where the sparse phase ends."""
    return RunConfig(
        model=replace(MODEL, density=density, density_block=BLOCK if density else None),
        data=DataConfig(seq_len=SEQ),
        layout=Layout(pp=1, loops=1, num_microbatches=1, microbatch_size=16),
        optimizer=OptimizerConfig(lr=rate),
        training=TrainingConfig(
            steps=steps, seed=seed, validation_batches=32, sample_tokens=0, predict=False, dtype="float32"
        ),
        checkpoint=CheckpointConfig(every=SPARSE if density else None, final="none"),
        output=OutputConfig(folder=folder),
    )


def rows_of(folder: Path, rate: float, seed: int) -> list[Row]:
    """Train all runs with a learning rate and a seed."""

    def row(name: str, config: RunConfig, needed: float) -> Row:
        found = train(config, quiet=True)
        share = f"{needed / flops(STEPS, None):.3f}"
        loss = f"{found.summary.validation_loss:.4f}"
        return {"run": name, "rate": f"{rate:g}", "seed": str(seed), "flops": share, "validation_loss": loss}

    equal, sparse, made = equal_steps(), folder / "sparse", folder / "densified"
    rows = [
        row("dense", run_of(folder / "dense", rate, seed, STEPS), flops(STEPS, None)),
        row("dense, equal FLOPs", run_of(folder / "equal", rate, seed, equal), flops(equal, None)),
        row("sparse", run_of(sparse, rate, seed, STEPS, DENSITY), flops(STEPS, DENSITY)),
    ]
    densify(sparse / FOLDER / name_of(SPARSE), made)
    config, problems = read_run_file(made / CONFIG)
    assert not problems
    config = replace(config, output=OutputConfig(folder=folder / "then"))
    needed = flops(SPARSE, DENSITY) + flops(STEPS - SPARSE, None)
    return [*rows, row("sparse, then dense", config, needed)]


def main() -> None:
    """Train all, one after the other."""
    with TemporaryDirectory() as folder:
        rows = [
            row for rate in RATES for seed in SEEDS for row in rows_of(Path(folder) / f"{rate:g}-{seed}", rate, seed)
        ]
    write_rows("sparse_loss", rows)
    print(*(" ".join(row.values()) for row in rows), sep="\n")


if __name__ == "__main__":
    main()
