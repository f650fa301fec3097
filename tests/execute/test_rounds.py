"""Lanes' threads are called for what nobody waits for, however quickly transfers followed each other before."""

import time

from pipeloom.execute.communication.transport import _Rounds

MOST_S = 10.0


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
