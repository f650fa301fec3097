"""Ranks that wait for each other in the middle of a stage, all in one process."""

import threading

import pytest
import torch
from in_process import Turn, blocking_groups_in_process, run_together, wait_for


def test_ranks_meet_in_the_middle_of_a_function():
    def rank(group):
        def run():
            tensor = torch.tensor([float(group.index + 1)])
            group.sum(tensor)
            group.max(tensor := tensor * (group.index + 1))
            return tensor.item()

        return run

    assert run_together([rank(group) for group in blocking_groups_in_process([range(3)]).values()]) == [18.0] * 3


def test_an_error_reaches_whoever_asks():
    def steps():
        yield from ()
        raise ZeroDivisionError("no luck today")

    with pytest.raises(ZeroDivisionError, match="no luck today"):
        next(Turn(steps()))


def test_a_turn_that_nobody_asks_again_ends():
    seen = []

    def steps():
        try:
            wait_for(lambda: False)
        finally:
            seen.append(threading.current_thread())
        yield from ()

    turn = Turn(steps())
    assert not next(turn).is_done()
    turn.close()
    threads = [thread for thread in threading.enumerate() if thread.name == "rank"]
    for thread in threads:
        thread.join(5)
    assert len(seen) == 1


def test_outside_a_turn_waiting_is_a_mistake():
    with pytest.raises(AssertionError, match="take turns"):
        wait_for(lambda: False)
