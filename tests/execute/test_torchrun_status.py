"""The status of torchrun's processes, which torchrun itself replaces by 1."""

import signal
import subprocess
import sys

from forked import free_port

from pipeloom.cli import main

WORKER = "import sys; sys.exit(int(sys.argv[1]))"
WAITS = """import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def agent(script, *words):
    command = [sys.executable, "-m", "pipeloom.execute.processes.torchrun", "--nproc-per-node", "1"]
    return [*command, "--master-port", str(free_port()), str(script), *map(str, words)]


def test_the_status_of_a_process_is_that_of_torchrun(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = subprocess.run(agent(script, 75), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75, done.stderr


def test_a_run_that_ends_on_a_schedulers_signal_goes_on_later(tmp_path):
    script, running = tmp_path / "worker.py", tmp_path / "running"
    script.write_text(WAITS)
    with subprocess.Popen(agent(script, running), stderr=subprocess.DEVNULL) as job:
        try:
            while not running.exists():
                assert job.poll() is None
            job.send_signal(signal.SIGTERM)
            assert job.wait(timeout=30) == 75
        finally:
            job.kill()


def test_ranks_that_wait_for_a_rank_that_refuses_the_run_end_by_the_launchers_signal(tmp_path):
    """In a library, where no handler of Python runs: torchrun would kill them after 30 s."""
    (tmp_path / "text.txt").write_text("short")
    command = [sys.executable, "-m", "pipeloom.execute.processes.torchrun", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "pipeloom", "train", "--layout.pp", "2", "--layout.loops", "1"]
    command += ["--data.path", str(tmp_path / "text.txt"), "--output.folder", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "text.txt" in done.stderr
    assert "exitcode  : 75" in done.stderr  # of the other rank


def test_another_rank_lets_rank_0_print_what_both_find_wrong(monkeypatch, capsys):
    """A launcher ends all ranks when the first one ends."""
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, waits in (("0", False), ("1", True)):
        monkeypatch.setenv("RANK", rank)
        assert main(["simulate", "--layout.ppp", "3"]) == 2
        assert bool(slept) is waits
        assert ("--layout.ppp" in capsys.readouterr().err) is not waits
