"""A run that takes a second: a tiny model on a tiny text."""

from dataclasses import replace
from pathlib import Path

from pipeloom.config import DataConfig, ModelConfig, OutputConfig, RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.workload.layout import Layout


def write_text(folder: Path) -> Path:
    """A text file that a model can learn something from."""
    file = folder / "text.txt"
    file.write_text(
        "".join(f"line {n}: the {n % 7} quick brown foxes jump over {n % 11} lazy dogs\n" for n in range(900))
    )
    return file


def small_run(folder: Path, **sections: object) -> RunConfig:
    """A complete configuration below ``folder``; ``sections`` replace whole ones."""
    config = RunConfig(
        model=ModelConfig(num_layers=6, hidden_size=16, num_heads=2),
        data=DataConfig(path=write_text(folder), seq_len=8, cache=folder / "cache"),
        layout=Layout(pp=2, loops=2, num_microbatches=4, microbatch_size=2),
        schedule=ScheduleConfig(),
        training=TrainingConfig(steps=3, validation_batches=1, sample_tokens=4, dtype="float64", stall_timeout_s=20),
        output=OutputConfig(folder=folder / "run"),
    )
    return replace(config, **sections)  # type: ignore[arg-type]
