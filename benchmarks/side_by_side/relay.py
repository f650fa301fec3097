"""``relay.c`` in Python, where there is no C compiler. Run as ``python relay.py RATE_MBIT LATENCY_MS FD...``."""

import os
import select
import sys
import time
from collections import deque

_LARGEST_PACKET = 65536
_BATCH = 64
_NETWORK = bytes([10, 78, 0])


class Relay:
    """The network between hosts; see ``relay.c``.

    Args:
        rate_mbit: of each uplink and downlink; 0 for no limit.
        latency_ms: one way.
        devices: file descriptors of the hosts' TUN devices.
    """

    def __init__(self, rate_mbit: float, latency_ms: float, devices: list[int]) -> None:
        self._s_per_byte = 8 / (rate_mbit * 1e6) if rate_mbit > 0 else 0.0
        self._latency_s = latency_ms / 1e3
        self._devices = devices
        self._uplink_free_s = [0.0] * len(devices)
        self._downlink_free_s = [0.0] * len(devices)
        self._under_way: list[deque[tuple[float, bytes]]] = [deque() for _ in devices]

    def send_on(self, host: int, packet: bytes, now_s: float) -> None:
        """Take a packet from a host; what is for no host is dropped."""
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != _NETWORK:
            return
        target = packet[19] - 1
        if not 0 <= target < len(self._devices):
            return
        busy_s = len(packet) * self._s_per_byte
        sent_s = max(self._uplink_free_s[host], now_s) + busy_s
        received_s = max(self._downlink_free_s[target] + busy_s, sent_s)
        self._uplink_free_s[host], self._downlink_free_s[target] = sent_s, received_s
        self._under_way[target].append((received_s + self._latency_s, packet))

    def arrived(self, host: int, now_s: float) -> list[bytes]:
        """The packets that a host gets now."""
        queue, found = self._under_way[host], []
        while queue and queue[0][0] <= now_s:
            found.append(queue.popleft()[1])
        return found

    def next_s(self) -> float | None:
        """When the next packet arrives."""
        return min((queue[0][0] for queue in self._under_way if queue), default=None)

    def run(self) -> None:
        """Relay until the process is killed."""
        poll = select.epoll()
        host_of = {device: host for host, device in enumerate(self._devices)}
        for device in self._devices:
            poll.register(device, select.EPOLLIN)
        while True:
            for host, device in enumerate(self._devices):
                for packet in self.arrived(host, time.monotonic()):
                    os.write(device, packet)
            next_s = self.next_s()
            for device, _ in poll.poll(None if next_s is None else max(0.0, next_s - time.monotonic())):
                self._read(host_of[device], device)

    def _read(self, host: int, device: int) -> None:
        for _ in range(_BATCH):
            try:
                self.send_on(host, os.read(device, _LARGEST_PACKET), time.monotonic())
            except BlockingIOError:
                return


if __name__ == "__main__":
    Relay(float(sys.argv[1]), float(sys.argv[2]), [int(word) for word in sys.argv[3:]]).run()
