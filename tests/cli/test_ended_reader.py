"""A command whose output nobody reads to the end, or cannot be written, writes its files all the same."""

import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeloom.system.output import _Lasting

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


SMALL = [
    *("--model.hidden-size", "16", "--model.num-layers", "1", "--model.num-heads", "2", "--data.seq-len", "16"),
    *("--layout.pp", "1", "--layout.num-microbatches", "1", "--training.steps", "1", "--training.no-predict"),
    *("--training.sample-tokens", "4", "--training.validation-batches", "0", "--checkpoint.final", "none"),
]


def run_in_a_shell(words, output, folder):
    """The completed process of a command with redirected output."""
    command = f"{shlex.join([sys.executable, '-m', 'pipeloom', *words])} {output}"
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, timeout=120, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("output", ["> /dev/full", ">&-", "> /dev/full 2>&1", ">&- 2>&-"])
def test_a_training_whose_output_cannot_be_written_is_done(tmp_path, output):
    (tmp_path / "text.txt").write_text("the cat and the dog\n" * 99)
    words = ["train", *SMALL, "--data.path", "text.txt", "--output.folder", "run"]
    done = run_in_a_shell(words, output, tmp_path)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_command_without_an_output_has_its_own_status(tmp_path):
    assert run_in_a_shell([*PLAN, "--no-explain", "--out", "planned"], ">&-", tmp_path).returncode == 0
    assert (tmp_path / "planned" / "run.toml").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("output", ["> /dev/full", "> /dev/full 2>&1"])
def test_a_command_with_a_full_output_writes_its_files_and_fails(tmp_path, output):
    done = run_in_a_shell([*PLAN, "--no-explain", "--out", "planned"], output, tmp_path)
    assert done.returncode == 1
    assert (tmp_path / "planned" / "run.toml").exists()
    if "2>&1" not in output:
        assert done.stderr.decode().splitlines()[-1] == "pipeloom: the output is incomplete: No space left on device"
        assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_wrong_input_keeps_its_status_where_the_output_is_full(tmp_path):
    assert run_in_a_shell(["--help-all", "plan"], "> /dev/full", tmp_path).returncode == 1
    assert run_in_a_shell([], "> /dev/full", tmp_path).returncode == 2


def test_an_output_that_does_not_block_is_waited_for():
    """Another program may have set the descriptor of the terminal so; a pipe takes 64 KiB until somebody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    lost = []
    stream = _Lasting(writer, lost)
    text, found = b"x" * 300_000, []

    def read():
        while sum(map(len, found)) < len(text):
            found.append(os.read(reader, 65536))

    thread = threading.Thread(target=read, daemon=True)
    written = stream.write(text)
    thread.start()
    while written < len(text):
        written += stream.write(text[written:])
    thread.join(30)
    os.close(writer)
    os.close(reader)
    assert (b"".join(found), lost) == (text, [])
