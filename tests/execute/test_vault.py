"""Memory that one lane puts aside and another fetches: who waits is told when there is nothing to wait for."""

import threading

import pytest
import torch

from pipeloom.errors import RunError
from pipeloom.execute.clock import Clock
from pipeloom.execute.lanes import ThreadLane
from pipeloom.execute.parts.moves import Vault

CPU = torch.device("cpu")


def waiting(vault, lane):
    """A job under way that waits for something."""
    is_there = threading.Event()

    def job():
        finish = vault.until((0,))
        is_there.set()
        yield finish

    pending = lane.start(job())
    assert is_there.wait(10)
    return pending


def test_who_waits_gets_what_is_put_there():
    vault, lane = Vault(waits=True), ThreadLane(Clock())
    pending = waiting(vault, lane)
    vault.put((0,), torch.ones(3), CPU)
    assert pending.wait(10)
    pending.take()
    assert torch.equal(vault.fetch((0,), CPU), torch.ones(3))
    lane.close()


def test_after_a_failed_step_nobody_waits_for_anything_of_it():
    vault, lane = Vault(waits=True), ThreadLane(Clock())
    pending = waiting(vault, lane)
    vault.begin()
    assert pending.wait(10)
    behind = lane.start(iter(()))
    assert behind.wait(10)
    for one in (pending, behind):  # the lane does nothing more
        with pytest.raises(RunError, match="the step was given up"):
            one.take()
    lane.close()
