"""The status of torchrun's processes, which torchrun itself replaces by 1."""

import signal
import subprocess
import sys

from forked import free_port

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
