"""A command whose output nobody reads to the end writes its files all the same."""

import subprocess
import sys

PLAN = ["plan", "--model", "gpt-6.6b", "--cluster", "dgx-a100", "--devices", "8", "--global-batch", "8", "--seq", "512"]


def run_without_a_reader(words, *, merges):
    """Exit status of a command whose reader ends before the first line."""
    command = [sys.executable, "-m", "pipeloom", *words]
    stderr = subprocess.STDOUT if merges else subprocess.PIPE
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        process.stdout.close()
        errors = b"" if merges else process.stderr.read()
        return process.wait(60), errors.decode()


def test_a_plan_is_written(tmp_path):
    status, errors = run_without_a_reader(
        [*PLAN, "--no-explain", "--out", str(tmp_path / "planned"), "--html", str(tmp_path / "plan.html")], merges=False
    )
    assert (status, "Traceback" in errors) == (0, False), errors
    assert {one.name for one in (tmp_path / "planned").iterdir()} >= {"run.toml", "schedule.txt"}
    assert (tmp_path / "plan.html").exists()


def test_so_it_is_where_messages_have_no_reader_either(tmp_path):
    status, _ = run_without_a_reader([*PLAN, "--no-explain", "--out", str(tmp_path / "planned")], merges=True)
    assert status == 0
    assert (tmp_path / "planned" / "run.toml").exists()


def test_the_status_is_the_commands_own(tmp_path):
    status, _ = run_without_a_reader(["simulate", str(tmp_path / "none.toml")], merges=True)
    assert status == 2
