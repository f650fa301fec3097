"""Slurm: the script's options, and its logic with srun and scontrol played by others."""

import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest
from clusters import mixed
from launch_runs import CLUSTER, SCANCEL, SCONTROL, SRUN, reasons_of, run_of, written_for

from pipeloom.catalog import load_cluster
from pipeloom.export import hand_over

PROBE = """echo "$NODE_RANK $MASTER_ADDR $MASTER_PORT $RUN $*" >>"$PLAYED/started"
exit "${PROBE_STATUS:-0}"
"""


@pytest.fixture
def played(tmp_path):
    """A folder with the script, and with programs that only note how they were called."""
    written = written_for("slurm", tmp_path, layout={"dp": 2}, training={"device": "cuda"})
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL), ("probe.sh", PROBE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "calls").touch()
    return written, {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PLAYED": str(tmp_path),
        "SCRIPT": "probe.sh",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "20123",
        "SLURM_JOB_NODELIST": "node-[07,11]",
    }


def start(folder, environment, *words):
    command = ["bash", str(folder / "pipeloom.sbatch"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def calls(folder, program):
    return [line for line in (folder / "calls").read_text().splitlines() if line.startswith(program)]


def test_the_script_names_none_that_may_not_be_in_its_folder(tmp_path):
    # Megatron-LM and torchtitan cannot run every run.
    written_for("slurm", tmp_path)
    text = (tmp_path / "pipeloom.sbatch").read_text()
    assert "SCRIPT=NAME" in text
    assert "SCRIPT=megatron.sh" not in text


def test_the_job_asks_for_whole_nodes_and_one_task_on_each(tmp_path, played):
    options = [line for line in (tmp_path / "pipeloom.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    for option in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--time=24:00:00", "--mem=0", "--requeue"):
        assert f"#SBATCH {option}" in options
    assert "#SBATCH --signal=B:USR1@120" in options
    assert played[0].notes.differs == ()


@pytest.mark.parametrize("name", ["gb200-nvl72", "gb300-nvl72"])
def test_the_nodes_of_a_job_are_hosts_where_a_node_of_the_cluster_is_several(tmp_path, name):
    training, layout = {"device": "cuda"}, {"dp": 3, "num_microbatches": 12}
    (written,) = hand_over(run_of(training=training, layout=layout), load_cluster(name), tmp_path, ["slurm"]).written
    script = written.files[-1].read_text()
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    start = (tmp_path / "torchrun.sh").read_text()
    assert "\nnodes=3\nprocesses=4\n" in start
    assert "those of 72 successive ranks must be in one domain" in start


def test_a_run_without_checkpoints_and_one_with_a_long_grace_are_reported_and_signalled_in_time(tmp_path):
    written = written_for("slurm", tmp_path, checkpoint={"every_s": 0, "grace_s": 300})
    assert any("a run that fails has no checkpoint and starts again" in sentence for sentence in written.notes.differs)
    assert any("torchrun kills processes 30 s after the signal" in sentence for sentence in written.notes.differs)
    assert "#SBATCH --signal=B:USR1@360" in (tmp_path / "pipeloom.sbatch").read_text()


def test_gpus_of_nodes_are_requested_for_any_device_of_the_run(tmp_path):
    gpus = replace(CLUSTER, device=replace(CLUSTER.device, num_multiprocessors=108))
    hand_over(run_of(), gpus, tmp_path, ["slurm"])
    assert "#SBATCH --gpus-per-node=4" in (tmp_path / "pipeloom.sbatch").read_text()


def test_a_run_on_cpus_asks_for_no_gpus_and_one_with_checkpoints_does_not_begin_anew(tmp_path):
    written = written_for("slurm", tmp_path, checkpoint={"every": 10})
    assert "--gpus" not in (tmp_path / "pipeloom.sbatch").read_text()
    assert written.notes.differs == ()


def test_nodes_of_several_kinds_have_to_be_ordered_and_the_script_says_so(tmp_path):
    both = mixed(*((replace(CLUSTER, name=name), 2) for name in ("new", "old")))
    (written,) = hand_over(run_of(layout={"dp": 4}), both, tmp_path, ["slurm"]).written
    assert any("the first ranks must be on new, then old" in sentence for sentence in written.notes.differs)
    assert "new, then old" in " ".join((tmp_path / "pipeloom.sbatch").read_text().replace("#", " ").split())


def test_every_node_gets_its_number_the_first_host_and_the_same_port(tmp_path, played):
    done = start(tmp_path, played[1], "--training.steps", "7")
    assert done.returncode == 0, done.stderr
    started = (tmp_path / "started").read_text().splitlines()
    assert started == [f"{node} node-07 20123 {tmp_path / 'run'} --training.steps 7" for node in (1, 0)]
    (srun,) = calls(tmp_path, "srun")
    assert "--kill-on-bad-exit=1" in srun
    assert calls(tmp_path, "scontrol requeue") == []


def test_a_run_that_fails_is_queued_again_a_few_times(tmp_path, played):
    failing = {**played[1], "PROBE_STATUS": "3"}
    assert start(tmp_path, failing).returncode == 3
    assert calls(tmp_path, "scontrol requeue") == ["scontrol requeue 20123"]
    assert [start(tmp_path, failing).returncode for _ in range(2)] == [3, 3]
    done = start(tmp_path, failing)
    assert "ended with status 3, start 4 in a row without a new checkpoint" in done.stdout
    assert len(calls(tmp_path, "scontrol requeue")) == 3


@pytest.mark.parametrize("status", ["3", "75"])
@pytest.mark.parametrize(
    "checkpoint", ["checkpoints/step-%06d/checkpoint.json", "checkpoint/step-%d/.metadata", "latest"]
)
def test_a_run_that_makes_progress_is_queued_again_any_number_of_times(tmp_path, played, status, checkpoint):
    for times in range(1, 6):
        if checkpoint == "latest":
            write = f'mkdir -p "$RUN"\necho {9 * times} >"$RUN/latest_checkpointed_iteration.txt"\n'
        else:
            name = f"$RUN/{checkpoint % (9 * times)}"
            write = f'mkdir -p "$(dirname "{name}")"\ntouch "{name}"\n'
        # Between two checkpoints it fails three times.
        assert [start(tmp_path, {**played[1], "PROBE_STATUS": "3"}).returncode for _ in range(3)] == [3, 3, 3]
        (tmp_path / "probe.sh").write_text(write + PROBE)
        environment = {**played[1], "PROBE_STATUS": status, "SLURM_RESTART_COUNT": "9"}
        assert start(tmp_path, environment).returncode == int(status)
        assert len(calls(tmp_path, "scontrol requeue")) == 4 * times
        (tmp_path / "probe.sh").write_text(PROBE)


def test_a_run_that_ends_in_order_without_a_checkpoint_is_not_queued_for_ever(tmp_path, played):
    environment = {**played[1], "PROBE_STATUS": "75", "SLURM_RESTART_COUNT": "9"}
    assert [start(tmp_path, environment).returncode for _ in range(4)] == [75] * 4
    assert len(calls(tmp_path, "scontrol requeue")) == 3


@pytest.mark.parametrize(
    ("end", "least", "most"), [("+3 hours", 160, 180), ("+1 minute", 1, 1), ("N/A", None, None), (None, None, None)]
)
def test_a_program_that_ends_by_itself_gets_the_minutes_until_shortly_before_the_limit(
    tmp_path, played, end, least, most
):
    if end is not None:
        (tmp_path / "squeue").write_text(f'#!/bin/bash\ndate -d "{end}" +%FT%T 2>/dev/null || echo "{end}"\n')
        (tmp_path / "squeue").chmod(0o755)
    (tmp_path / "probe.sh").write_text('echo "${STOP_AFTER_MIN:-none}" >"$PLAYED/minutes"\n')
    assert start(tmp_path, played[1]).returncode == 0
    found = (tmp_path / "minutes").read_text().strip()
    assert found == "none" if least is None else least <= int(found) <= most


def test_a_run_that_is_stopped_before_the_time_limit_is_queued_again(tmp_path, played):
    (tmp_path / "probe.sh").write_text('touch "$PLAYED/running"\nsleep 30\n')
    command = ["bash", str(tmp_path / "pipeloom.sbatch")]
    job = subprocess.Popen(command, env=played[1], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not (tmp_path / "running").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        job.wait(timeout=20)
        assert not (tmp_path / "killed").exists()
        assert calls(tmp_path, "scancel") == ["scancel --signal=TERM 20123"]
        assert calls(tmp_path, "scontrol requeue") == ["scontrol requeue 20123"]
        assert job.returncode != 0
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # the sleep, which the played srun does not end
        with job.stdout as stream:
            printed = stream.read()
    assert "stopped before the time limit" in printed


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_restart_goes_on_from_a_checkpoint_or_begins_beside_what_is_left(tmp_path, played, has_checkpoint):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "config.toml").touch()
    if has_checkpoint:
        (run / "checkpoints" / "step-000002" / "checkpoint.json").touch()
    assert start(tmp_path, {**played[1], "SLURM_RESTART_COUNT": "1"}).returncode == 0
    assert (tmp_path / "run.start-1").exists() != has_checkpoint
    assert run.exists() == has_checkpoint


def test_what_torchrun_cannot_start_slurm_cannot_either(tmp_path):
    (reason,) = reasons_of("slurm", tmp_path, layout={"pp": 3, "dp": 2, "num_microbatches": 6})
    assert reason.startswith("6 processes do not fill nodes of 4 devices")
