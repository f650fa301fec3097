"""Messages between two ranks of one host through memory that both map, without threads.

The sender copies a tensor into a block of shared memory and writes a line to a pipe. The receiver reads the line,
copies the block into a tensor when that is needed, and returns the block through a second pipe. The kernel orders the
copies by the pipes, wakes a receiver that waits, and closes the pipes of a process that ends, so that its peer
notices.
"""

import fcntl
import mmap
import os
import resource
import secrets
import select
import socket
import struct
import termios
import time
from collections import defaultdict, deque
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import BoundaryError, PeerLostError, RunError
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.system.room import take_room
from pipeloom.terminal.words import format_bytes

_LINE = struct.Struct("=qqd")
"""A message: offset and bytes of its block, and the sender's clock, which all processes of a host share."""
_PLACE = struct.Struct("=q")
"""A block that is returned: its offset."""
_KEPT_BLOCKS, _KEPT_BYTES = 8, 256 * 1024
"""Blocks are returned together when there are so many, or so many bytes."""
_SPIN_S = 5e-5
"""A receiver looks for so long before it sleeps, where its last wait was short, too: waking it takes as long."""
_MOST_LINES = 1024
"""Lines of one read: whole lines, since a write of less than a page is never divided."""


class Ends(NamedTuple):
    """File descriptors of one end of a directed edge.

    Attributes:
        memory: of the blocks.
        messages: pipe from sender to receiver.
        returns: pipe from receiver to sender.
    """

    memory: int
    messages: int
    returns: int

    def close(self) -> None:
        """Close them; the other end reads the end of its pipe."""
        for one in self:
            os.close(one)


