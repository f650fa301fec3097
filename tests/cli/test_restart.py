"""A run whose processes fail goes on: from memory, from a checkpoint, or with fewer ranks; with the same results."""

import json
import re
import signal
from pathlib import Path
from statistics import median_high

import pytest
from faults import LONG_S, STALL_S, Chaos, Fault, curve, differences, repeated, restarts
from forked import Forked
from thinned import thinned

from pipeloom.cli import main
from pipeloom.config.file import read_run_file
from pipeloom.runs.run_folder import PREDICTED_TRACE
from pipeloom.runs.run_reading import read_run
from pipeloom.system.temporary import SHARED_MEMORY
from pipeloom.trace import step_s_of

STEPS = 14


def kept_folders(chaos):
    """Folders in shared memory that the run made; other tests run at the same time."""
    return [Path(line) for line in (chaos.folder / "kept").read_text().splitlines()]


def step_times_s(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["step_time_s"] for line in lines}


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def measured_s(run):
    return summary_of(run)["step_time_s"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    chaos = Chaos(tmp_path_factory.mktemp("quiet") / "quiet", STEPS)
    chaos.start()
    chaos.finish()
    return chaos


FAULTS = [("kill", "stop"), ("refused port", "cut file"), ("lost folder", "full disk")]
"""All of them together: ``make chaos``."""


@pytest.mark.parametrize("kinds", thinned(((one,) for one in FAULTS), 3))
def test_a_run_with_faults_ends_as_a_quiet_one(tmp_path, quiet, kinds):
    chaos = Chaos(tmp_path / "chaos", STEPS, "--restart.times 9", STALL_S if "stop" in kinds else LONG_S)
    chaos.start()
    for index, kind in enumerate(kinds):
        chaos.do(Fault(kind, 1 + index, 4 + 4 * index, 0.0))
    chaos.finish()
    assert differences(chaos, quiet) == []
    assert max(repeated(chaos.folder), default=0) <= 1
    assert restarts(chaos)
    assert measured_s(chaos.run) == median_high(step_times_s(chaos.run).values())  # of all processes
    assert {one.parent for one in kept_folders(chaos)} == {SHARED_MEMORY}
    assert not any(one.exists() for one in kept_folders(chaos))


def test_without_states_in_memory_it_goes_on_from_a_checkpoint(tmp_path, quiet):
    chaos = Chaos(tmp_path / "chaos", STEPS, "--restart.times 1 --restart.keep-every 1000 --training.predict")
    chaos.start()
    chaos.do(Fault("kill", 0, 8, 0.0))
    chaos.finish()
    assert differences(chaos, quiet) == []
    (line,) = restarts(chaos)
    assert re.search("started again from step-00000[36], on the disk, after: rank 0 was killed", line)
    assert measured_s(chaos.run) == median_high(step_times_s(chaos.run).values())
    # By the processes that failed.
    predicted_s = step_s_of((chaos.run / PREDICTED_TRACE).read_text())
    assert summary_of(chaos.run)["predicted_step_time_s"] == predicted_s > 0
    assert summary_of(chaos.run)["predicted_bubble_fraction"] > 0


def test_a_rank_that_fails_too_often_ends_the_run(tmp_path):
    chaos = Chaos(tmp_path / "chaos", STEPS, "--restart.times 1")
    chaos.start()
    for step in (3, 6):
        chaos.wait_until(step)
        chaos.kill(2)
    assert chaos.command.end(60) == 1
    assert "rank 2 has failed 2 times, more often than restart.times" in chaos.command.stderr
    assert "To resume: pipeloom train" in chaos.command.stderr


def test_four_ranks_that_lose_one_go_on_as_three(tmp_path):
    chaos = Chaos(tmp_path / "chaos", STEPS, "--restart.times 1 --restart.layout plan --training.predict")
    chaos.start()
    for step in (3, 6):
        chaos.do(Fault("kill", 2, step, 0.0))
    chaos.finish()
    config, problems = read_run_file(chaos.run / "config.toml")
    assert problems == []
    assert config.layout.num_ranks == 3
    line = restarts(chaos)[-1]
    assert "without rank 2: " in line
    (step,) = re.findall(r"from step (\d+), in memory", line)
    own_s = [seconds for number, seconds in step_times_s(chaos.run).items() if number > int(step)]
    assert measured_s(chaos.run) == median_high(own_s)  # not of four ranks
    assert read_run(chaos.run).begun == int(step)
    # The prediction was of four ranks, too.
    assert summary_of(chaos.run)["predicted_step_time_s"] is None
    assert not (chaos.run / PREDICTED_TRACE).exists()
    # The same state under the same layout, from a checkpoint.
    before = Chaos(tmp_path / "before", STEPS, f"--checkpoint.keep 100 --checkpoint.every {step}")
    before.start()
    before.finish()
    folder = before.run / "checkpoints" / f"step-{int(step):06}"
    words = ["train", str(chaos.run / "config.toml"), "--checkpoint.resume", str(folder), "--restart.times", "0"]
    words += ["--restart.layout", "same", "--output.folder", str(tmp_path / "after")]
    after = Forked(tmp_path, words)
    assert after.end(60) == 0, after.stderr
    assert curve(chaos.run) == curve(tmp_path / "after")
    assert [step for step, _, _ in curve(chaos.run)] == list(range(1, STEPS + 1))


def test_an_error_that_comes_again_ends_the_run(tmp_path):
    chaos = Chaos(tmp_path / "chaos", STEPS, "--restart.times 9 --optimizer.lr 1e30 --optimizer.clip-grad-norm inf")
    chaos.start()
    assert chaos.command.end(60) == 1
    assert "second failure of this kind at the same step" in chaos.command.stderr
    assert len(restarts(chaos)) == 1


def test_a_signal_ends_a_run_that_was_started_again(tmp_path):
    chaos = Chaos(tmp_path / "chaos", 1000, "--restart.times 1")
    chaos.start()
    chaos.do(Fault("kill", 1, 3, 0.0))
    chaos.command.send_signal(signal.SIGTERM)
    assert chaos.command.end(60) == 75


def test_a_launcher_starts_processes_itself(tmp_path, monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--restart.times", "2"]) == 2
    assert "restart.times 2 has no effect under a launcher" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.long
def test_ranks_that_share_experts_lose_one_and_go_on_from_their_states_in_memory(tmp_path):
    words = "--layout.pp 1 --layout.dp 4 --layout.loops 1 --layout.ep 2 --layout.num-microbatches 3 --model.experts 6"
    quiet = Chaos(tmp_path / "quiet", STEPS, words)
    quiet.start()
    chaos = Chaos(tmp_path / "chaos", STEPS, f"{words} --restart.times 1 --restart.layout plan")
    chaos.start()
    for step in (3, 6):
        chaos.do(Fault("kill", 2, step, 0.0))
    chaos.finish()
    quiet.finish()
    assert [re.search("in memory|on the disk", line).group() for line in restarts(chaos)] == ["in memory"] * 2
    config, problems = read_run_file(chaos.run / "config.toml")
    assert problems == []
    assert config.layout.num_ranks == 3
    # On other ranks sums are in another order.
    for own, other in zip(curve(chaos.run), curve(quiet.run), strict=True):
        assert own == pytest.approx(other, rel=1e-3)
