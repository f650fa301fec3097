"""What blocks a run, by the schedule's graph, from files of ranks in known states."""

import time

import pytest

from pipeloom import make_schedule
from pipeloom.errors import UserError
from pipeloom.passes import lower
from pipeloom.runs.action_log import ActionLog
from pipeloom.runs.hang import read_hang
from pipeloom.runs.hang_words import blocked_by, sentences_of, state_of
from pipeloom.runs.run_folder import ACTIONS, Failed, RunFolder
from pipeloom.workload.layout import Coordinates

SCHEDULE = lower(make_schedule("1f1b", pp=2, num_microbatches=3))


class Ranks:
    """Two pipeline ranks, perhaps of several replicas, whose states a test sets."""

    def __init__(self, folder, replicas=1, *, begins=True):
        (folder / ACTIONS).mkdir()
        size = 2 * replicas
        everyone = range(size)
        self.logs = [
            ActionLog(folder / ACTIONS, n, size, Coordinates(n // replicas, n % replicas, 0)) for n in everyone
        ]
        self.numbers = [log.activity("exchange of numbers", everyone) for log in self.logs]
        self.reads = [log.activity("read of the batch") for log in self.logs]
        self.rows = [log.row("training", SCHEDULE, rank) for rank, log in enumerate(self.logs)]
        for row in self.rows if begins else ():
            row.run.begin()

    def at(self, rank, slot, *, inside=False, open_slots=()):
        """The host of a rank has issued what is before ``slot``; it has ended except ``open_slots``."""
        cells = self.rows[rank].cells
        for number in range(slot + inside):
            cells[2 * number] = time.monotonic_ns()
            if number not in open_slots and number != slot:
                cells[2 * number + 1] = time.monotonic_ns()
        if inside:
            cells[2 * slot] = -cells[2 * slot]


def slot_of(rank, text):
    return [str(action) for action in SCHEDULE.rows[rank]].index(text)


def messages(rank):
    return [slot for slot, action in enumerate(SCHEDULE.rows[rank]) if "_" in str(action)]


def first(folder):
    return read_hang(folder).found[0]


def test_a_rank_inside_compute_is_found_and_the_other_waits_for_it(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.at(0, slot_of(0, "0F0"), inside=True)
    wanted = slot_of(1, "1F0")
    ranks.at(1, wanted, open_slots=messages(1))
    state = read_hang(tmp_path)
    assert [(it.rank, it.what, it.slot, it.has_begun) for it in state.found] == [(0, "0F0", slot_of(0, "0F0"), True)]
    assert "1RECV_F0" in state.waits[1]
    assert "rank 0, slot" in sentences_of(state.found[0], state)[0]
    assert state_of(state.ranks[1], state).startswith("waits for")


def test_a_rank_between_two_actions_is_found(tmp_path):
    ranks = Ranks(tmp_path)
    send = slot_of(0, "0SEND_F0")
    ranks.at(0, send)
    ranks.at(1, slot_of(1, "1F0"), open_slots=messages(1))
    assert (first(tmp_path).rank, first(tmp_path).what, first(tmp_path).has_begun) == (0, "0SEND_F0", False)


def test_a_message_that_both_ends_have_posted_names_both(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.at(0, slot_of(0, "0B0"), open_slots=messages(0))
    ranks.at(1, slot_of(1, "1F0"), open_slots=messages(1))
    found = read_hang(tmp_path).found
    assert {(it.what, it.ranks) for it in found} == {("0SEND_F0", (0, 1)), ("1RECV_F0", (0, 1))}


def test_a_receive_that_is_posted_early_is_not_the_reason(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.at(0, slot_of(0, "0F0"), inside=True)
    # The host of rank 1 has posted a receive whose send does not exist yet, and hangs before it posts the next.
    receive = slot_of(1, "1RECV_F1")
    ranks.at(1, receive, open_slots=messages(1))
    assert {(it.rank, it.what) for it in read_hang(tmp_path).found} == {(0, "0F0"), (1, "1RECV_F1")}


def test_a_rank_that_others_wait_for_in_an_exchange_is_found(tmp_path):
    ranks = Ranks(tmp_path)
    for rank in (0, 1):
        ranks.rows[rank].run.end()
    ranks.numbers[0].begin()
    ranks.reads[1].begin()
    state = read_hang(tmp_path)
    assert [(it.rank, it.what) for it in state.found] == [(1, "read of the batch")]
    assert state.waits[0] == "exchange of numbers, which rank 1 has not begun"


def test_an_exchange_that_all_have_begun_comes_behind_what_one_rank_does(tmp_path):
    ranks = Ranks(tmp_path)
    for rank in (0, 1):
        ranks.rows[rank].run.end()
        ranks.numbers[rank].begin()
    ranks.reads[1].begin()
    assert (first(tmp_path).rank, first(tmp_path).what) == (1, "read of the batch")
    ranks.reads[1].end()
    assert {(it.rank, it.ranks) for it in read_hang(tmp_path).found} == {(0, (0, 1)), (1, (0, 1))}


def test_a_rank_that_is_a_step_ahead_has_done_its_part(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.at(0, len(SCHEDULE.rows[0]))
    ranks.rows[0].run.end()
    ranks.numbers[0].begin()
    ranks.at(1, len(SCHEDULE.rows[1]))
    state = read_hang(tmp_path)
    assert [(it.rank, it.what, it.slot) for it in state.found] == [(1, "", len(SCHEDULE.rows[1]))]
    assert "behind the" in sentences_of(state.found[0], state)[0]


def test_a_rank_that_has_begun_nothing_does_nothing_since_its_file_was_begun(tmp_path):
    begin_ns = time.monotonic_ns()
    Ranks(tmp_path, begins=False)
    state = read_hang(tmp_path)
    assert [it.since_ns >= begin_ns for it in state.found] == [True, True]
    assert 0 <= state.quiet_s <= (time.monotonic_ns() - begin_ns) * 1e-9


def test_the_rank_that_failed_comes_before_those_that_its_run_ended(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.at(0, slot_of(0, "0F0"), inside=True)
    ranks.at(1, slot_of(1, "1RECV_F0"), inside=True)
    ranks.logs[1].end("KeyError: 'no luck'")
    assert first(tmp_path).rank == 0
    RunFolder(tmp_path).note_failure(Failed(1, ended=(0,)))
    state = read_hang(tmp_path)
    assert [it.rank for it in state.found] == [1, 0]
    assert not state.is_live
    assert "ended with KeyError: 'no luck'" in blocked_by(tmp_path)
    (of_the_other,) = [line for line in sentences_of(state.found[1], state) if "process" in line]
    assert of_the_other.endswith("was ended by its run, since rank 1 had failed")


def test_a_rank_that_its_run_ended_is_no_reason_where_another_one_is_known(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.at(0, slot_of(0, "0F0"), inside=True)
    ranks.at(1, slot_of(1, "1F0"), open_slots=messages(1))
    ranks.logs[1].end("KeyError: 'no luck'")
    folder = RunFolder(tmp_path)
    folder.note_failure(Failed(1, ended=(0,)))
    assert blocked_by(tmp_path) == ""
    folder.note_failure(Failed(None, ended=(0,)))  # such as after a wait that was too long
    assert "was ended by its run, since another rank had failed" in blocked_by(tmp_path)


def test_files_and_schedule_of_different_runs_are_refused(tmp_path):
    Ranks(tmp_path)
    (tmp_path / ACTIONS / "training.txt").write_text("0F0 0F1 0B0 0B1\n")
    with pytest.raises(UserError, match="different runs"):
        read_hang(tmp_path)


def test_a_folder_without_them_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no actions/ with what its ranks did last"):
        read_hang(tmp_path)
    with pytest.raises(UserError, match="there is no run folder"):
        read_hang(tmp_path / "nowhere")
    assert blocked_by(tmp_path) == ""
