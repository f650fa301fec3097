"""The file of what a rank did last: written through memory, read by others, whatever happened to the writer."""

import os
import time

import pytest

from pipeloom import make_schedule
from pipeloom.errors import UserError
from pipeloom.passes import lower
from pipeloom.runs.action_log import ActionLog, read_ranks
from pipeloom.workload.layout import Coordinates

SCHEDULE = lower(make_schedule("1f1b", pp=2, num_microbatches=2))


def open_log(folder, rank=0):
    return ActionLog(folder, rank, 2, Coordinates(rank, 0, 0))


def test_what_a_rank_notes_is_read_at_once(tmp_path):
    log = open_log(tmp_path, 1)
    exchange = log.activity("exchange", [0, 1], "data-parallel")
    row = log.row("training", SCHEDULE, 1)
    log.begin_step(7)
    exchange.begin()
    row.run.begin()
    row.cells[2] = -time.monotonic_ns()
    (one,) = read_ranks(tmp_path)
    assert (one.rank, one.size, one.place, one.step, one.pid) == (1, 2, (1, 0, 0), 7, os.getpid())
    assert (one.process, one.has_ended, one.text) == ("runs", False, "")
    found = {it.name: it for it in one.activities}
    assert (found["exchange"].ranks, found["exchange"].lane, found["exchange"].is_open) == (
        (0, 1),
        "data-parallel",
        True,
    )
    assert found["training"].is_open
    assert len(one.rows["training"]) == len(SCHEDULE.rows[1])
    assert one.rows["training"][1, 0] < 0 == one.rows["training"][0, 0]


def test_rank_0_writes_the_schedule(tmp_path):
    open_log(tmp_path, 1).row("training", SCHEDULE, 1)
    assert not (tmp_path / "training.txt").exists()
    open_log(tmp_path, 0).row("training", SCHEDULE, 0)
    assert "0F0" in (tmp_path / "training.txt").read_text()


def test_another_schedule_takes_the_place_of_one_with_its_name_also_in_a_folder_that_was_moved(tmp_path):
    before, after = (lower(make_schedule("1f1b", pp=1, num_microbatches=number)) for number in (2, 5))
    (tmp_path / "draft").mkdir()
    log = open_log(tmp_path / "draft")
    first = log.row("training", before, 0)
    (tmp_path / "draft").rename(tmp_path / "actions")
    for _ in range(100):  # more than there is room for activities
        found = log.row("training", after, 0)
    assert found.run is first.run
    assert len(found.cells) >= 2 * len(after.rows[0])
    assert (tmp_path / "actions" / "training.txt").read_text().count("F") == 5
    (rank,) = read_ranks(tmp_path / "actions")
    assert {name: len(row) for name, row in rank.rows.items()} == {"training": len(after.rows[0])}


def test_an_error_is_distinct_from_a_note(tmp_path):
    log = open_log(tmp_path)
    log.note("MainThread: somewhere")
    log.end()
    (one,) = read_ranks(tmp_path)
    assert (one.has_ended, one.has_failed, one.text) == (True, False, "")
    log.end("OSError: no")
    (one,) = read_ranks(tmp_path)
    assert (one.has_failed, one.text) == (True, "OSError: no")


def test_an_interruption_is_distinct_from_another_error_and_no_note_replaces_an_end(tmp_path):
    log = open_log(tmp_path)
    log.end("interrupted by SIGTERM", is_interrupted=True)
    log.note("MainThread: somewhere")  # as from a thread that still beats
    (one,) = read_ranks(tmp_path)
    assert (one.has_failed, one.is_interrupted, one.text) == (True, True, "interrupted by SIGTERM")
    log.end("OSError: no")
    assert not read_ranks(tmp_path)[0].is_interrupted


def test_long_texts_are_cut(tmp_path):
    log = open_log(tmp_path)
    log.note("ä" * 100_000)
    (one,) = read_ranks(tmp_path)
    assert 4000 < len(one.text) < 8192


def test_a_killed_writer_leaves_its_file_and_is_gone(tmp_path):
    pid = os.fork()
    if pid == 0:
        log = open_log(tmp_path)
        log.begin_step(3)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    (one,) = read_ranks(tmp_path)
    assert (one.step, one.process, one.has_ended) == (3, "is gone", False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"hello",
        lambda content: content[:70_000],
        lambda content: content.replace(b'"format": 1', b'"format": 9'),
        lambda content: content.replace(b'"count": ', b'"count": 9999'),
        lambda content: content.replace(b'"offset": ', b'"offset": -'),
        lambda content: content.replace(b'"rank": 0', b'"rank": []'),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path, damage):
    open_log(tmp_path).row("training", SCHEDULE, 0)
    file = tmp_path / "rank-00000"
    content = damage(file.read_bytes())
    assert content != file.read_bytes()
    file.write_bytes(content)
    with pytest.raises(UserError, match="rank-00000 is no file of a rank's actions"):
        read_ranks(tmp_path)
