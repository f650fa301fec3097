"""Losses of a pipeline whose messages have 8 bits, beside one that sends tensors as they are: three seeds.

python benchmarks/boundary_loss.py            # writes docs/reproduction/swarm_loss.csv, in about 15 minutes

A third run of each seed sends tensors as they are and divides the same batch into other micro-batches: sums are rounded
otherwise, and nothing else differs.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from pipeloom.config import DataConfig, ModelConfig, OptimizerConfig, OutputConfig, RunConfig, TrainingConfig
from pipeloom.runs.run_reading import read_run
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout
from reproduction.machine import Row
from reproduction.swarm import CODED, EXACT, LOSS, ROUNDED, SEEDS
from reproduction.tables import write_rows

STEPS, LAST = 600, 50
"""Of a run, and those at its end whose losses are averaged."""


_EXACT = Layout(pp=4, loops=1, num_microbatches=4, microbatch_size=8)
LAYOUTS = {
    EXACT: _EXACT,
    CODED: replace(_EXACT, boundary="int8"),
    ROUNDED: replace(_EXACT, num_microbatches=8, microbatch_size=4),
}
"""Of the same 32 sequences in a step."""


def run_of(folder: Path, seed: int, layout: Layout) -> RunConfig:
    """Six layers over four ranks."""
    return RunConfig(
        model=ModelConfig(num_layers=6, hidden_size=64, num_heads=4),
        data=DataConfig(seq_len=64),
        layout=layout,
        optimizer=OptimizerConfig(lr=2e-3),
        training=TrainingConfig(steps=STEPS, seed=seed, sample_tokens=0, predict=False, dtype="float32"),
        output=OutputConfig(folder=folder),
    )


def main() -> None:
    """Train all, one after the other."""
    rows = list[Row]()
    with TemporaryDirectory() as name:
        for seed, (messages, layout) in product(SEEDS, LAYOUTS.items()):
            result = train(run_of(Path(name) / f"{seed}-{messages}", seed, layout), quiet=True)
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
