"""Twenty layouts of one model, and runs that go on from each other's checkpoints, several in the same processes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from eight_layouts import LAYOUTS as EIGHT
from eight_layouts import PLACEMENTS as EIGHT_PLACEMENTS
from eight_layouts import SHARED_EXPERTS
from small_run import small_run

from pipeloom.checkpoint.checkpoint_folder import FOLDER
from pipeloom.config import CheckpointConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.runs.run_folder import RunFolder
from pipeloom.training.session import resolve
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout

STEPS, SAVED = 4, 2
LAYOUTS = {
    **EIGHT,
    "two": Layout(pp=2, loops=1, num_microbatches=4, microbatch_size=1),
    "three": Layout(pp=3, loops=1, num_microbatches=4, microbatch_size=1),
    "three loops": Layout(pp=2, loops=3, num_microbatches=2, microbatch_size=2),
    "tensor": Layout(pp=1, loops=1, tp=2, num_microbatches=4, microbatch_size=1),
    "sequence": Layout(pp=2, loops=1, tp=2, sequence_parallel=True, num_microbatches=2, microbatch_size=2),
    "replicas": Layout(pp=1, loops=1, dp=2, num_microbatches=2, microbatch_size=1),
    "optimizer": Layout(pp=2, loops=2, dp=2, shard="optimizer", num_microbatches=2, microbatch_size=1),
    "full pipeline": Layout(pp=2, loops=2, dp=2, shard="full", num_microbatches=2, microbatch_size=1),
    "copies": Layout(pp=1, loops=2, dp=4, replicate=2, shard="full", num_microbatches=1, microbatch_size=1),
    "recomputed": Layout(pp=2, loops=1, num_microbatches=4, microbatch_size=1, recompute="full"),
    "reversed": Layout(pp=4, loops=1, num_microbatches=2, microbatch_size=2, pipeline_order=(3, 2, 1, 0)),
    "uneven": Layout(pp=2, loops=1, num_microbatches=2, microbatch_size=2, partition=(4, 2)),
}
PLACEMENTS = {**EIGHT_PLACEMENTS, "three loops": "looped"}
KINDS = {
    "adamw": {},
    "frozen": {"freeze_layers": 2},
    "sgd": {"optimizer": "sgd"},
}


def config_of(folder, name, kind="adamw", **checkpoint):
    """A run of four steps under a layout; matrices of odd sizes, so that shards cut rows."""
    changes, layout = KINDS[kind], (LAYOUTS | SHARED_EXPERTS)[name]
    training = TrainingConfig(steps=STEPS, validation_batches=0, sample_tokens=0, predict=False, dtype="float64")
    return small_run(
        folder,
        model=ModelConfig(family="gpt2", num_layers=4, hidden_size=10, num_heads=2, ffn_size=14),
        layout=layout,
        schedule=ScheduleConfig(placement=PLACEMENTS.get(name, "looped") if layout.pp > 1 else None),
        optimizer=OptimizerConfig(
            name=changes.get("optimizer", "adamw"), lr=0.02, lr_warmup_steps=1, clip_grad_norm=0.5
        ),
        training=replace(training, freeze_layers=changes.get("freeze_layers")),
        checkpoint=CheckpointConfig(final="none", **checkpoint),
    )


def train(jobs, rendezvous, rank, size):
    """Run one trainer after the other in the same processes; what they did is in their folders."""
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    for folder, config in jobs:
        data = load_data(config.data, config.training.seed)
        Trainer(resolve(config, data), world, data, RunFolder(folder), quiet=True).run()
    world.leave()


def train_all(jobs: dict[Path, RunConfig], most=40):
    """Run all of them, those with the same number of ranks in the same processes, so many at most."""
    load_data(next(iter(jobs.values())).data, 0)
    for size in sorted({config.layout.num_ranks for config in jobs.values()}):
        mine = [(folder, config) for folder, config in jobs.items() if config.layout.num_ranks == size]
        for folder, _ in mine:
            folder.mkdir(parents=True, exist_ok=True)
        for first in range(0, len(mine), most):
            run_workers(partial(train, mine[first : first + most]), size)


def losses(folder):
    """Step -> loss."""
    return {line["step"]: line["loss"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


def middle(run):
    """The checkpoint of a whole run."""
    return run / FOLDER / f"step-{SAVED:06}"


def last(expected):
    """The losses behind the checkpoint."""
    return {step: expected[step] for step in range(SAVED + 1, STEPS + 1)}
