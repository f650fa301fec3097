"""Losses of a pipeline whose messages have 8 bits, beside one that sends tensors as they are: three seeds.

python benchmarks/boundary_loss.py            # writes docs/reproduction/swarm_loss.csv, in about 15 minutes

A third run of each seed sends tensors as they are and divides the same batch into other micro-batches: sums are rounded
otherwise, and nothing else differs.
"""

from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pipeloom.config import DataConfig, ModelConfig, OptimizerConfig, OutputConfig, RunConfig, TrainingConfig
from pipeloom.runs.run_reading import read_run
from pipeloom.training.run import train
from pipeloom.workload.boundary import Boundary
from pipeloom.workload.layout import Layout
from reproduction.machine import Row
from reproduction.swarm import CODED, EXACT, LOSS, ROUNDED, SEEDS
from reproduction.tables import write_rows

STEPS, LAST = 600, 50
"""Of a run, and those at its end whose losses are averaged."""


class Way(NamedTuple):
    """How a run sends and divides its batch of 32 sequences."""

    boundary: Boundary | None
    num_microbatches: int
    microbatch_size: int


WAYS = {EXACT: Way(None, 4, 8), CODED: Way("int8", 4, 8), ROUNDED: Way(None, 8, 4)}


def run_of(folder: Path, seed: int, way: Way) -> RunConfig:
    """Six layers over four ranks."""
    return RunConfig(
        model=ModelConfig(num_layers=6, hidden_size=64, num_heads=4),
        data=DataConfig(seq_len=64),
        layout=Layout(pp=4, loops=1, **way._asdict()),
        optimizer=OptimizerConfig(lr=2e-3),
        training=TrainingConfig(steps=STEPS, seed=seed, sample_tokens=0, predict=False, dtype="float32"),
        output=OutputConfig(folder=folder),
    )


def main() -> None:
    """Train all, one after the other."""
    rows = list[Row]()
    with TemporaryDirectory() as name:
        for seed, (messages, way) in product(SEEDS, WAYS.items()):
            result = train(run_of(Path(name) / f"{seed}-{messages}", seed, way), quiet=True)
            losses = [step["loss"] for step in read_run(result.folder).metrics][-LAST:]
            rows.append(
                {
                    "seed": str(seed),
                    "messages": messages,
                    "training_loss": f"{fmean(losses):.4f}",
                    "validation_loss": f"{result.summary.validation_loss:.4f}",
                }
            )
            print(*rows[-1].values(), flush=True)
    write_rows(LOSS, rows)


if __name__ == "__main__":
    main()
