"""The file of what a rank did last: written through memory, read by others, whatever happened to the writer."""

import errno
import os
import time
from types import SimpleNamespace

import pytest

from pipeloom import make_schedule
from pipeloom.errors import UserError
from pipeloom.passes import lower
from pipeloom.runs import action_log
from pipeloom.runs.action_log import ActionLog, read_ranks
from pipeloom.training.records.noted import Noted
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


def test_no_file_is_sparse(tmp_path):
    """A store to a mapped page that has no room on a full disk would kill the rank."""
    log = open_log(tmp_path)
    log.row("training", lower(make_schedule("1f1b", pp=2, num_microbatches=400)), 0)
    found = (tmp_path / "rank-00000").stat()
    assert found.st_size > 100_000
    assert found.st_blocks * 512 >= found.st_size


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_rank_without_room_for_its_file_goes_on_without_one(tmp_path, monkeypatch, room):
    calls = []

    def take_room(*_):
        calls.append(1)
        if len(calls) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        take(*_)

    take = action_log.take_room
    monkeypatch.setattr(action_log, "take_room", take_room)
    log = open_log(tmp_path)
    assert log.problem == ("" if room else "No space left on device")
    for name in ("training", "validation"):
        row = log.row(name, SCHEDULE, 0)
        row.cells[2 * len(SCHEDULE.rows[0]) - 1] = 1
        row.run.begin()
    log.begin_step(3)
    log.end("an error")
    assert log.problem == "No space left on device"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["training.txt", "validation.txt"]


def test_a_part_of_a_schedule_is_removed(tmp_path):
    log = open_log(tmp_path)
    (tmp_path / "training.txt").symlink_to("/dev/full")
    log.row("training", SCHEDULE, 0)
    assert log.problem == "No space left on device"
    assert not list(tmp_path.iterdir())


def test_one_warning_names_the_ranks_without_a_file(capsys):
    noted = object.__new__(Noted)
    noted.log = None
    noted.world = SimpleNamespace(gather=lambda own: [own, "No space left", "", "No space left"])
    noted.warn()
    assert capsys.readouterr().err == (
        "pipeloom train: warning: cannot note what ranks 1, 3 did last: No space left; the run continues, "
        "`pipeloom inspect` lacks them\n"
    )
    noted.world = SimpleNamespace(gather=lambda own: [own])
    noted.warn()
    assert not capsys.readouterr().err


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