class Listener:
    """The receiver's offer to share memory: a Unix socket with a random name that only this network namespace has.

    Attributes:
        name: ``uint8[32]`` for the sender; zeros where it is not open, or where the system has no such memory.

    Args:
        is_open: whether to offer it.
    """

    NAME_BYTES = 32

    def __init__(self, *, is_open: bool) -> None:
        self._socket: socket.socket | None = None
        self.name = torch.zeros(self.NAME_BYTES, dtype=torch.uint8)
        if is_open and hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED"):
            name = secrets.token_hex(self.NAME_BYTES // 2).encode()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(_address(name))
            self._socket.listen(1)
            self.name = torch.tensor(list(name), dtype=torch.uint8)

    def accept(self, timeout_s: float) -> Ends:
        """Take the descriptors of a sender that has connected.

        Raises:
            PeerLostError: it closed the connection.
        """
        assert self._socket is not None, "the sender found no socket to connect to"
        self._socket.settimeout(timeout_s)
        while True:
            connection, _ = self._socket.accept()
            with connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                # Any process of this host may connect; only one of this user is the rank that was given the name.
                if struct.unpack("3i", credentials)[1] == os.geteuid():
                    _, descriptors, _, _ = socket.recv_fds(connection, 1, len(Ends._fields))
                    if len(descriptors) != len(Ends._fields):
                        raise PeerLostError("a rank of this host closed the connection")
                    ends = Ends(*descriptors)
                    os.set_blocking(ends.messages, False)
                    return ends

    def close(self) -> None:
        """End the offer."""
        if self._socket is not None:
            self._socket.close()


def connect(name: Tensor) -> Ends | None:
    """Share memory with the receiver that listens under a name.

    Returns:
        ``None`` if the receiver is not on this host, or if this process may not write large files (``ulimit -f``):
        the system applies that limit to shared memory, too, and its blocks are made while the schedule runs.
    """
    if not name.any() or resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with connection:
        try:
            connection.connect(_address(bytes(name.tolist())))
        except OSError:  # another host, or another network of this host
            return None
        memory = os.memfd_create("pipeloom-messages", os.MFD_CLOEXEC)
        (messages_out, messages_in), (returns_out, returns_in) = os.pipe(), os.pipe()
        socket.send_fds(connection, [b"\0"], [memory, messages_out, returns_in])
        os.close(messages_out)
        os.close(returns_in)
        os.set_blocking(returns_out, False)
        return Ends(memory, messages_in, returns_out)


def _address(name: bytes) -> bytes:
    # A zero byte first: no file, and visible in one network namespace, so that ranks on emulated hosts do not meet.
    return b"\0pipeloom-" + name


class _Block(NamedTuple):
    offset: int
    spec: TensorSpec
    tensor: Tensor

    @classmethod
    def map(cls, memory: int, offset: int, spec: TensorSpec) -> "_Block":
        """Map a block that holds a tensor."""
        size = spec.nbytes
        shared = torch.frombuffer(mmap.mmap(memory, max(1, size), offset=offset), dtype=torch.uint8)
        return cls(offset, spec, shared[:size].view(spec.dtype).view(spec.shape))


class Sent(UnderWay):
    """A message that its sender has copied."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin, self.end = begin_s, end_s

    def is_done(self) -> bool:
        """Always: the sender may change its tensor."""
        return True


class SharedSender:
    """The sending end of a directed edge.

    Args:
        ends: from ``connect``.
        peer: the receiving rank.
    """

    def __init__(self, ends: Ends, peer: int) -> None:
        self._ends, self._peer = ends, peer
        self._size = 0
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[_Block]] = defaultdict(list)
        self._used: dict[int, tuple[_Block, list[_Block]]] = {}

    def send(self, tensor: Tensor) -> Sent:
        """Send a copy of a tensor.

        Raises:
            PeerLostError: the other rank ended.
            RunError: there is no memory for another message.
        """
        begin_s = time.perf_counter()
        blocks = self._free[tensor.shape, tensor.dtype]
        if not blocks:
            self._take_returned()
        block = blocks.pop() if blocks else self._grown(TensorSpec.of(tensor))
        self._used[block.offset] = block, blocks
        block.tensor.copy_(tensor)
        end_s = time.perf_counter()
        try:
            os.write(self._ends.messages, _LINE.pack(block.offset, tensor.nbytes, end_s))
        except OSError as error:
            raise PeerLostError(f"rank {self._peer} closed the connection: {error}") from error
        return Sent(begin_s, end_s)

    def _take_returned(self) -> None:
        try:
            returned = os.read(self._ends.returns, _MOST_LINES * _PLACE.size)
        except BlockingIOError:
            return
        for (offset,) in _PLACE.iter_unpack(returned):
            block, blocks = self._used.pop(offset)
            blocks.append(block)

    def _grown(self, spec: TensorSpec) -> _Block:
        """A new block: the receiver still has all others, as many as the schedule lets the sender be ahead."""
        offset = self._size
        room = -(-max(1, spec.nbytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            take_room(self._ends.memory, room, offset)
        except OSError as error:
            message = f"a message of {format_bytes(spec.nbytes)} to rank {self._peer}"
            raise RunError(f"there is no shared memory for {message}: {error.strerror}") from None
        self._size += room
        return _Block.map(self._ends.memory, offset, spec)

    def end(self) -> None:
        """Close this end."""
        self._ends.close()


class SharedReceiver:
    """The receiving end of a directed edge.

    Args:
        ends: from ``Listener.accept``.
        peer: the sending rank.
    """

    def __init__(self, ends: Ends, peer: int) -> None:
        self._ends, self._peer = ends, peer
        self._blocks: dict[int, _Block] = {}
        self._arrived: deque[tuple[int, int, float]] = deque()
        self._open: deque[Receipt] = deque()
        self._poll = select.poll()
        self._poll.register(ends.messages, select.POLLIN)
        self._has_ended = False
        self._used: list[int] = []
        self._used_bytes = 0
        self._spins = True

    def receive(self, spec: TensorSpec) -> "Receipt":
        """Receive the next tensor, into a fresh buffer when it is taken."""
        receipt = Receipt(self, spec)
        if self._arrived:
            receipt.arrive(self._arrived.popleft())
        else:
            self._open.append(receipt)
        return receipt

    def look(self) -> None:
        """Assign messages that have arrived to receives in their order."""
        try:
            found = os.read(self._ends.messages, _MOST_LINES * _LINE.size)
        except BlockingIOError:
            return
        self._has_ended = not found
        for line in _LINE.iter_unpack(found):
            if self._open:
                self._open.popleft().arrive(line)
            else:
                self._arrived.append(line)

    def wait_for(self, receipt: "Receipt", timeout_s: float) -> bool:
        """Wait until the message of a receive has arrived; ``False`` if that takes too long."""
        begin_s = now_s = time.perf_counter()
        while receipt.line is None and not self._has_ended:
            if self._spins and now_s - begin_s <= _SPIN_S:
                os.sched_yield()  # to the sender, if there are fewer cores than ranks
            else:
                # Whole milliseconds, rounded up; ready at once where the other rank has ended.
                left_s = begin_s + timeout_s - now_s
                if left_s <= 0 or not self._poll.poll(left_s * 1e3 + 1):
                    return False
            self.look()
            now_s = time.perf_counter()
        self._spins = now_s - begin_s < 2 * _SPIN_S
        return True

    def has_arrived(self, receipt: "Receipt") -> bool:
        """Whether the message of a receive is in the pipe or has been read; other threads may call it."""
        waiting = list(self._open)
        if receipt.line is not None or receipt not in waiting:
            return True
        (unread,) = struct.unpack("i", fcntl.ioctl(self._ends.messages, termios.FIONREAD, bytes(4)))
        return waiting.index(receipt) < unread // _LINE.size

    def copy(self, line: tuple[int, int, float] | None, spec: TensorSpec) -> Tensor:
        """The tensor of a message, whose block the sender may use again."""
        if line is None:
            raise PeerLostError(f"rank {self._peer} closed the connection")
        offset, size, _ = line
        block = self._blocks.get(offset)
        if block is None or (block.spec is not spec and block.spec != spec):
            if size != spec.nbytes:
                raise BoundaryError(f"rank {self._peer} sent {size} bytes, but {spec} was agreed on")
            block = self._blocks[offset] = _Block.map(self._ends.memory, offset, spec)
        tensor = block.tensor.clone()
        self._used.append(offset)
        self._used_bytes += size
        if len(self._used) >= _KEPT_BLOCKS or self._used_bytes >= _KEPT_BYTES:
            with suppress(BrokenPipeError):  # a sender that has ended needs no block
                os.write(self._ends.returns, b"".join(map(_PLACE.pack, self._used)))
            self._used.clear()
            self._used_bytes = 0
        return tensor

    @property
    def has_ended(self) -> bool:
        """Whether the sender has ended, and all that it sent has been read."""
        return self._has_ended

    def end(self) -> None:
        """Close this end."""
        self._ends.close()


class Receipt(UnderWay):
    """A receive. It is finished when its message has arrived.

    Attributes:
        line: of the message; ``None`` before it has arrived.
    """

    def __init__(self, receiver: SharedReceiver, spec: TensorSpec) -> None:
        self._receiver, self._spec = receiver, spec
        self.begin = self.end = time.perf_counter()
        self.line: tuple[int, int, float] | None = None

    def arrive(self, line: tuple[int, int, float]) -> None:
        """Assign the message; the receive ended when the sender had copied it, if it was posted by then."""
        self.line, self.end = line, max(self.begin, line[2])

    def is_done(self) -> bool:
        """Whether the message has arrived, or none will."""
        if self.line is None:
            self._receiver.look()
        return self.line is not None or self._receiver.has_ended

    def has_passed(self) -> bool:
        """Whether the message has arrived, whether or not the rank has looked."""
        return self._receiver.has_arrived(self)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the message; ``False`` if that takes longer than ``timeout_s``."""
        return self._receiver.wait_for(self, timeout_s)

    def take(self) -> Tensor:
        """The tensor, once.

        Raises:
            PeerLostError: the other rank ended.
            BoundaryError: it sent another number of bytes.
        """
        return self._receiver.copy(self.line, self._spec)
