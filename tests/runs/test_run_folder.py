"""Writing a run folder while the disk is full."""

import errno
import json
import os
from pathlib import Path

import pytest

from pipeloom.errors import RunError, UserError
from pipeloom.runs.run_folder import DRAFTS, METRICS, TRACE, WARNINGS, RunFolder
from pipeloom.runs.run_start import go_back


class Full:
    """A file on a disk that has room for a few bytes only."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        some, self.room = data[: self.room], max(0, self.room - len(data))
        return self.file.write(some)


def test_metrics_wait_for_room_on_a_full_disk_and_no_line_is_lost_or_cut(tmp_path):
    folder = RunFolder(tmp_path)
    folder.add_metrics({"step": 1})
    folder._metrics = disk = Full(folder._metrics, 7)
    folder.add_metrics({"step": 2})
    folder.add_metrics({"step": 3})
    assert len((tmp_path / METRICS).read_text().splitlines()[-1]) == 7
    disk.room = 1000
    folder.add_metrics({"step": 4})
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2, 3, 4]
    disk.file.close()


def test_a_warning_that_a_full_disk_has_no_room_for_ends_nothing(tmp_path):
    (tmp_path / WARNINGS).symlink_to("/dev/full")
    RunFolder(tmp_path).add_warning("step 2: the disk is full")


@pytest.fixture
def full_disk(monkeypatch):
    def fill(file, text, **_):
        file.write_bytes(text[:7].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)


@pytest.mark.usefixtures("full_disk")
def test_a_file_that_the_run_can_do_without_is_a_warning_and_the_older_one_stays(tmp_path, capsys):
    (tmp_path / TRACE).write_bytes(b"old")
    folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match="No space left on device"):
        folder.write(TRACE, "a long new text")
    folder.write(TRACE, "a long new text", is_needed=False)
    printed = f"cannot write {tmp_path / TRACE}: No space left on device; the run continues without it"
    assert capsys.readouterr().err == f"pipeloom train: warning: {printed}\n"
    assert (tmp_path / WARNINGS).read_text().endswith(f"  {printed}\n")
    assert sorted(one.name for one in tmp_path.iterdir()) == [TRACE, WARNINGS]
    assert (tmp_path / TRACE).read_bytes() == b"old"


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("is_needed", [True, False])
def test_a_disk_that_is_full_before_the_first_step_refuses_the_run(tmp_path, is_needed):
    (tmp_path / DRAFTS).mkdir()
    with pytest.raises(UserError, match="No space left on device; free some space, or choose another --output.folder"):
        RunFolder(tmp_path).write(TRACE, "a long new text", is_needed=is_needed)
    assert [one.name for one in tmp_path.iterdir()] == [DRAFTS]


def test_the_end_writes_lines_that_waited_or_says_that_they_are_missing(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.add_metrics({"step": 1})
    folder._metrics = disk = Full(folder._metrics, 7)
    disk.close = lambda: None
    folder.add_metrics({"step": 2})
    folder.close()
    assert "metrics.jsonl lacks its last lines (1): No space left on device" in capsys.readouterr().err
    assert [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()[:1]] == [{"step": 1}]
    disk.file.close()
    folder.add_metrics({"step": 3})
    folder._metrics, left = Full(folder._metrics, 3), folder._metrics
    folder.add_metrics({"step": 4})
    folder._metrics = left
    folder.close()
    assert not capsys.readouterr().err
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2, 3, 4]


def test_going_back_on_a_full_disk_drops_lines_that_wait(tmp_path):
    folder = RunFolder(tmp_path)
    folder.add_metrics({"step": 1})
    folder._metrics = disk = Full(folder._metrics, 7)
    for step in (2, 3):
        folder.add_metrics({"step": step})
    folder._metrics = disk.file
    go_back(folder, 2)
    folder.add_metrics({"step": 3})
    folder.close()
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2, 3]
