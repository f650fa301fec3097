"""Batches are read by a thread while the step before runs: the same batches, and errors at their step."""

import json
import threading
import time

import numpy as np
import pytest
from small_run import small_run

from pipeloom.data.order import Order
from pipeloom.data.windows import Mixture, TokenWindows
from pipeloom.errors import RunError
from pipeloom.training import loading
from pipeloom.training.loading import Loading
from pipeloom.training.run import train


def windows(tokens=600, seed=0):
    return TokenWindows(np.arange(tokens, dtype=np.uint16), 5, seed)


def mixture():
    return Mixture([windows(seed=3), windows(90, seed=4)], [3, 1], [("a", "a"), ("b", "b")])


@pytest.mark.parametrize("make", [windows, mixture])
def test_a_thread_reads_the_batches_and_a_checkpoint_has_the_counts_of_taken_ones(make):
    found, expected = Loading(make(), 7, 1, 30), make()
    assert found.position == make().position(0)
    for index in range(30):
        assert np.array_equal(found.take(), expected.batch(index, 7))
        assert found.position == make().position((index + 1) * 7)
    found.close()


class Slow:
    """Windows that note when they are read, and fail or hang on request."""

    def __init__(self, *, fails_at=None, hangs=False):
        self.began, self.hangs, self.fails_at = [threading.Event() for _ in range(9)], hangs, fails_at

    def position(self, num_windows):
        return []

    def batch(self, index, size):
        self.began[index].set()
        if index == self.fails_at:
            raise OSError(5, "Input/output error", "tokens.bin")
        if self.hangs:
            time.sleep(3)
        return np.full((size, 2), index)


def test_the_next_batch_is_read_during_the_step_and_none_behind_the_last():
    slow = Slow()
    found = Loading(slow, 1, 1, 3)
    for index in range(3):
        found.take()
        assert slow.began[min(index + 1, 2)].wait(5)
    assert not slow.began[3].wait(0.02)
    assert found.waited_s < 5


def test_an_error_is_that_of_the_step_whose_data_it_is():
    found = Loading(Slow(fails_at=2), 1, 41, 9)
    assert found.take()[0, 0] == 0
    assert found.take()[0, 0] == 1
    with pytest.raises(RunError, match=r"cannot read the data of step 43: Input/output error"):
        found.take()


def test_a_run_that_ends_does_not_wait_for_a_file_system_that_hangs(monkeypatch):
    monkeypatch.setattr(loading, "_PATIENCE_S", 0.05)
    found = Loading(Slow(hangs=True), 1, 1, 9)
    begin = time.monotonic()
    found.close()
    found.close()
    assert time.monotonic() - begin < 2


def test_a_thread_computes_the_same_order():
    one, other = Order(5, 3, 1000), Order(5, 3, 1000)
    other.begin()
    other.begin()
    assert np.array_equal(one.places, other.places)
    assert sorted(one.places) == list(range(1000))


def test_runs_measure_their_waits_and_report_unreadable_data(tmp_path, monkeypatch):
    config = small_run(tmp_path)
    train(config, quiet=True)
    lines = [json.loads(line) for line in (config.output.folder / "metrics.jsonl").read_text().splitlines()]
    assert [0 <= line["data_wait_s"] < line["step_time_s"] for line in lines] == [True] * config.training.steps
    read = TokenWindows.batch

    def fails(self, index, size):
        if index == 2:
            raise OSError(5, "Input/output error", "tokens.bin")
        return read(self, index, size)

    monkeypatch.setattr(TokenWindows, "batch", fails)
    with pytest.raises(RunError, match="cannot read the data of step 3: Input/output error"):
        train(small_run(tmp_path / "run"), quiet=True)
