"""The network between hosts: rates, latency, turns."""

import pytest

from side_by_side.relay import Relay


def packet(source, target, size, port=1):
    head = bytes([0x45]) + bytes(11) + bytes([10, 78, 0, source + 1]) + bytes([10, 78, 0, target + 1])
    return head + bytes([port, 0, 0, 0]) + bytes(size - 24)


def arrivals(relay, until_s=10.0, tick_s=1e-3):
    """Size, port and time of what arrives, looked at in small ticks."""
    found = []
    for tick in range(int(until_s / tick_s) + 1):
        found += [(host, data, tick * tick_s) for host, data in relay.arrived(tick * tick_s)]
    return found


def test_a_packet_takes_its_bytes_at_the_rate_and_a_latency():
    relay = Relay(rate_mbit=8e-3, latency_ms=500, num_hosts=2)  # a thousand bytes a second
    relay.take(0, packet(0, 1, 1000), 0.0)
    relay.take(0, packet(0, 1, 1000), 0.0)
    times = [(host, time_s) for host, _, time_s in arrivals(relay)]
    assert times == [(1, pytest.approx(1.5, abs=2e-3)), (1, pytest.approx(2.5, abs=2e-3))]
    assert relay.next_s() is None


def test_two_senders_share_the_downlink_and_two_receivers_the_uplink():
    relay = Relay(8e-3, 0, 3)
    relay.take(0, packet(0, 2, 1000), 0.0)
    relay.take(1, packet(1, 2, 1000), 0.0)
    assert [round(time_s) for _, _, time_s in arrivals(relay)] == [1, 2]
    relay = Relay(8e-3, 0, 3)
    relay.take(2, packet(2, 0, 1000), 0.0)
    relay.take(2, packet(2, 1, 1000), 0.0)
    assert [round(time_s) for _, _, time_s in arrivals(relay)] == [1, 2]


def test_both_directions_run_at_once():
    relay = Relay(8e-3, 0, 2)
    relay.take(0, packet(0, 1, 1000), 0.0)
    relay.take(1, packet(1, 0, 1000), 0.0)
    assert [round(time_s) for _, _, time_s in arrivals(relay)] == [1, 1]


def test_connections_take_turns_byte_for_byte():
    relay = Relay(8 * 9e-3, 0, 2)  # nine thousand bytes a second
    for _ in range(4):
        relay.take(0, packet(0, 1, 9000, port=1), 0.0)
    relay.take(0, packet(0, 1, 100, port=2), 0.0)
    for _ in range(2):
        relay.take(0, packet(0, 1, 9000, port=3), 0.0)
    ports = [data[20] for _, data, _ in arrivals(relay)]
    assert ports[0] == 1
    assert ports.index(2) <= 2  # not behind all of the first connection
    assert ports[-1] == 1
    assert [port for port in ports if port != 2] == [1, 3, 1, 3, 1, 1]


def test_what_is_for_no_host_is_dropped():
    relay = Relay(8, 0, 2)
    for wrong in (
        packet(0, 5, 100),
        b"\x60" + packet(0, 1, 100)[1:],
        b"\x45",
        packet(0, 1, 100).replace(b"\x4e", b"a"),
    ):
        relay.take(0, wrong, 0.0)
    assert arrivals(relay, 0.1) == []
