"""torchrun: what the script starts, and a run over two of its agents."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import mixed
from forked import Forked, free_port
from launch_runs import CLUSTER, command_of, reasons_of, run_of, values_of, written_for
from small_run import small_run

from pipeloom.config import CheckpointConfig, TrainingConfig
from pipeloom.config.file import read_run_file
from pipeloom.export import hand_over


def test_one_node_starts_as_many_processes_as_the_layout_has(tmp_path):
    command = command_of(written_for("torchrun", tmp_path).files[1])
    assert values_of(command, "--nnodes") == ["1"]
    assert values_of(command, "--nproc-per-node") == [
        "4",
    ]
    assert command[-4:] == ["train", str(tmp_path / "torchrun.toml"), "--output.folder", str(tmp_path / "run")]


def test_several_nodes_take_the_number_of_each_and_the_host_of_the_first(tmp_path):
    written = written_for("torchrun", tmp_path, layout={"dp": 2})
    assert written.notes.start.endswith("NODE_RANK=0 MASTER_ADDR=<host of node 0> bash torchrun.sh")
    command = command_of(written.files[1], NODE_RANK="1", MASTER_ADDR="node-a", MASTER_PORT="1234", RUN="/runs/one")
    assert values_of(command, "--nnodes") == ["2"]
    assert values_of(command, "--node-rank") == ["1"]
    assert values_of(command, "--nproc-per-node") == ["4"]
    assert values_of(command, "--master-addr") == ["node-a"]
    assert values_of(command, "--master-port") == ["1234"]
    assert values_of(command, "--rdzv-backend") is None  # c10d would number the nodes by itself
    assert values_of(command, "--output.folder") == ["/runs/one"]
    script = written.files[1].read_text()
    assert "Ranks: NODE_RANK x 4 + local rank = (pipeline x 2 + data) x 1 + tensor" in script
    assert "Pipeline ranks by node: 0 to 1, 2 to 3." in script


def test_an_order_of_pipeline_ranks_is_printed(tmp_path):
    written = written_for("torchrun", tmp_path, layout={"dp": 2, "pipeline_order": [0, 3, 1, 2]})
    script = written.files[1].read_text()
    assert "= (place x 2 + data) x 1 + tensor" in script
    assert "Pipeline ranks by place: 0, 3, 1, 2." in script


@pytest.mark.parametrize("target", ["torch", "torchtitan", "megatron"])
def test_what_only_pipeloom_does_is_refused_by_others(tmp_path, target):
    sections = {"layout": {"pipeline_order": [0, 3, 1, 2]}, "schedule": {"balance": True}}
    reasons = " ".join(reasons_of(target, tmp_path, **sections))
    assert "schedule.balance: " in reasons
    assert "does not move activations to other ranks; leave it out" in reasons
    assert "layout.pipeline_order: " in reasons


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_a_run_that_keeps_some_micro_batches_is_handed_over_to_what_starts_pipeloom(tmp_path, target):
    written = written_for(target, tmp_path, schedule={"keep": [4, 4, 3, 3]})
    config, problems = read_run_file(next(file for file in written.files if file.suffix == ".toml"))
    assert problems == []
    assert config.schedule.keep == (4, 4, 3, 3)


@pytest.mark.parametrize("target", ["torch", "torchtitan", "megatron"])
@pytest.mark.parametrize("pipeline", [{"loops": 2}, {"loops": 1}])
def test_keep_is_refused_by_others_and_is_all_that_is_wrong(tmp_path, target, pipeline):
    family = "depth-first" if pipeline["loops"] > 1 else "1f1b"
    schedule = {"family": family, "keep": [2, 2, 1, 1]}
    (reason,) = reasons_of(target, tmp_path, layout=pipeline, schedule=schedule)
    assert reason.startswith("schedule.keep: ")


@pytest.mark.parametrize("target", ["torch", "torchtitan", "megatron"])
def test_a_model_that_visits_its_device_is_refused_by_others(tmp_path, target):
    reasons = reasons_of(target, tmp_path, layout={"pp": 1, "loops": 5}, schedule={"device_budget": "64MiB"})
    assert any(reason.startswith("schedule.device_budget: ") for reason in reasons)


def test_the_folder_of_swapped_stages_is_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule = {"device_budget": "64MiB", "swap_folder": "swaps"}
    written = written_for("torchrun", tmp_path / "out", layout={"pp": 1, "loops": 5}, schedule=schedule)
    config, _ = read_run_file(written.files[0])
    assert config.schedule.swap_folder == tmp_path / "swaps"


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_a_missing_variable_is_named(tmp_path, missing):
    script = written_for("torchrun", tmp_path, layout={"dp": 2}).files[1]
    environment = {"PATH": os.environ["PATH"], "NODE_RANK": "0", "MASTER_ADDR": "here"}
    del environment[missing]
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=10, check=False
    )
    assert done.returncode != 0
    assert f"{missing}: " in done.stderr


def test_nodes_that_are_not_filled_are_refused(tmp_path):
    (reason,) = reasons_of("torchrun", tmp_path, layout={"pp": 3, "dp": 2, "num_microbatches": 6})
    assert reason.startswith("6 processes do not fill nodes of 4 devices (small)")


def test_what_training_would_refuse_is_refused_before_anybody_waits_in_a_queue(tmp_path):
    layout = {"pp": 1, "loops": 1, "tp": 2, "num_microbatches": 8}
    (reason,) = reasons_of("torchrun", tmp_path, layout=layout, data={"seq_len": 127})
    assert reason.startswith("layout.tp must divide data.seq_len")


def test_the_run_file_can_be_read_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = replace(small_run(tmp_path), data=replace(small_run(tmp_path).data, path=Path("text.txt")))
    (written,) = hand_over(config, CLUSTER, tmp_path / "out", ["torchrun"]).written
    read, problems = read_run_file(written.files[0])
    assert problems == []
    assert read.data.path == tmp_path / "text.txt"
    assert read.layout == config.layout
    assert any("data.path is" in sentence for sentence in written.notes.differs)


def test_a_cpu_run_for_a_cluster_of_gpus_is_pointed_out(tmp_path):
    gpus = replace(CLUSTER, device=replace(CLUSTER.device, num_multiprocessors=108, name="gpu"))
    (written,) = hand_over(small_run(tmp_path), gpus, tmp_path / "out", ["torchrun"]).written
    assert any("add --training.device cuda" in sentence for sentence in written.notes.differs)


def test_layers_that_another_program_would_divide_otherwise_are_pointed_out(tmp_path):
    written = written_for("torchrun", tmp_path, machine={"software": "nanotron"}, layout={"pp": 2})
    assert any("not by that of machine.software nanotron" in sentence for sentence in written.notes.differs)
    named = written_for("torchrun", tmp_path, machine={"software": "nanotron"})
    assert named.notes.differs == ()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_nodes_go_on_where_a_run_ended_and_do_not_fail_when_all_is_done(tmp_path):
    config = small_run(
        tmp_path,
        training=TrainingConfig(steps=2, validation_batches=0, sample_tokens=0, predict=False, stall_timeout_s=20),
        checkpoint=CheckpointConfig(final="checkpoint"),
    )
    out = tmp_path / "out"
    hand_over(config, replace(CLUSTER, devices_per_node=1), out, ["torchrun"])
    first = Forked(tmp_path, ["train", str(out / "torchrun.toml"), "--output.folder", str(out / "run")])
    assert first.end() == 0, first.stderr  # two steps, which the nodes find done
    environment = {**os.environ, "PYTHON": sys.executable, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    agents = [
        subprocess.Popen(
            [shutil.which("bash"), str(out / "torchrun.sh"), "--training.steps", "3"],
            env={**environment, "NODE_RANK": node}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in ("1", "0")
    ]  # fmt: skip
    printed = [agent.communicate(timeout=140) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert ["summary.json" in out for out, _ in printed] == [False, True]  # rank 0 is where NODE_RANK is 0
    # the same once more, as the script starts it, without two more of torchrun, which only take time
    words = [str(out / "torchrun.toml"), "--output.folder", str(out / "run"), "--checkpoint.resume", str(out / "run")]
    ranks = Forked.ranks(tmp_path, ["train", *words, "--training.steps", "3"], 2)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert "all steps are done, only validation, sample and report are left" in ranks[0].stdout
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_nodes_of_several_kinds_are_named_in_the_order_of_their_ranks(tmp_path):
    kinds = [replace(CLUSTER, name=name) for name in ("new", "old")]
    both = mixed((kinds[0], 2), (kinds[1], 3))
    (written,) = hand_over(run_of(layout={"dp": 4}), both, tmp_path, ["torchrun"]).written
    script = written.files[1].read_text()
    assert "NODE_RANK 0 to 1 on new." in script
    assert "NODE_RANK 2 to 3 on old." in script
    assert not any("as if all devices were equally fast" in note for note in written.notes.differs)
    (balanced,) = hand_over(run_of(layout={"pp": 2, "dp": 8}), both, tmp_path / "balanced", ["torchrun"]).written
    assert any(f"set a layout.partition for {both.name}" in note for note in balanced.notes.differs)
    uneven = mixed((kinds[0], 2), (replace(kinds[1], devices_per_node=8), 1))
    for cluster, reason in (
        (uneven, "nodes have different numbers of devices (4 in new, 8 in old)"),
        (mixed((kinds[0], 2)), "mixed has 8 devices (2 x 4 new), found a run on 16"),
    ):
        (refused,) = hand_over(run_of(layout={"dp": 4}), cluster, tmp_path / "other", ["torchrun"]).refused
        assert reason in refused.reasons[0]
    alone = hand_over(run_of(layout={"dp": 2}), uneven, tmp_path / "third", ["torchrun"]).written[0]
    assert " on new." not in alone.files[1].read_text()
