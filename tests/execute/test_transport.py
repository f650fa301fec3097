"""What a transport does between messages: lanes' deadlines, the rounds of their threads, what a device orders."""

import time
import weakref
from collections import deque
from functools import partial
from types import SimpleNamespace

import torch

from pipeloom.execute.communication import transport
from pipeloom.execute.communication.transport import _Lane, _LaneTransfer, _on_stream, _Rounds

MOST_S = 10.0


class Silent:
    """Work that ends by its timeout alone, as gloo's: after whole milliseconds, rounded down."""

    def __init__(self, clock):
        self.clock = clock

    def wait(self, timeout):
        self.clock.now_s += int(timeout.total_seconds() * 1e3) / 1e3
        raise RuntimeError("Timed out waiting")


def test_a_timeout_is_no_lost_rank(monkeypatch):
    clock = SimpleNamespace(now_s=5.0)
    monkeypatch.setattr(transport.time, "perf_counter", lambda: clock.now_s)
    lane = object.__new__(_Lane)
    lane._peer, lane.is_receive = 1, True
    transfer = _LaneTransfer(lane, Silent(clock), None, 5.0)
    lane._open = deque([transfer])
    for left_s in (1.0, 0.9996, 0.0004, 0.0):
        assert not lane._end_front(clock.now_s + left_s)
    assert not transfer.has_ended


class OpenLane:
    """Receives that stay open; counts how often its thread is called."""

    is_receive = True
    has_open = True

    def __init__(self):
        self.num_calls = 0

    def call(self):
        self.num_calls += 1


def test_a_receive_that_stays_open_is_called_for_though_nobody_announces_more():
    rounds, lane = _Rounds(), OpenLane()
    rounds.lanes.append(lane)
    end_s = time.perf_counter() + 0.1
    while time.perf_counter() < end_s:  # a burst, in which receives are left to the rank
        rounds.announce()
    before, end_s = lane.num_calls, time.perf_counter() + MOST_S
    while lane.num_calls == before and time.perf_counter() < end_s:
        time.sleep(1e-3)
    rounds.end()
    assert lane.num_calls > before


def test_nobody_is_called_again_and_again_when_nothing_is_open():
    rounds, lane = _Rounds(), OpenLane()
    lane.has_open = False
    rounds.lanes.append(lane)
    rounds.announce()
    time.sleep(0.1)
    rounds.end()
    assert lane.num_calls <= 1


def test_a_sent_tensor_is_not_kept_until_the_end_of_the_step():
    tensor = torch.zeros(3)
    kept = weakref.ref(tensor)
    transfer = _on_stream(tensor, 1, False, partial(SimpleNamespace, outputs=[tensor]))  # as NCCL's work does
    del tensor
    assert kept() is None
    assert transfer.is_done()
    assert transfer.take() is None


def test_a_receive_is_waited_for_and_handed_over_once():
    tensor, waits = torch.zeros(3), []
    transfer = _on_stream(tensor, 1, True, lambda: SimpleNamespace(wait=lambda: waits.append(1)))
    assert transfer.is_done()
    assert waits == [1]
    assert transfer.take() is tensor
    assert transfer.take() is None
