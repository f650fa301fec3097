"""Two runs of one configuration leave equal files, wherever they lie; what holds times is listed here."""

import json
from dataclasses import replace
from functools import partial

from small_run import small_run

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint
from pipeloom.config import CheckpointConfig
from pipeloom.data.text import load_data
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.runs.run_folder import RunFolder
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.session import resolve
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout

WITH_TIMES = {"metrics.jsonl", "summary.json", "trace.json", "trace-replica-001-tensor-0.json"}
WITH_TIMES |= {f"actions/rank-{rank:05}" for rank in range(4)}
TIMES = {
    "tokens_per_s",
    "step_time_s",
    "bubble_fraction",
    "exposed_communication_s",
    "data_wait_s",
    "model_flops_per_s",
    "memory_bytes",
}
"""Keys of measured values."""
WITH_ITS_OWN_PLACE = {"config.toml"}


def train(config, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    data = load_data(config.data, config.training.seed)
    Trainer(resolve(config, data), world, data, RunFolder(config.output.folder)).run()
    world.leave()


def run_in(folder, data_of):
    """A run of four ranks with all that it leaves behind, and an export; its files by name."""
    config = small_run(
        data_of,
        layout=Layout(pp=2, loops=2, dp=2, shard="full", num_microbatches=2, microbatch_size=1),
        checkpoint=CheckpointConfig(every=2),
    )
    config = replace(config, training=replace(config.training, predict=False, dtype="float32"))
    config = replace(config, data=replace(config.data, cache=folder / "cache"))
    config = replace(config, output=replace(config.output, folder=folder / "run"))
    (folder / "run").mkdir(parents=True)
    load_data(config.data, 0)
    run_workers(partial(train, config), 4)
    export_weights(find_checkpoint(folder / "run"), folder / "run")
    return {str(file.relative_to(folder / "run")): file for file in (folder / "run").rglob("*") if file.is_file()}


def test_two_equal_runs_leave_equal_bytes(tmp_path):
    one, other = (run_in(tmp_path / name, tmp_path) for name in ("one", "a folder of another length"))
    assert one.keys() == other.keys()
    differing = {name for name in one if one[name].read_bytes() != other[name].read_bytes()}
    assert differing == WITH_TIMES | WITH_ITS_OWN_PLACE
    same = one.keys() - differing
    assert {"model.safetensors", "tokenizer.json", "sample.txt", "schedule.txt"} < same
    files = {"checkpoint.json", "tokenizer.json", ".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    steps = ("step-000002", "step-000003")
    rows = {f"actions/{name}.txt" for name in ("training", "validation", "sample")}
    in_checkpoints = {f"checkpoints/{step}/{file}" for step in steps for file in files}
    assert {name for name in same if "/" in name} == in_checkpoints | rows

    lines = [[json.loads(line) for line in files["metrics.jsonl"].read_text().splitlines()] for files in (one, other)]
    assert [{key: line[key] for key in line if key not in TIMES} for line in lines[0]] == [
        {key: line[key] for key in line if key not in TIMES} for line in lines[1]
    ]
    summaries = [json.loads(files["summary.json"].read_text()) for files in (one, other)]
    assert {key for key in summaries[0] if summaries[0][key] != summaries[1][key]} <= TIMES
