"""Temporary folders of killed runs."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeloom.system import temporary
from pipeloom.system.folder_lock import LOCK
from pipeloom.system.temporary import remove_abandoned, temporary_folder

HOLD = """
import sys
import time
from pathlib import Path
from pipeloom.system.temporary import temporary_folder
with temporary_folder(*map(Path, sys.argv[1:])) as folder:
    (folder / "rendezvous").write_text("mine")
    print(folder, flush=True)
    time.sleep(60)
"""


def start(place, *shared):
    environment = {**os.environ, "TMPDIR": str(place)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *shared], stdout=subprocess.PIPE, text=True, env=environment
    )
    folder = Path(process.stdout.readline().strip())
    assert (folder / "rendezvous").is_file()
    return process, folder


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_next_run_removes_the_folders_of_dead_runs_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, left = start(tmp_path)
    living, used = start(tmp_path)
    for name in ("pipeloom-of-an-older-version", "something-else"):
        (tmp_path / name).mkdir()
    (tmp_path / "pipeloom-file").touch()
    (tmp_path / "something-else" / LOCK).write_text('{"pid": 1, "host": "h", "since": "s", "started": ""}')
    end(dead)
    try:
        with temporary_folder() as folder:
            names = {path.name for path in tmp_path.iterdir()}
        expected = {"pipeloom-of-an-older-version", "something-else", "pipeloom-file"}
        assert names == {folder.name, used.name, *expected}
        assert not left.exists()
        assert (used / "rendezvous").is_file()
    finally:
        end(living)
    assert not folder.exists()


def test_a_killed_run_in_a_folder_named_like_a_temporary_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, left = start(tmp_path)
    end(dead)
    run = tmp_path / "pipeloom-llama"
    run.mkdir()
    (run / "config.toml").write_text("kept")
    (run / LOCK).write_bytes((left / LOCK).read_bytes())
    remove_abandoned()
    assert not left.exists()
    assert {file.name for file in run.iterdir()} == {"config.toml", LOCK}


def test_a_folder_that_another_host_uses_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, left = start(tmp_path)
    end(dead)
    here = left / LOCK
    here.write_text(here.read_text().replace(socket.gethostname(), "another-host"))
    remove_abandoned()
    assert left.is_dir()


def test_any_run_removes_what_a_dead_one_left_in_memory(tmp_path, monkeypatch):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary, "SHARED_MEMORY", shared)

    def make_one():
        with temporary_folder():
            pass

    for remove in (remove_abandoned, make_one):
        dead, left = start(tmp_path, shared)
        living, used = start(tmp_path, shared)
        end(dead)
        try:
            assert left.parent == used.parent == shared
            remove()
            assert list(shared.iterdir()) == [used]
        finally:
            end(living)
        remove_abandoned()
        assert not list(shared.iterdir())


def test_another_users_folder_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, left = start(tmp_path)
    end(dead)
    with monkeypatch.context() as patched:
        patched.setattr(temporary.os, "getuid", lambda: left.stat().st_uid + 1)
        with temporary_folder():
            assert left.is_dir()
    with temporary_folder():
        assert not left.exists()
