"""Writing a run folder while the disk is full."""

import errno
import json
import os

from pipeloom.runs.run_folder import METRICS, WARNINGS, RunFolder


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
