"""A lane whose tensor does not come by the deadline says so, and not that the other rank went away."""

from collections import deque
from types import SimpleNamespace

from pipeloom.execute.communication import transport
from pipeloom.execute.communication.transport import _Lane, _LaneTransfer


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
