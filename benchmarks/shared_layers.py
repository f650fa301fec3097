"""Layers that share their weights first, and have their own later, beside layers that never share: three seeds.

python benchmarks/shared_layers.py            # writes docs/reproduction/m6_10t_loss.csv, in about 4 minutes
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

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
from pipeloom.training.conversions.delink import delink
from pipeloom.training.records.results import RunResult
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout
from pipeloom.workload.optimizers import OPTIMIZERS
from reproduction.machine import Row
from reproduction.tables import write_rows

SEEDS = (0, 1, 2)
STEPS = 400
"""Of a run whose layers never share; the others take as many seconds."""
SHARED = 0.25
"""Part of the seconds in which layers share."""
OPTIMIZERS.add("adamw-copied", replace(OPTIMIZERS["adamw"], powers={"exp_avg": 0, "exp_avg_sq": 0}))
"""AdamW whose moments ``delink`` copies as they are."""


def run_of(folder: Path, seed: int, steps: int, *, shares: bool, name: str = "adamw", ends: bool = True) -> RunConfig:
    """Six layers, and eight sequences in a step; the rate falls in the last fifth of a run that ends."""
    style = {"lr_decay_style": "wsd", "lr_wsd_decay_steps": STEPS // 5} if ends else {"lr_decay_style": "constant"}
    return RunConfig(
        model=ModelConfig(num_layers=6, hidden_size=64, num_heads=4, share_layers="all" if shares else None),
        data=DataConfig(seq_len=64),
        layout=Layout(pp=1, loops=1, num_microbatches=1, microbatch_size=8),
        optimizer=OptimizerConfig(name=name, lr=3e-3, lr_warmup_steps=20, **style),
        training=TrainingConfig(
            steps=steps, seed=seed, validation_batches=40, sample_tokens=0, predict=False, dtype="float32"
        ),
        checkpoint=CheckpointConfig(final="checkpoint"),
        output=OutputConfig(folder=folder),
    )


def delinked(folder: Path, seed: int, steps: tuple[int, int], name: str) -> RunResult:
    """Train shared layers for some steps, and own ones for the others."""
    shared = train(run_of(folder / "shared", seed, steps[0], shares=True, name=name, ends=False), quiet=True)
    delink(shared.folder, folder / "own")
    config, problems = read_run_file(folder / "own" / "config.toml")
    assert not problems
    end = run_of(folder / "end", seed, sum(steps), shares=False, name=name)
    return train(replace(end, checkpoint=replace(config.checkpoint, final="none")), quiet=True)


def main() -> None:
    """Train all, one after the other."""
    rows = list[Row]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        # A shared step is shorter by the update of five layers' weights; the first runs show by how much.
        own_s, shared_s = (
            train(run_of(folder / str(shares), 0, 60, shares=shares, ends=False), quiet=True).summary.step_time_s
            for shares in (False, True)
        )
        assert own_s is not None
        assert shared_s is not None
        first = round(SHARED * STEPS * own_s / shared_s)
        steps = first, round((1 - SHARED) * STEPS)
        for seed in SEEDS:
            place = folder / f"seed-{seed}"
            found = {
                "never shared": (STEPS, train(run_of(place / "own", seed, STEPS, shares=False), quiet=True)),
                "shared, then delinked": (sum(steps), delinked(place / "divided", seed, steps, "adamw")),
                "the same, moments copied": (sum(steps), delinked(place / "copied", seed, steps, "adamw-copied")),
                "always shared": (
                    number := round(STEPS * own_s / shared_s),
                    train(run_of(place / "all", seed, number, shares=True), quiet=True),
                ),
            }
            rows += [
                {
                    "run": run,
                    "seed": str(seed),
                    "steps": str(number),
                    "step_ms": f"{1e3 * (shared_s if run == 'always shared' else own_s):.2f}",
                    "validation_loss": f"{one.summary.validation_loss:.4f}",
                }
                for run, (number, one) in found.items()
            ]
    write_rows("m6_10t_loss", rows)
    print(*(" ".join(row.values()) for row in rows), sep="\n")


if __name__ == "__main__":
    main()
