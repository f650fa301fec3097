"""Where the threads of a rank are, in its log: only while the rank stands still."""

from types import SimpleNamespace

from pipeloom.runs.action_log import ActionLog, read_ranks
from pipeloom.training import pipeline
from pipeloom.workload.layout import Coordinates


def test_a_rank_that_goes_on_drops_the_note_of_an_earlier_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "where_threads_are", lambda: "MainThread: profiled_step.py:40 profile_stages")
    log = ActionLog(tmp_path, 0, 1, Coordinates(0, 0, 0))
    rank = SimpleNamespace(_log=log, _running=SimpleNamespace(note_ended=lambda: None))
    found = []
    for is_quiet in (True, False):
        pipeline.Pipeline._beat(rank, is_quiet)
        found.append(read_ranks(tmp_path)[0].text)
    assert found == ["MainThread: profiled_step.py:40 profile_stages", ""]
