"""Locks on folders, held by real processes and ended by real kills."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from pipeloom.errors import UserError
from pipeloom.system.folder_lock import LOCK, is_locked, lock_folder, take_over

HOLD = """
import os, sys, time
from pathlib import Path
from pipeloom.system.folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
child = os.fork() if "fork" in sys.argv else 0
if child or "fork" not in sys.argv:
    print("held", child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path):
    """Starts a process that locks the folder, and returns it when it has."""
    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), *words], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        printed = process.stdout.readline().split()
        assert printed[0] == "held"
        return process, int(printed[1])

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_process_is_refused_with_the_first_ones_number_and_host(tmp_path, hold):
    assert is_locked(tmp_path) is False
    process, _ = hold()
    assert is_locked(tmp_path) is True
    before = (tmp_path / LOCK).read_text()
    with pytest.raises(UserError) as refused:
        lock_folder(tmp_path, patience_s=0.1)
    assert f"{tmp_path} is in use by process {process.pid} on host {socket.gethostname()} since 2" in str(refused.value)
    assert (tmp_path / LOCK).read_text() == before


def test_another_process_sees_whether_a_folder_is_locked_and_changes_nothing(tmp_path, hold, monkeypatch):
    assert is_locked(tmp_path) is False
    assert not (tmp_path / LOCK).exists()
    process, _ = hold()
    before = (tmp_path / LOCK).read_text()
    assert is_locked(tmp_path) is True
    assert (tmp_path / LOCK).read_text() == before
    process.kill()
    process.wait()
    assert is_locked(tmp_path) is False
    assert (tmp_path / LOCK).read_text() == before
    lock_folder(tmp_path, patience_s=0.1).release()


def test_without_locks_of_the_file_system_the_holder_is_compared(tmp_path, hold, monkeypatch):
    process, _ = hold()

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert is_locked(tmp_path) is True
    process.kill()
    process.wait()
    assert is_locked(tmp_path) is False
    holder = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(holder | {"host": "another"}))
    assert is_locked(tmp_path) is None


def test_a_killed_process_leaves_no_lock_behind(tmp_path, hold):
    process, _ = hold()
    process.kill()
    process.wait()
    assert (tmp_path / LOCK).exists()
    assert is_locked(tmp_path) is False
    lock = lock_folder(tmp_path, patience_s=0)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_worker_holds_the_lock_as_long_as_it_lives_and_no_longer(tmp_path, hold):
    process, child = hold("fork")
    process.kill()
    process.wait()
    with pytest.raises(UserError, match="is in use"):
        lock_folder(tmp_path, patience_s=0.1)
    os.kill(child, signal.SIGKILL)
    lock_folder(tmp_path).release()


def test_whoever_waits_for_a_lock_gets_it_when_its_worker_ends_a_moment_later(tmp_path, hold):
    process, _ = hold()
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
    begin = time.monotonic()
    lock_folder(tmp_path).release()
    assert time.monotonic() - begin > 0.2
    killer.wait()


def test_a_lock_whose_file_was_released_while_another_process_opened_it_is_not_held_twice(tmp_path, monkeypatch):
    first, real = lock_folder(tmp_path), fcntl.flock
    others = []

    def after_release(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", real)
        first.release()
        others.append(lock_folder(tmp_path))
        real(descriptor, how)  # of the file that has no name any more: it succeeds

    monkeypatch.setattr(fcntl, "flock", after_release)
    with pytest.raises(UserError, match="is in use"):
        lock_folder(tmp_path, patience_s=0)
    others[0].release()


def test_the_next_run_takes_over_only_what_a_dead_process_held(tmp_path, hold):
    assert take_over(tmp_path) is None
    (tmp_path / LOCK).touch()
    assert take_over(tmp_path) is None  # its maker is about to lock it
    process, _ = hold()
    assert take_over(tmp_path) is None
    process.kill()
    process.wait()
    lock = take_over(tmp_path)
    assert lock is not None
    lock.release()


def without_locks(descriptor, how):
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_of_the_file_system_a_living_process_of_this_host_is_still_seen(tmp_path, hold, monkeypatch):
    process, _ = hold()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(UserError, match=f"in use by process {process.pid} on host"):
        lock_folder(tmp_path, patience_s=0)
    assert take_over(tmp_path) is None
    assert is_locked(tmp_path) is True
    process.kill()
    process.wait()
    assert is_locked(tmp_path) is False
    lock = lock_folder(tmp_path, patience_s=0)
    assert not lock.is_kept
    lock.release()


@pytest.mark.parametrize("changed", [{"host": "elsewhere"}, {"started": "another boot 1"}])
def test_without_locks_a_number_of_another_host_or_another_process_is_no_holder(tmp_path, monkeypatch, changed):
    lock_folder(tmp_path)
    holder = json.loads((tmp_path / LOCK).read_text())
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(UserError, match="in use"):
        lock_folder(tmp_path, patience_s=0)
    (tmp_path / LOCK).write_text(json.dumps({**holder, **changed}))
    assert not lock_folder(tmp_path, patience_s=0).is_kept


@pytest.mark.parametrize("wrong", [{"pid": "1"}, {"pid": 0}, {"pid": -1}, {"pid": 2**80}, {"pid": None}, {"host": 1}])
def test_without_locks_a_file_of_another_program_names_no_holder(tmp_path, monkeypatch, wrong):
    lock_folder(tmp_path)
    holder = json.loads((tmp_path / LOCK).read_text())
    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert is_locked(tmp_path) is True
    (tmp_path / LOCK).write_text(json.dumps({**holder, **wrong}))
    assert is_locked(tmp_path) is None
    assert not lock_folder(tmp_path, patience_s=0).is_kept


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path / "nowhere")
