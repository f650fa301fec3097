"""Seconds of work: the median of the runs behind the first one, by the host's clock."""

from types import SimpleNamespace

import torch

from pipeloom.measure import stopwatch


def test_the_first_run_does_not_count_and_neither_does_what_comes_before_each(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock.now_s)
    lasts, called = iter([50.0, 3.0, 1.0, 7.0]), []

    def run():
        clock.now_s += next(lasts)

    def before():
        called.append(clock.now_s)
        clock.now_s += 100.0

    assert stopwatch.median_seconds(run, 3, torch.device("cpu"), before) == 3.0
    assert len(called) == 4


def test_what_comes_before_the_runs_of_a_sample_is_not_timed():
    clock, order = iter([10.0, 16.0]), []

    def now():
        order.append("clock")
        return next(clock)

    sample = stopwatch.sample_of(lambda: order.append("run"), now, factor=0.5, before=lambda: order.append("meet"))
    assert sample(2) == 0.5 * 6 / 2
    assert order == ["meet", "clock", "run", "run", "clock"]
