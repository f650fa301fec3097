"""``relay.c`` in Python, where there is no C compiler. Run as ``python relay.py RATE_MBIT LATENCY_MS FD...``."""

import os
import select
import sys
import time
from collections import OrderedDict, deque

_LARGEST_PACKET = 65536
_BATCH = 16
_QUANTUM = 9000
_NETWORK = bytes([10, 78, 0])


class Wire:
    """An uplink or a downlink: one packet at a time; the connections that wait take turns, byte for byte."""

    def __init__(self, s_per_byte: float) -> None:
        self._s_per_byte = s_per_byte
        self._flows: OrderedDict[bytes, deque[tuple[float, bytes]]] = OrderedDict()
        self._deficit: dict[bytes, int] = {}
        self._free_s = 0.0

    def add(self, time_s: float, packet: bytes) -> None:
        """Let a packet wait. A connection that did not wait gets a turn behind the current one."""
        flow = _flow_of(packet)
        if flow not in self._flows:
            self._flows[flow], self._deficit[flow] = deque(), _QUANTUM
            for other in list(self._flows)[1:-1]:
                self._flows.move_to_end(other)
        self._flows[flow].append((time_s, packet))

    def next_s(self) -> float | None:
        """When the next packet may begin."""
        return self._free_s if self._flows else None

    def send(self, now_s: float) -> list[tuple[float, float, bytes]]:
        """The packets that begin up to a moment, with their begins and ends."""
        sent: list[tuple[float, float, bytes]] = []
        while self._flows and self._free_s <= now_s:
            flow, queue = next(iter(self._flows.items()))
            time_s, packet = queue[0]
            if len(packet) > self._deficit[flow]:
                self._deficit[flow] += _QUANTUM
                self._flows.move_to_end(flow)
                continue
            self._deficit[flow] -= len(packet)
            queue.popleft()
            if not queue:
                del self._flows[flow], self._deficit[flow]
            begin_s = max(self._free_s, time_s)
            self._free_s = begin_s + len(packet) * self._s_per_byte
            sent.append((begin_s, self._free_s, packet))
        return sent


def _flow_of(packet: bytes) -> bytes:
    """Addresses and ports."""
    header = (packet[0] & 15) * 4
    return packet[12:20] + packet[header : header + 4]


class Relay:
    """The network between hosts; see ``relay.c``.

    Args:
        rate_mbit: of each uplink and downlink; 0 for no limit.
        latency_ms: one way.
        num_hosts: host ``i`` has the address 10.78.0.(i + 1).
    """

    def __init__(self, rate_mbit: float, latency_ms: float, num_hosts: int) -> None:
        s_per_byte = 8 / (rate_mbit * 1e6) if rate_mbit > 0 else 0.0
        self._latency_s = latency_ms / 1e3
        self._up = [Wire(s_per_byte) for _ in range(num_hosts)]
        self._down = [Wire(s_per_byte) for _ in range(num_hosts)]
        self._arriving: list[deque[tuple[float, bytes]]] = [deque() for _ in range(num_hosts)]

    def take(self, host: int, packet: bytes, now_s: float) -> None:
        """Take a packet from a host; what is for no host is dropped."""
        if len(packet) >= 20 and packet[0] >> 4 == 4 and packet[16:19] == _NETWORK and self._is_host(packet[19] - 1):
            self._up[host].add(now_s, packet)

    def _is_host(self, number: int) -> bool:
        return 0 <= number < len(self._up)

    def arrived(self, now_s: float) -> list[tuple[int, bytes]]:
        """The packets that reach a host up to a moment, with the host."""
        for wire in self._up:
            for begin_s, _, packet in wire.send(now_s):  # the downlink begins with the packet's first byte
                self._down[packet[19] - 1].add(begin_s, packet)
        found: list[tuple[int, bytes]] = []
        for host, wire in enumerate(self._down):
            self._arriving[host].extend((end_s + self._latency_s, packet) for _, end_s, packet in wire.send(now_s))
            while self._arriving[host] and self._arriving[host][0][0] <= now_s:
                found.append((host, self._arriving[host].popleft()[1]))
        return found

    def next_s(self) -> float | None:
        """When something happens next without a new packet."""
        times = [wire.next_s() for wire in self._up + self._down] + [queue[0][0] for queue in self._arriving if queue]
        return min((time_s for time_s in times if time_s is not None), default=None)


def main(rate_mbit: float, latency_ms: float, devices: list[int]) -> None:
    """Relay between TUN devices until the process is killed."""
    relay, poll = Relay(rate_mbit, latency_ms, len(devices)), select.epoll()
    for device in devices:
        poll.register(device, select.EPOLLIN)
    while True:
        for host, packet in relay.arrived(time.monotonic()):
            os.write(devices[host], packet)
        next_s = relay.next_s()
        for device, _ in poll.poll(None if next_s is None else max(0.0, next_s - time.monotonic())):
            _read(relay, devices.index(device), device)


def _read(relay: Relay, host: int, device: int) -> None:
    for _ in range(_BATCH):
        try:
            relay.take(host, os.read(device, _LARGEST_PACKET), time.monotonic())
        except BlockingIOError:
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), [int(word) for word in sys.argv[3:]])
