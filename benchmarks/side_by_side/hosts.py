"""Hosts on this machine: network namespaces, joined by a relay that has a rate and a latency."""

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from side_by_side.case import Link

INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 9000
_SETTINGS = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")
"""Links that lose nothing and let connections take turns need no probing. BBR, which some machines use, takes a while
to notice that a link is its own again, another while in each run."""
_RELAY_PRIORITY = 2
"""Above the ranks, which have 1: a network does not wait for its hosts."""


def why_not() -> str | None:
    """Why this machine cannot play several hosts, for people; ``None`` if it can."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command 'ip' is missing (Debian: apt-get install iproute2)"
    if not Path("/dev/net/tun").exists():
        return "the device /dev/net/tun is missing"
    words = ["ip", "netns", "add", f"pipeloom-{os.getpid()}"]
    probe = subprocess.run(words, check=False, capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces are not allowed here: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"pipeloom-{os.getpid()}"], check=True)
    return None


def relay_kind() -> str:
    """What relays packets here."""
    return "a C relay" if shutil.which("gcc") else "a relay in Python (no gcc was found)"


@contextmanager
def shaped_hosts(count: int, link: Link) -> Iterator[list[str]]:
    """Make hosts with a network between them, and remove them afterwards.

    Yields:
        For each host the name of its network namespace; see ``enter``.
    """
    names = [f"pipeloom-{os.getpid()}-{host}" for host in range(count)]
    devices: list[int] = []
    relay: subprocess.Popen[bytes] | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
            for host, name in enumerate(names):
                _ip("netns", "add", name)
                devices.append(_tunnel(name))
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", INTERFACE)
                for setting in _SETTINGS:
                    _ip("netns", "exec", name, "sysctl", "-qw", setting)
                _ip("-n", name, "link", "set", INTERFACE, "mtu", str(_MTU), "txqueuelen", "2000", "up")
            words = [f"{link.rate_mbit}", f"{link.latency_ms}", *map(str, devices)]
            relay = subprocess.Popen([*_relay_command(Path(folder)), *words], pass_fds=devices)
            with suppress(OSError):
                os.sched_setscheduler(relay.pid, os.SCHED_RR, os.sched_param(_RELAY_PRIORITY))
            yield names
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for device in devices:
            os.close(device)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def enter(name: str) -> None:
    """Move the calling thread, and those that it starts, to a host."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    finally:
        os.close(descriptor)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _tunnel(name: str) -> int:
    """The TUN device of a host, opened by a thread that enters its namespace."""
    found: list[int | OSError] = []

    def open_there() -> None:
        try:
            enter(name)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
            found.append(device)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, OSError):
        raise result
    return result


def _relay_command(folder: Path) -> list[str]:
    here, program = Path(__file__).parent, folder / "relay"
    if shutil.which("gcc") is None:
        return [sys.executable, str(here / "relay.py")]
    subprocess.run(["gcc", "-O2", "-o", str(program), str(here / "relay.c")], check=True)
    return [str(program)]
