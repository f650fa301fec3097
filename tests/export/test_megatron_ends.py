"""How megatron.sh ends, with Megatron-LM under torchrun played by another program."""

import os
import signal
import subprocess
import time

import pytest
from launch_runs import SCONTROL, SRUN, command_of, values_of, written_for

# A start trains up to step $UNTIL, unless its newest checkpoint is there already, and ends with $STATUS.
MEGATRON = """#!/bin/bash
latest="$RUN/latest_checkpointed_iteration.txt"
echo "from $(cat "$latest" 2>/dev/null || echo 0): $*" >>"$RUN/started"
if [[ -n "${WAITS:-}" ]]; then
  # torchrun passes a signal on, and ends with 1; its processes write a checkpoint.
  trap '[[ -z "${UNTIL:-}" ]] || echo "$UNTIL" >"$latest"; exit 1' TERM
  touch "$RUN/running"
  while true; do sleep 0.02; done
fi
if [[ -n "${ADVANCES:-}" ]]; then UNTIL=$(($(cat "$latest" 2>/dev/null || echo 0) + ADVANCES)); fi
if [[ -n "${UNTIL:-}" ]]; then echo "$UNTIL" >"$latest"; fi
exit "${STATUS:-0}"
"""


@pytest.fixture
def played(tmp_path):
    """The script of a run of 200 steps, and an environment in which it starts ``MEGATRON``."""
    written_for("megatron", tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "python").write_text(MEGATRON)
    (tmp_path / "python").chmod(0o755)
    return {
        "PATH": os.environ["PATH"],
        "PYTHON": str(tmp_path / "python"),
        "RUN": str(tmp_path / "run"),
        "MEGATRON": "/megatron",
        "DATA": "mock",
    }


def start(folder, environment, *words):
    command = ["bash", str(folder / "megatron.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("until", "status", "words", "expected"),
    [
        ("200", "0", (), 0),
        ("120", "0", (), 75),
        (None, "0", (), 75),
        ("200", "0", ("--train-iters", "300"), 75),
        ("300", "0", ("--train-iters=300",), 0),
        ("120", "1", (), 1),
    ],
)
def test_an_end_before_the_last_step_has_a_status_of_its_own(tmp_path, played, until, status, words, expected):
    environment = {**played, "STATUS": status, **({} if until is None else {"UNTIL": until})}
    assert start(tmp_path, environment, *words).returncode == expected


@pytest.mark.parametrize(("until", "expected"), [("7", 75), (None, 1)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_torchrun_and_the_run_goes_on_later_if_it_wrote_a_checkpoint(
    tmp_path, played, until, expected, number
):
    environment = {**played, "WAITS": "1", **({} if until is None else {"UNTIL": until})}
    command = ["bash", str(tmp_path / "megatron.sh")]
    job = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        while not (tmp_path / "run" / "running").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(number)
        assert job.wait(timeout=20) == expected
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def queued(folder, environment):
    """Starts of a Slurm job until it is not queued again: the number of starts, and its last status."""
    written_for("slurm", folder)
    for name, text in (("srun", SRUN.replace("1 0", "0")), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PLAYED": str(folder), "SCRIPT": "megatron.sh"}
    own |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-1"}
    for times in range(1, 20):
        calls.write_text("")
        environment = {**environment, **own, "SLURM_RESTART_COUNT": str(times - 1)}
        command = ["bash", str(folder / "pipeloom.sbatch")]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False)
        if "scontrol requeue" not in calls.read_text():
            return times, done.returncode
    return None


def test_a_job_of_slurm_goes_on_until_the_last_step(tmp_path, played):
    assert queued(tmp_path, {**played, "ADVANCES": "40"}) == (5, 0)
    starts = (tmp_path / "run" / "started").read_text().splitlines()
    assert [line.partition(":")[0] for line in starts] == [f"from {step}" for step in (0, 40, 80, 120, 160)]


def test_a_job_of_slurm_without_progress_ends(tmp_path, played):
    assert queued(tmp_path, played) == (4, 75)


@pytest.mark.parametrize(
    ("limit_s", "minutes", "expected"),
    [(None, None, None), (3650.0, None, "60"), (10.0, None, "1"), (None, "90", "90"), (3650.0, "20", "20")],
)
def test_the_time_limit_is_one_in_minutes(tmp_path, limit_s, minutes, expected):
    checkpoint = {} if limit_s is None else {"time_limit_s": limit_s}
    written = written_for("megatron", tmp_path, checkpoint=checkpoint)
    more = {} if minutes is None else {"STOP_AFTER_MIN": minutes}
    found = command_of(written.files[0], MEGATRON="/megatron", DATA="mock", **more)
    assert values_of(found, "--exit-duration-in-mins") == (None if expected is None else [expected])
    assert any("checkpoint.time_limit_s" in one for one in written.notes.differs) == (limit_s is not None)


@pytest.mark.parametrize("grace_s", [25.0, 0.0])
def test_a_signal_saves_unless_the_run_allows_no_time_for_it(tmp_path, grace_s):
    (script,) = written_for("megatron", tmp_path, checkpoint={"grace_s": grace_s}).files
    found = command_of(script, MEGATRON="/megatron", DATA="mock")
    assert ("--exit-signal-handler" in found) == (grace_s > 0)


def test_a_long_step_begins_early_enough(tmp_path):
    written_for("megatron", tmp_path)
    script = tmp_path / "megatron.sh"
    script.write_text(script.read_text().replace("step_minutes=0", "step_minutes=7"))
    for minutes, expected in (("90", "83"), ("5", "1")):
        found = command_of(script, MEGATRON="/megatron", DATA="mock", STOP_AFTER_MIN=minutes)
        assert values_of(found, "--exit-duration-in-mins") == [expected]
