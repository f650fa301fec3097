"""What balances of experts do to loads and loss: the same small model, text and steps with each, three seeds.

python benchmarks/expert_balance.py            # writes docs/reproduction/moesys_balance.csv, in about 3 minutes
"""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from pipeloom.config import CheckpointConfig, DataConfig, ModelConfig, OutputConfig, RunConfig, TrainingConfig
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout
from reproduction.machine import Row
from reproduction.tables import write_rows

BALANCES = ("batch", "microbatch", "bias", "none")
SEEDS = (0, 1, 2)
STEPS, LAST = 120, 30
"""Loads are the mean of the last steps."""


def run_of(folder: Path, balance: str, seed: int) -> RunConfig:
    """A model of two layers, with a sequence in each of eight micro-batches."""
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, experts=8, expert_ffn=48, balance=balance)
    return RunConfig(
        model=model if balance in ("bias", "none") else replace(model, balance_weight=0.01),
        data=DataConfig(seq_len=64),
        layout=Layout(pp=1, loops=1, num_microbatches=8, microbatch_size=1),
        training=TrainingConfig(
            steps=STEPS, seed=seed, validation_batches=32, sample_tokens=0, predict=False, dtype="float32"
        ),
        checkpoint=CheckpointConfig(final="none"),
        output=OutputConfig(folder=folder / f"{balance}-{seed}"),
    )


def row_of(folder: Path, balance: str, seed: int) -> Row:
    """Train, and read what the run measured."""
    found = train(run_of(folder, balance, seed), quiet=True)
    lines = [json.loads(line) for line in (found.folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "balance": balance,
        "seed": str(seed),
        "validation_loss": f"{found.summary.validation_loss:.4f}",
        "load": f"{fmean(line['expert_load'] for line in lines[-LAST:]):.3f}",
    }


def main() -> None:
    """Train all, one after the other."""
    with TemporaryDirectory() as folder:
        rows = [row_of(Path(folder), balance, seed) for balance in BALANCES for seed in SEEDS]
    write_rows("moesys_balance", rows)
    print(*(" ".join(row.values()) for row in rows), sep="\n")


if __name__ == "__main__":
    main()
