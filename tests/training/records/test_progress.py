"""What a run leaves on a terminal and elsewhere: lines of losses."""

import io
import re
from types import SimpleNamespace

import pytest

from pipeloom.training.records import progress
from pipeloom.training.records.progress import StepProgress


class Terminal(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def lines_of(monkeypatch, is_terminal, num_steps, step_s, shown):
    """The lines that stay of a run, of whose steps some are shown; what a terminal deletes again does not stay."""
    stream, now_s = Terminal(is_terminal), [0.0]
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with StepProgress(num_steps) as steps:
        for step in range(1, shown + 1):
            now_s[0] += step_s
            steps.show(step, loss=10.0 - step / 100, grad_norm=1.0, tokens_per_s=5.0)
    return re.findall(r"^(?:.*[\rK])?step (\d+)/\d+  loss (\d\.\d{4})  grad", stream.getvalue(), re.M)


def test_a_terminal_keeps_a_line_of_loss_for_every_tenth_of_the_steps_and_the_last_one(monkeypatch):
    found = lines_of(monkeypatch, True, 40, 2.0, 40)
    assert found == [(str(step), f"{10 - step / 100:.4f}") for step in range(4, 41, 4)]


@pytest.mark.parametrize("shown", [40, 33])
def test_a_short_or_interrupted_run_leaves_the_line_of_its_last_step_on_a_terminal(monkeypatch, shown):
    assert [step for step, _ in lines_of(monkeypatch, True, 40, 0.1, shown)] == [str(shown)]


def test_elsewhere_there_are_lines_from_the_first_step_on_and_none_twice(monkeypatch):
    assert [int(step) for step, _ in lines_of(monkeypatch, False, 30, 0.1, 30)] == [1, *range(2, 31, 2)]
    assert [int(step) for step, _ in lines_of(monkeypatch, False, 30, 0.1, 5)] == [1, 2, 4, 5]


def test_a_terminal_that_goes_away_stops_nothing(monkeypatch):
    class Going(Terminal):
        is_there = True

        def write(self, text):
            if not self.is_there:
                raise OSError(5, "Input/output error")
            return super().write(text)

    for is_terminal in (True, False):
        stream = Going(is_terminal)
        monkeypatch.setattr("sys.stdout", stream)
        with StepProgress(2) as steps:
            steps.show(1, loss=1.0, grad_norm=1.0, tokens_per_s=1.0)
            stream.is_there = False
            steps.show(2, loss=1.0, grad_norm=1.0, tokens_per_s=1.0)
